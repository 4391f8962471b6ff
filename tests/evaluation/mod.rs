//! `ragstone eval` agrees with reference programs.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::support::{Setup, fixtures};

const WORDS: [&str; 12] = [
    "fox", "vector", "angle", "city", "garden", "number", "index", "question", "passage", "animal", "river",
    "stone",
];

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).expect("a file in the temporary folder");
}

fn lines(values: impl Iterator<Item = Value>) -> String {
    values.map(|value| format!("{value}\n")).collect()
}

/// Short documents, more than the cutoff of every measure.
fn corpus(folder: &Path) {
    let text = |n: usize| {
        let words: Vec<&str> = (0..3 + n % 5).map(|k| WORDS[(n * 7 + k * k * 5) % 12]).collect();
        words.join(" ")
    };
    let documents =
        (0..140).map(|n| json!({"_id": format!("d{n}"), "title": format!("No {n}"), "text": text(n)}));
    write(folder, "corpus.jsonl", &lines(documents));
}

/// Graded, zero and negative judgements, unknown documents, queries without relevant documents, and one
/// without matches.
fn labelled(folder: &Path) -> PathBuf {
    let folder = folder.join("labelled");
    std::fs::create_dir(&folder).expect("a folder");
    corpus(&folder);
    let mut queries: Vec<Value> = (0..14)
        .map(|n| json!({"_id": format!("q{n}"), "text": format!("{} and {}", WORDS[n % 12], WORDS[(n * 5 + 3) % 12])}))
        .collect();
    queries.push(json!({"_id": "q14", "text": "zzz"}));
    queries.push(json!({"_id": "unjudged", "text": "fox"}));
    write(&folder, "queries.jsonl", &lines(queries.into_iter()));
    let mut judged = "query-id\tcorpus-id\tscore\n".to_owned();
    for query in 0..15 {
        for k in 0..20 {
            let grade = if query == 13 { 0 } else { (query + k) % 5 - 1 };
            judged.push_str(&format!("q{query}\td{}\t{grade}\n", (query * 31 + k * 13) % 150));
        }
    }
    write(&folder, "qrels.tsv", &judged);
    folder
}

#[test]
fn figures_agree_with_the_reference_programs() {
    let setup = Setup::command(&["eval", "--json"]);
    let folder = labelled(setup.folder());
    let runs = setup.folder().join("runs");
    let ended = setup
        .clone()
        .arg(&folder)
        .arg("--model")
        .arg(fixtures::model("bert"))
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .arg("--runs")
        .arg(&runs)
        .run();
    let report: Value = serde_json::from_str(ended.succeeded()).expect("JSON on stdout");
    assert_eq!(
        (&report["documents"], &report["queries"]),
        (&json!(140), &json!(15))
    );
    let settings: Vec<(&str, bool)> = report["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| {
            (
                result["mode"].as_str().unwrap(),
                result["rerank"].as_bool().unwrap(),
            )
        })
        .collect();
    let expected = ["dense", "keyword", "hybrid"].map(|mode| [(mode, false), (mode, true)]);
    assert_eq!(settings, expected.concat());
    let figures = setup.file("report.json", ended.succeeded());
    check_with_python(&folder.join("qrels.tsv"), &runs, &figures);
}

/// Runs the script of this folder, which contains the assertions.
fn check_with_python(judgements: &Path, runs: &Path, report: &Path) {
    let python = std::env::var_os("RAGSTONE_TEST_PYTHON").expect(
        "RAGSTONE_TEST_PYTHON names no interpreter with the packages of tests/requirements.txt: run `cargo xtask test`, \
         or `cargo xtask python` for the path to set",
    );
    let script = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../tests/evaluation/check_runs.py"
    );
    let output = Command::new(python)
        .arg(script)
        .args([judgements, runs, report])
        .output()
        .expect("the interpreter runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success() && text(&output.stdout).trim_end().ends_with("done"),
        "{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
}

#[test]
fn without_a_cross_encoder_every_mode_is_measured_once() {
    let setup = Setup::command(&["eval"]);
    let folder = labelled(setup.folder());
    let ended = setup
        .arg(&folder)
        .arg("--model")
        .arg(fixtures::model("bert"))
        .run();
    let report: Value = serde_json::from_str(ended.succeeded()).expect("JSON in a pipe");
    assert_eq!(report["results"].as_array().unwrap().len(), 3);
    for result in report["results"].as_array().unwrap() {
        let (p50, p95) = (&result["latency_ms"]["p50"], &result["latency_ms"]["p95"]);
        assert!(p50.as_f64().unwrap() <= p95.as_f64().unwrap(), "{result}");
    }
}

#[test]
fn dialogues_are_measured_on_one_half() {
    let setup = Setup::command(&["eval", "--conversations"]);
    corpus(setup.folder());
    let dialogues = (0..7).map(|n| {
        let turn = |k: usize| json!({"user": format!("and its {}?", WORDS[(n + k) % 12]), "rewrite": format!("No {n}")});
        json!({"dialog_id": n.to_string(), "relevant": [format!("d{n}")], "turns": [json!({"user": format!("No {n}"), "rewrite": format!("No {n}")}), turn(1), turn(2)]})
    });
    write(setup.folder(), "dialogs.jsonl", &lines(dialogues));
    for (half, dialogues) in [("reported", 3), ("tuning", 4)] {
        let folder = setup.folder().to_owned();
        let ended = setup
            .clone()
            .arg(folder)
            .arg("--model")
            .arg(fixtures::model("bert"))
            .arg("--half")
            .arg(half)
            .run();
        let report: Value = serde_json::from_str(ended.succeeded()).expect("JSON on stdout");
        assert_eq!(
            (&report["half"], &report["dialogues"]),
            (&json!(half), &json!(dialogues))
        );
        let counts: Vec<(&str, u64)> = report["groups"]
            .as_array()
            .unwrap()
            .iter()
            .map(|group| (group["turns"].as_str().unwrap(), group["count"].as_u64().unwrap()))
            .collect();
        assert_eq!(
            counts,
            [
                ("follow-up turns", 2 * dialogues),
                ("first turns", dialogues),
                ("turns right after a change of subject", 2 * dialogues),
                ("later turns after a change of subject", 4 * dialogues),
            ]
        );
        let follow_ups = report["groups"][0]["ndcg@10"].as_array().unwrap();
        let wordings: Vec<&str> = follow_ups
            .iter()
            .map(|row| row["wording"].as_str().unwrap())
            .collect();
        assert_eq!(
            wordings,
            ["last turn alone", "all turns joined", "ours", "human rewrite"]
        );
        let collected = |row: usize| follow_ups[row]["collect"].as_f64().unwrap();
        assert!(
            collected(0) < collected(2) && collected(2) <= 1.0,
            "what was said before helps: {report}"
        );
    }
}

#[test]
fn what_is_wrong_with_a_folder_is_said() {
    let setup = Setup::command(&["eval"]);
    let missing = setup.clone().arg(setup.folder().join("nowhere")).run();
    let log = missing.failed_with(1);
    assert!(log.contains("qrels.tsv cannot be read"), "{log}");
    let folder = labelled(setup.folder());
    write(&folder, "qrels.tsv", "q1\td1\t1\nq2 d2 1\n");
    let broken = setup.arg(&folder).run();
    let log = broken.failed_with(1);
    assert!(
        log.contains("qrels.tsv, line 2") && log.contains("three columns"),
        "{log}"
    );
}
