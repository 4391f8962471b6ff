//! `ragstone ingest` and ingestion over HTTP.

mod command;
mod contract;
mod crash;
mod harmful;
mod jobs;
mod origins;
mod reporting;

use std::path::PathBuf;

use serde_json::Value;

use crate::support::{Finished, Setup, fixtures};

/// A folder of documents, and a store of its own to ingest them into.
struct Desk {
    setup: Setup,
    embeddings: PathBuf,
}

impl Desk {
    fn new() -> Self {
        let setup = Setup::command(&[]);
        let embeddings = setup.embeddings_file(&[("small", &fixtures::model("bert"))]);
        Self { setup, embeddings }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.setup.folder().join(name)
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn remove(&self, name: &str) {
        std::fs::remove_file(self.path(name)).unwrap();
    }

    /// `ragstone ingest … --json` into collection `c`.
    fn command(&self, args: &[&str]) -> Setup {
        let setup = self
            .setup
            .clone()
            .arg("ingest")
            .arg("--collection")
            .arg("c")
            .arg("--json");
        args.iter().fold(setup, |setup, arg| setup.arg(*arg))
    }

    /// The same with a report for people.
    fn plainly(&self, args: &[&str]) -> Finished {
        let setup = self.setup.clone().arg("ingest").arg("-c").arg("c");
        let setup = args.iter().fold(setup, |setup, arg| setup.arg(*arg));
        let setup = setup.arg("--data-dir").arg(self.setup.data_dir());
        setup.arg("--embeddings-config").arg(&self.embeddings).run()
    }

    fn here(&self, args: &[&str]) -> Finished {
        let command = self.command(args).arg("--data-dir").arg(self.setup.data_dir());
        command.arg("--embeddings-config").arg(&self.embeddings).run()
    }

    fn server(&self) -> Setup {
        let serve = self.setup.clone().arg("serve").arg("--port").arg("0");
        serve
            .arg("--data-dir")
            .arg(self.setup.data_dir())
            .arg("--embeddings-config")
            .arg(&self.embeddings)
    }
}

#[track_caller]
fn report(finished: &Finished) -> Value {
    serde_json::from_str(&finished.stdout).unwrap_or_else(|_| panic!("no report: {finished:?}"))
}

#[track_caller]
fn counts(report: &Value) -> [u64; 5] {
    ["added", "changed", "unchanged", "removed", "failed"].map(|name| report[name].as_u64().unwrap())
}
