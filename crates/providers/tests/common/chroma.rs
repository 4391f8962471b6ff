//! A real ChromaDB server, in a folder that goes with it.

use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::port::unused_port;
use super::signal;

pub struct ChromaServer {
    process: Child,
    port: u16,
    data: tempfile::TempDir,
}

impl Drop for ChromaServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ChromaServer {
    pub async fn start() -> Self {
        let data = tempfile::tempdir().unwrap();
        let port = unused_port();
        let mut server = Self {
            process: run(port, &data),
            port,
            data,
        };
        server.wait().await;
        server
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn store_url(&self) -> String {
        format!("chroma://127.0.0.1:{}", self.port)
    }

    pub fn stop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Until [`Self::resume`], it accepts connections and answers nothing.
    #[allow(dead_code, reason = "not every test file that shares this needs it")]
    pub fn pause(&self) {
        signal::pause(&[self.process.id()]);
    }

    #[allow(dead_code, reason = "not every test file that shares this needs it")]
    pub fn resume(&self) {
        signal::resume(&[self.process.id()]);
    }

    /// The same server again, on the same data.
    pub async fn restart(&mut self) {
        self.stop();
        self.process = run(self.port, &self.data);
        self.wait().await;
    }

    async fn wait(&mut self) {
        for _ in 0..600 {
            if TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            let ended = self.process.try_wait().unwrap();
            assert!(ended.is_none(), "the ChromaDB server ended");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the ChromaDB server did not become ready");
    }
}

fn run(port: u16, data: &tempfile::TempDir) -> Child {
    let python = std::env::var("RAGSTONE_TEST_PYTHON").expect(
        "RAGSTONE_TEST_PYTHON must name a Python interpreter with chromadb 1.5.9 installed; \
         `cargo xtask test` sets that up and runs all tests",
    );
    let start = "import sys; from chromadb.cli.cli import app; sys.argv[0] = 'chroma'; app()";
    Command::new(python)
        .args(["-c", start, "run", "--host", "127.0.0.1", "--port"])
        .arg(port.to_string())
        .arg("--path")
        .arg(data.path())
        .current_dir(data.path())
        .env("ANONYMIZED_TELEMETRY", "False")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the interpreter that RAGSTONE_TEST_PYTHON names can be started")
}
