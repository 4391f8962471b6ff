use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::server::Server;

/// Arguments and environment of the program, and a temporary folder for everything it writes.
#[derive(Clone)]
pub struct Setup {
    folder: Arc<TempDir>,
    args: Vec<OsString>,
    env: Vec<(String, OsString)>,
}

/// Generous limit for a command to exit, even on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

impl Setup {
    /// `ragstone serve` on a free port, without flags for models. `RAGSTONE_TEST_STORE` selects the store:
    /// the embedded one, or a new database in Postgres or ChromaDB.
    pub fn serve() -> Self {
        let setup = Self::serve_embedded();
        match std::env::var("RAGSTONE_TEST_STORE").as_deref() {
            Ok("postgres") => setup.env("RAGSTONE_STORE", super::postgres::new_database()),
            Ok("chroma") => setup.env("RAGSTONE_STORE", super::chroma_database::new_database()),
            Ok(other) => panic!("RAGSTONE_TEST_STORE is '{other}'; use postgres or chroma"),
            Err(_) => setup,
        }
    }

    pub fn serve_embedded() -> Self {
        let folder = Arc::new(tempfile::tempdir().expect("a temporary folder"));
        let data = folder.path().join("data");
        Self::command(&["serve", "--port", "0"])
            .in_folder(folder)
            .arg("--data-dir")
            .arg(data)
    }

    /// `ragstone` with these arguments.
    pub fn command(args: &[&str]) -> Self {
        Self {
            folder: Arc::new(tempfile::tempdir().expect("a temporary folder")),
            args: args.iter().map(Into::into).collect(),
            env: Vec::new(),
        }
    }

    pub fn without_models() -> Self {
        Self::serve().arg("--no-embeddings")
    }

    fn in_folder(mut self, folder: Arc<TempDir>) -> Self {
        self.folder = folder;
        self
    }

    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    pub fn env(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Writes a file into the folder of this setup and returns its path.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, text).expect("a file in the temporary folder");
        path
    }

    /// Passes a configuration file.
    pub fn config(self, yaml: &str) -> Self {
        let path = self.file("ragstone.yml", yaml);
        self.arg("--config").arg(path)
    }

    /// Passes embedding models with these ids and directories.
    pub fn embeddings(self, models: &[(&str, &Path)]) -> Self {
        let path = self.embeddings_file(models);
        self.arg("--embeddings-config").arg(path)
    }

    pub fn embeddings_file(&self, models: &[(&str, &Path)]) -> PathBuf {
        let entries = models.iter().map(|(id, path)| {
            // Without quantization, results are the same on every processor. For the random weights of
            // the small models, it would change them noticeably.
            let bits = if path.is_dir() { ", quantize: none" } else { "" };
            format!("  - {{id: {id}, path: {path:?}{bits}}}\n")
        });
        self.file(
            "embeddings.yml",
            &format!("embeddings:\n{}", entries.collect::<String>()),
        )
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn data_dir(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// The command, offline by default and without variables of the environment that configure it.
    pub fn build(&self) -> Command {
        let mut command = Command::new(program());
        for (name, _) in std::env::vars_os() {
            let name_text = name.to_string_lossy();
            let ours = ["RAGSTONE_", "EMBEDDINGS_", "CROSS_ENCODER_", "HF_"];
            // Keeps the location of the downloaded default model.
            let cache = ["HF_HOME", "HF_HUB_CACHE"];
            if ours.iter().any(|prefix| name_text.starts_with(prefix)) && !cache.contains(&&*name_text) {
                command.env_remove(&name);
            }
        }
        command
            .current_dir(self.folder.path())
            .args(&self.args)
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Starts the server and waits until it listens.
    pub async fn start(self) -> Server {
        Server::start(self).await
    }

    /// Runs the command until it exits.
    pub fn run(&self) -> Finished {
        let mut child = self
            .build()
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        // Reads while it runs, since a full pipe would block it.
        let stdout = child.stdout.take().map(read_in_thread).expect("stdout is piped");
        let stderr = child.stderr.take().map(read_in_thread).expect("stderr is piped");
        let start = Instant::now();
        let status = loop {
            match child.try_wait().expect("the program can be waited for") {
                Some(status) => break status,
                None if start.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    let _ = child.kill();
                    let _ = child.wait();
                    let log = stderr.join().unwrap_or_default();
                    panic!(
                        "{:?} did not exit; its log:\n{}",
                        self.args,
                        String::from_utf8_lossy(&log)
                    );
                }
            }
        };
        let stdout = stdout.join().expect("stdout is read");
        let stderr = stderr.join().expect("stderr is read");
        Finished::from(Output {
            status,
            stdout,
            stderr,
        })
    }
}

/// The program that was built with these tests, or the one in `RAGSTONE_TEST_BINARY`.
fn program() -> OsString {
    std::env::var_os("RAGSTONE_TEST_BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_ragstone").into())
}

fn read_in_thread(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// Exit code and output of a command.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Finished {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("stdout is text"),
            stderr: String::from_utf8(output.stderr).expect("stderr is text"),
        }
    }
}

impl Finished {
    /// Asserts the exit code, and that no server was started. Returns stderr.
    #[track_caller]
    pub fn failed_with(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert!(!self.stderr.contains("listening on"), "{self:?}");
        &self.stderr
    }

    #[track_caller]
    pub fn succeeded(&self) -> &str {
        assert_eq!(self.code, Some(0), "{self:?}");
        &self.stdout
    }
}
