//! `ragstone quickstart`

use serde_json::{Deserializer, Value};

use crate::support::{Setup, fixtures};

/// The commands that it prints, each with the answer below it.
fn tries(stdout: &str) -> Vec<(String, Value)> {
    let mut tries = Vec::new();
    for part in stdout.split("\ncurl ").skip(1) {
        let (command, answer) = part.split_once('\n').expect("an answer below the command");
        let answer = Deserializer::from_str(answer).into_iter::<Value>().next();
        tries.push((command.to_owned(), answer.expect("an answer").expect("JSON")));
    }
    tries
}

#[test]
fn three_commands_are_printed_with_their_real_answers() {
    fixtures::default_model();
    let setup = Setup::command(&["quickstart", "--once", "--port", "0"]);
    let data = setup.data_dir();
    // A second time, the sample is there already.
    for _ in 0..2 {
        let finished = setup.clone().arg("--data-dir").arg(&data).run();
        let tries = tries(finished.succeeded());
        let first = |number: usize, list: &str| tries[number].1[list][0].clone();
        assert_eq!(tries.len(), 3, "{finished:?}");
        for (command, _) in &tries {
            assert!(command.contains("http://127.0.0.1:"), "{command}");
        }
        // By meaning: what it says is not what was asked.
        let near = first(0, "results");
        assert!(near["distance"].as_f64().unwrap() < 0.9, "{near}");
        assert!(!near["text"].as_str().unwrap().contains("bad weather"), "{near}");
        let error = first(1, "results");
        assert!(error["text"].as_str().unwrap().contains("ZX-4417"), "{error}");
        assert_eq!(error["metadata"]["chapter"], "dome");
        let section = first(2, "documents");
        assert_eq!(section["metadata"]["section_id"], "mirror-care");
        // It is there, so nothing is fetched that one would have to wait for.
        assert!(
            !finished.stderr.contains("Getting the default model"),
            "{finished:?}"
        );
    }
}
