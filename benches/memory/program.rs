//! The program under measurement.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::client::Connection;

pub(crate) struct Program {
    child: Child,
    pub address: SocketAddr,
    _folder: TempDir,
}

impl Program {
    pub(crate) async fn serve(config: &str, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self::start(folder, config, args)
    }

    pub(crate) async fn serve_with_models(config: &str, models: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("embeddings.yml");
        std::fs::write(&path, models).expect("a file");
        let path = path.display().to_string();
        Self::start(folder, config, &["--embeddings-config", &path])
    }

    fn start(folder: TempDir, config: &str, args: &[&str]) -> Self {
        std::fs::write(folder.path().join("ragstone.yml"), config).expect("a file");
        let mut child = Command::new(env!("CARGO_BIN_EXE_ragstone"))
            .args([
                "serve",
                "--port",
                "0",
                "--config",
                "ragstone.yml",
                "--data-dir",
                "data",
            ])
            .args(args)
            .current_dir(folder.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("stderr"));
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert!(log.read_line(&mut line).expect("a log") > 0, "the program ended");
            if let Some((_, address)) = line.split_once("listening on http://") {
                break address
                    .split_whitespace()
                    .next()
                    .and_then(|text| text.parse().ok())
                    .expect("an address");
            }
        };
        std::thread::spawn(move || {
            for line in log.lines().map_while(Result::ok) {
                if line.contains("WARN") || line.contains("ERROR") {
                    eprintln!("{line}");
                }
            }
        });
        Self {
            child,
            address,
            _folder: folder,
        }
    }

    pub(crate) fn pull_default_model() {
        let pulled = Command::new(env!("CARGO_BIN_EXE_ragstone"))
            .args(["models", "pull", "default"])
            .status();
        assert!(
            pulled.is_ok_and(|status| status.success()),
            "the default model can be had"
        );
    }

    /// What the process holds in memory.
    pub(crate) fn memory_mb(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or_default()
            / 1024
    }

    /// How long it takes until so many entries have a vector and none waits.
    pub(crate) async fn until_embedded(&self, count: u64) -> Duration {
        let start = Instant::now();
        let mut connection = Connection::open(self.address).await;
        loop {
            let status: Value =
                serde_json::from_str(&connection.get("/memory/status").await.body).expect("JSON");
            if status["embedded"] == count && status["queued"] == 0 {
                return start.elapsed();
            }
            assert!(
                start.elapsed() < Duration::from_secs(600),
                "not embedded in time: {status}"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
