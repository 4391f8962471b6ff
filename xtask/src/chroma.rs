//! A ChromaDB server for the tests, from its Python package, on a free port and in a temporary folder.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::port::unused_port;

const START_TIMEOUT: Duration = Duration::from_secs(120);

/// A running server, stopped on drop.
pub(crate) struct Chroma {
    process: Child,
    port: u16,
    folder: PathBuf,
}

impl Chroma {
    /// `python` must have the package installed.
    pub(crate) fn start(python: &Path) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("ragstone-chroma-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        let port = unused_port();
        let process = Command::new(python)
            .args(["-c", "from chromadb.cli.cli import app; app()"])
            .args([
                "run",
                "--host",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--path",
            ])
            .arg(&folder)
            .current_dir(&folder)
            .env("ANONYMIZED_TELEMETRY", "False")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("the ChromaDB server cannot be started")?;
        let mut server = Self {
            process,
            port,
            folder,
        };
        server.wait()?;
        Ok(server)
    }

    /// `127.0.0.1:PORT`.
    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn wait(&mut self) -> anyhow::Result<()> {
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            if let Some(status) = self.process.try_wait()? {
                bail!("the ChromaDB server ended with {status}");
            }
            if start.elapsed() > START_TIMEOUT {
                bail!("the ChromaDB server did not become ready");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
}

impl Drop for Chroma {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
