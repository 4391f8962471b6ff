//! Help, exit codes, and what goes to which stream.

use crate::support::Setup;

#[test]
fn usage_errors_end_with_2() {
    for args in [
        &["serve", "--no-such-flag"][..],
        &["no-such-command"],
        &["serve", "--port", "many"],
        &["serve", "--port", "70000"],
        &["serve", "--log-format", "xml"],
        &["serve", "--no-embeddings", "--embeddings-config", "x.yml"],
        &["models", "pull"],
        &["completions", "no-such-shell"],
        &[],
    ] {
        let ended = Setup::command(args).run();
        let log = ended.failed_with(2);
        assert!(log.contains("Usage") || log.contains("--help"), "{args:?}: {log}");
        assert_eq!(ended.stdout, "", "{args:?}");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    let help = Setup::command(&["--help"]).run();
    for command in ["serve", "quickstart", "models", "completions"] {
        assert!(help.succeeded().contains(command), "{help:?}");
    }
    assert_eq!(help.stderr, "");
    let version = Setup::command(&["--version"]).run();
    assert_eq!(
        version.succeeded().trim(),
        format!("ragstone {}", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn help_of_serve_names_every_flag_of_the_contract() {
    let help = Setup::command(&["serve", "--help"]).run();
    for flag in [
        "--host",
        "--port",
        "--data-dir",
        "--store",
        "--config",
        "--embeddings-config",
        "--cross-encoder",
        "--cross-encoder-path",
        "--download-models",
        "--list-reranker-models",
        "--no-embeddings",
    ] {
        assert!(
            help.succeeded().contains(flag),
            "{flag} is not in: {}",
            help.stdout
        );
    }
    for variable in [
        "EMBEDDINGS_CONFIG",
        "CROSS_ENCODER_MODEL",
        "CROSS_ENCODER_PATH",
        "RAGSTONE_PORT",
    ] {
        assert!(
            help.stdout.contains(variable),
            "{variable} is not in: {}",
            help.stdout
        );
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = Setup::command(&["completions", shell]).run();
        assert!(script.succeeded().contains("quickstart"), "{shell}");
    }
}

/// The list is the result of the command, so nothing else is on stdout, and nothing is started.
#[test]
fn the_list_of_rerankers_is_a_result() {
    let list = Setup::serve().arg("--list-reranker-models").run();
    insta::assert_snapshot!("list_reranker_models", list.succeeded());
    assert_eq!(list.stderr, "");
}
