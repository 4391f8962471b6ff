//! Measures rankings given as JSON lines, for comparison with reference programs:
//! `{"judgements": {"id": 2, …}, "ranking": [["id", 0.7], …]}` gives one line of figures.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};

use ragstone_core::measures::measure;

#[derive(serde::Deserialize)]
struct Query {
    judgements: HashMap<String, i32>,
    ranking: Vec<(String, f64)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let query: Query = serde_json::from_str(&line?)?;
        let ranking: Vec<(&str, f64)> = query
            .ranking
            .iter()
            .map(|(id, score)| (id.as_str(), *score))
            .collect();
        let measures = measure(&ranking, &query.judgements);
        let figures = serde_json::json!({
            "nDCG@10": measures.ndcg_10,
            "R@10": measures.recall_10,
            "R@100": measures.recall_100,
            "RR@10": measures.mrr_10,
        });
        writeln!(output, "{figures}")?;
    }
    Ok(())
}
