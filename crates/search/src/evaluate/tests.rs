use std::path::Path;

use serde_json::json;
use tempfile::TempDir;

use super::dialogues::spliced;
use super::*;
use crate::conversations::{Conversations, DEFAULT_TTL};
use crate::testing::{WordEmbedder, parts};
use ragstone_core::models::Models;
use ragstone_core::search::SearchMode;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    folder
}

const CORPUS: (&str, &str) = (
    "corpus.jsonl",
    "{\"_id\": \"a\", \"title\": \"Apple\", \"text\": \"Apple trees\"}\n\n{\"_id\": \"b\", \"title\": \"Bees\", \"text\": \"and hives\"}\n{\"_id\": \"c\", \"text\": \" \"}\n",
);
const QUERIES: (&str, &str) = (
    "queries.jsonl",
    "{\"_id\": \"1\", \"text\": \"trees\"}\n{\"_id\": \"2\", \"text\": \"hives\"}\n",
);

fn problem(files: &[(&str, &str)]) -> String {
    let folder = folder(files);
    read_benchmark(folder.path()).err().unwrap().to_string()
}

#[test]
fn titles_are_read_once_and_only_judged_queries_count() {
    for judgements in ["qrels.tsv", "qrels/test.tsv"] {
        let folder = folder(&[
            CORPUS,
            QUERIES,
            (judgements, "query-id\tcorpus-id\tscore\n2\tb\t1\n"),
        ]);
        let benchmark = read_benchmark(folder.path()).unwrap();
        let texts: Vec<&str> = benchmark
            .corpus
            .documents
            .iter()
            .map(|new| new.document.text.as_str())
            .collect();
        assert_eq!(texts, ["Apple trees", "Bees and hives"]);
        assert_eq!(benchmark.corpus.empty, 1);
        assert_eq!(benchmark.queries.len(), 1);
        assert_eq!(benchmark.queries[0].judgements["b"], 1);
    }
}

#[test]
fn what_is_wrong_with_a_folder_is_named_with_its_line() {
    let judged = ("qrels.tsv", "1\ta\t1\n");
    for (files, named) in [
        (&[CORPUS, QUERIES][..], "qrels.tsv cannot be read"),
        (&[QUERIES, judged], "corpus.jsonl cannot be read"),
        (&[CORPUS, QUERIES, ("qrels.tsv", "1\ta\n")], "qrels.tsv, line 1"),
        (
            &[CORPUS, QUERIES, ("qrels.tsv", "1\ta\t1\n1\tb\tx\n")],
            "line 2: 'x'",
        ),
        (&[CORPUS, QUERIES, ("qrels.tsv", "9\ta\t1\n")], "'9'"),
        (
            &[CORPUS, QUERIES, ("qrels.tsv", "q\td\tscore\n")],
            "no judged queries",
        ),
        (
            &[("corpus.jsonl", "{\"_id\": \"a\"}"), QUERIES, judged],
            "corpus.jsonl, line 1: missing field `text`",
        ),
        (
            &[
                ("corpus.jsonl", "{\"_id\":\"a\",\"text\":\"x\"}\n?"),
                QUERIES,
                judged,
            ],
            "corpus.jsonl, line 2: expected value at column 1",
        ),
        (
            &[
                (
                    "corpus.jsonl",
                    "{\"_id\":\"a\",\"text\":\"x\"}\n{\"_id\":\"a\",\"text\":\"y\"}",
                ),
                QUERIES,
                judged,
            ],
            "line 2: document 'a'",
        ),
        (&[("corpus.jsonl", ""), QUERIES, judged], "no documents"),
        (
            &[
                CORPUS,
                ("queries.jsonl", "{\"_id\":\"1\",\"text\":\" \"}"),
                judged,
            ],
            "query '1' has no text",
        ),
    ] {
        let message = problem(files);
        assert!(message.contains(named), "{message}");
    }
}

fn dialogue(id: usize, turns: usize) -> Dialogue {
    let turn = |n| json!({"user": format!("apple {id} {n}")});
    let turns = (0..turns).map(|n| serde_json::from_value(turn(n)).unwrap());
    Dialogue {
        id: id.to_string(),
        relevant: [(id.to_string(), 1)].into(),
        turns: turns.collect(),
    }
}

#[test]
fn every_dialogue_is_spliced_to_others_of_its_half() {
    let all: Vec<Dialogue> = (0..11).map(|id| dialogue(id, 1 + id % 4)).collect();
    let halves = [Half::Tuning, Half::Reported].map(|half| half.of(all.clone()));
    assert_eq!(halves.each_ref().map(Vec::len), [6, 5]);
    assert!(halves[0].iter().all(|dialogue| !halves[1].contains(dialogue)));
    let spliced = spliced(&halves[1]);
    assert_eq!(spliced.len(), 10);
    for one in &spliced {
        assert!(!one.before.is_empty() && !one.after.turns.contains(&one.before[0]));
    }
    assert!(super::dialogues::spliced(&[dialogue(1, 2)]).is_empty());
    assert!(super::dialogues::spliced(&[]).is_empty());
}

#[tokio::test]
async fn a_perfect_search_measures_one() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let folder = folder(&[CORPUS, QUERIES, ("qrels.tsv", "1\ta\t1\n2\tb\t2\n")]);
    let benchmark = read_benchmark(folder.path()).unwrap();
    let name = CollectionName::parse("evaluated").unwrap();
    load(&parts.backend(), &name, benchmark.corpus).await.unwrap();
    for mode in SearchMode::ALL {
        let setting = Setting { mode, rerank: false };
        let result = evaluate_mode(&parts.backend(), &name, &benchmark.queries, setting)
            .await
            .unwrap();
        assert_eq!(
            (result.measures.ndcg_10, result.measures.mrr_10),
            (1.0, 1.0),
            "{mode:?}"
        );
        assert_eq!(result.rankings[1].documents[0], "b");
    }
    let reranked = Setting {
        mode: SearchMode::Dense,
        rerank: true,
    };
    let refused = evaluate_mode(&parts.backend(), &name, &benchmark.queries, reranked).await;
    assert!(
        refused
            .err()
            .unwrap()
            .to_string()
            .contains("Cross-encoder not loaded")
    );
}

#[tokio::test]
async fn dialogues_are_held_and_measured_by_where_a_turn_stands() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let dialogs = "{\"dialog_id\": \"x\", \"relevant\": [\"a\"], \"turns\": [{\"user\": \"apple\", \"rewrite\": \"apple\"}, {\"user\": \"and its trees?\", \"rewrite\": \"apple trees\"}]}\n\
        {\"dialog_id\": \"y\", \"relevant\": [\"b\"], \"turns\": [{\"user\": \"bees\"}, {\"user\": \"and their hives?\"}]}\n";
    let folder = folder(&[CORPUS, ("dialogs.jsonl", dialogs)]);
    let name = CollectionName::parse("evaluated").unwrap();
    load(&parts.backend(), &name, read_corpus(folder.path()).unwrap())
        .await
        .unwrap();
    let conversations = Conversations {
        records: std::sync::Arc::clone(&parts.store) as _,
        models: std::sync::Arc::clone(&parts.service.models),
        vectors: crate::QueryVectors::default(),
        chat: None,
        ttl: DEFAULT_TTL,
    };
    let dialogues = read_dialogues(folder.path()).unwrap();
    let groups = evaluate_conversations(&parts.backend(), &conversations, &name, &dialogues)
        .await
        .unwrap();
    let shape: Vec<(&str, usize)> = groups.iter().map(|group| (group.name, group.turns)).collect();
    assert_eq!(
        shape,
        [
            ("follow-up turns", 2),
            ("first turns", 2),
            ("turns right after a change of subject", 2),
            ("later turns after a change of subject", 2)
        ]
    );
    for row in groups.iter().flat_map(|group| &group.rows) {
        let ours = row.wording == QueryWording::Ours;
        assert_eq!(row.query.is_none(), ours, "{row:?}");
        assert!((0.0..=1.0).contains(&row.collect), "{row:?}");
    }
    assert_eq!(groups[1].rows[1].collect, 1.0, "{:?}", groups[1]);
    let unreadable = read_dialogues(Path::new("nowhere")).unwrap_err().to_string();
    assert!(unreadable.contains("dialogs.jsonl"), "{unreadable}");
}
