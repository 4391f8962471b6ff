//! Output of measurements: tables for people, JSON for programs, TREC runs for other evaluators.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use comfy_table::{CellAlignment, Table, presets};
use ragstone_search::evaluate::{DEPTH, Group, Half, ModeResult, Setting};
use serde_json::{Value, json};

/// The subject of the figures.
pub(super) struct Facts<'a> {
    pub(super) model: &'a str,
    pub(super) documents: usize,
    /// Queries, or dialogues.
    pub(super) asked: usize,
}

pub(super) fn setting_name(setting: Setting) -> String {
    let mode = setting.mode.name();
    if setting.rerank {
        format!("{mode}, reranked")
    } else {
        mode.to_owned()
    }
}

pub(super) fn modes(facts: &Facts<'_>, results: &[ModeResult], json: bool) -> anyhow::Result<()> {
    if as_json(json) {
        let results: Vec<Value> = results.iter().map(mode_json).collect();
        return print_json(&json!({
            "model": facts.model, "documents": facts.documents, "queries": facts.asked, "results": results,
        }));
    }
    let mut table = table(&[
        "MODE",
        "nDCG@10",
        "recall@10",
        "recall@100",
        "MRR@10",
        "p50 ms",
        "p95 ms",
    ]);
    for result in results {
        let measures = &result.measures;
        let mut row = vec![setting_name(result.setting)];
        row.extend(
            [
                measures.ndcg_10,
                measures.recall_10,
                measures.recall_100,
                measures.mrr_10,
            ]
            .map(|measure| format!("{measure:.4}")),
        );
        row.extend([result.latency.p50, result.latency.p95].map(|time| format!("{:.1}", millis(time))));
        table.add_row(row);
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} documents, {} queries, {}; latency of one query after the other, for {DEPTH} results each\n{table}",
        facts.documents, facts.asked, facts.model
    )?;
    Ok(())
}

fn mode_json(result: &ModeResult) -> Value {
    json!({
        "mode": result.setting.mode.name(), "rerank": result.setting.rerank,
        "ndcg@10": result.measures.ndcg_10, "recall@10": result.measures.recall_10,
        "recall@100": result.measures.recall_100, "mrr@10": result.measures.mrr_10,
        "latency_ms": {"p50": millis(result.latency.p50), "p95": millis(result.latency.p95)},
    })
}

pub(super) fn conversations(
    facts: &Facts<'_>,
    half: Half,
    groups: &[Group],
    json: bool,
) -> anyhow::Result<()> {
    if as_json(json) {
        let groups: Vec<Value> = groups.iter().map(group_json).collect();
        return print_json(&json!({
            "model": facts.model, "documents": facts.documents, "dialogues": facts.asked, "half": half.name(),
            "groups": groups,
        }));
    }
    let mut table = table(&["nDCG@10", "TURNS", "query", "collect"]);
    for group in groups {
        table.add_row([group.name, &group.turns.to_string()]);
        for row in &group.rows {
            let figure = |measure: f64| format!("{measure:.4}");
            table.add_row([
                format!("  {}", row.wording.name()),
                String::new(),
                row.query.map(figure).unwrap_or_default(),
                figure(row.collect),
            ]);
        }
    }
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} documents, {} dialogues of the {} half, {}\n{table}\n\
         query: one hybrid search; collect: the collector, which is what answers in a conversation",
        facts.documents,
        facts.asked,
        half.name(),
        facts.model
    )?;
    Ok(())
}

fn group_json(group: &Group) -> Value {
    let rows: Vec<Value> = group
        .rows
        .iter()
        .map(|row| json!({"wording": row.wording.name(), "query": row.query, "collect": row.collect}))
        .collect();
    json!({"turns": group.name, "count": group.turns, "ndcg@10": rows})
}

/// Writes `dense.run`, `hybrid-reranked.run`, … for other evaluators. The score is derived from the rank,
/// because clients get the order only.
pub(super) fn write_run(folder: &Path, result: &ModeResult) -> anyhow::Result<()> {
    let name = setting_name(result.setting).replace(", ", "-");
    let path = folder.join(format!("{name}.run"));
    let mut run = String::new();
    for ranking in &result.rankings {
        for (place, document) in ranking.documents.iter().enumerate() {
            let (rank, score) = (place + 1, ranking.documents.len() - place);
            run.push_str(&format!(
                "{} Q0 {document} {rank} {score} ragstone-{name}\n",
                ranking.query
            ));
        }
    }
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, run))
        .with_context(|| format!("{} cannot be written", path.display()))
}

/// Columns without lines, figures to the right.
fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(header.iter().copied());
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn as_json(asked: bool) -> bool {
    asked || !std::io::stdout().is_terminal()
}

fn print_json(value: &Value) -> anyhow::Result<()> {
    writeln!(
        std::io::stdout().lock(),
        "{}",
        serde_json::to_string_pretty(value)?
    )?;
    Ok(())
}

fn millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
