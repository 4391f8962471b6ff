//! The directory in which the blocks of one document run, with the servers that they start.

use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::blocks::Block;
use super::compare;
use crate::clients::python;
use crate::support::{Setup, fixtures, port};

const TIMEOUT: Duration = Duration::from_secs(300);
/// The default port, which documents show. Each document gets ports of its own instead.
const PORTS: [&str; 2] = ["5006", "5007"];

/// The program under test.
fn program() -> OsString {
    Setup::command(&[]).build().get_program().to_owned()
}

struct Finished {
    succeeded: bool,
    stdout: String,
    stderr: String,
}

impl Finished {
    fn check(self) -> Result<(), String> {
        let Self {
            succeeded,
            stdout,
            stderr,
        } = self;
        if succeeded {
            Ok(())
        } else {
            Err(format!("failed:\n{stdout}{stderr}"))
        }
    }
}

pub struct Workspace {
    folder: TempDir,
    /// Text of documents and what stands for it in a test.
    replacements: Vec<(String, String)>,
    servers: Vec<Child>,
}

impl Workspace {
    pub fn new() -> Self {
        fixtures::default_model();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut replacements: Vec<(String, String)> = PORTS
            .map(|port| (port.to_owned(), port::unused_port().to_string()))
            .into();
        // A small cross-encoder stands for one that would have to be downloaded.
        let reranker = fixtures::model("cross-bert");
        replacements.push((
            "--cross-encoder BAAI/bge-reranker-base".to_owned(),
            format!("--cross-encoder-path {}", reranker.display()),
        ));
        let workspace = Self {
            folder,
            replacements,
            servers: Vec::new(),
        };
        workspace.write_programs();
        workspace
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// `ragstone`, `cargo run` and `python` as the documents use them, on the ports of this test.
    fn write_programs(&self) {
        let program = program();
        let program = program.to_str().expect("a path in UTF-8");
        let port = &self.replacements[0].1;
        let ragstone = format!(
            "case \"$1 $*\" in\n*--port*) ;;\nserve*|quickstart*) set -- \"$@\" --port {port};;\n\
             query*--data-dir*) ;;\nquery*) export RAGSTONE_URL=http://127.0.0.1:{port};;\nesac\nexec '{program}' \"$@\""
        );
        // An error status is a failed command.
        std::fs::write(self.path().join(".curlrc"), "fail-with-body\n").expect("a file");
        let bin = self.path().join(".bin");
        std::fs::create_dir(&bin).expect("a folder");
        let python = std::env::var("RAGSTONE_TEST_PYTHON").unwrap_or_default();
        for (name, script) in [
            ("ragstone", ragstone),
            (
                "cargo",
                "[ \"$1 $2\" = 'run --' ] || exit 1\nshift 2\nexec ragstone \"$@\"".to_owned(),
            ),
            ("python", format!("exec '{python}' \"$@\"")),
        ] {
            let path = bin.join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("a script");
            std::fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("an executable script");
        }
    }

    pub fn run(&mut self, block: &Block) -> Result<(), String> {
        if block.not_run.is_some() {
            return Ok(());
        }
        let text = self
            .replacements
            .iter()
            .fold(block.text.clone(), |text, (documented, real)| {
                text.replace(documented, real)
            });
        let file = block.option.as_deref().filter(|option| option.contains('.'));
        if let Some(file) = file {
            std::fs::write(self.path().join(file), &text).map_err(|error| format!("{file}: {error}"))?;
        }
        match (block.language.as_str(), block.option.as_deref()) {
            ("sh", None) => self.finish(Command::new("sh").args(["-euc", &text])).check(),
            ("sh", Some("server")) => self.start_server(&text),
            ("console", None) => self.console(&text),
            ("python", None) => self.finish(Command::new(python()).args(["-c", &text])).check(),
            ("json", _) => parse_json(&text),
            ("yaml", _) => self.check_configuration(&text),
            (_, Some(_)) if file.is_some() => Ok(()),
            (language, option) => Err(format!(
                "no test runs blocks of the kind '{language} {}'",
                option.unwrap_or_default()
            )),
        }
    }

    /// Runs a command to its end, with its output in files.
    fn finish(&self, command: &mut Command) -> Finished {
        let (stdout, stderr) = (self.path().join(".stdout"), self.path().join(".stderr"));
        let into = |path| File::create(path).expect("a file for output");
        self.prepare(command).stdout(into(&stdout)).stderr(into(&stderr));
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let start = Instant::now();
        let succeeded = loop {
            match child.try_wait().expect("the command can be waited for") {
                Some(status) => break status.success(),
                None if start.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(5)),
                None => {
                    kill_group(&mut child);
                    break false;
                }
            }
        };
        let text = |path| std::fs::read_to_string(path).unwrap_or_default();
        Finished {
            succeeded,
            stdout: text(&stdout),
            stderr: text(&stderr),
        }
    }

    /// Sets directory and environment, with nothing from the environment that could change results.
    fn prepare<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy().into_owned();
            if ["RAGSTONE_", "EMBEDDINGS_", "CROSS_ENCODER_"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(&name);
            }
        }
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .current_dir(self.path())
            .env("PATH", format!("{}:{path}", self.path().join(".bin").display()))
            .env("CURL_HOME", self.path())
            .env("HF_HUB_OFFLINE", "1")
            .env("NO_PROXY", "127.0.0.1,localhost")
            .stdin(Stdio::null())
            .process_group(0)
    }

    fn start_server(&mut self, script: &str) -> Result<(), String> {
        let log = self.path().join(format!(".server-{}", self.servers.len()));
        let output = File::create(&log).expect("a log file");
        let mut command = Command::new("sh");
        command
            .args(["-euc", script])
            .stdout(Stdio::null())
            .stderr(output);
        self.servers.push(
            self.prepare(&mut command)
                .spawn()
                .map_err(|error| error.to_string())?,
        );
        let server = self.servers.last_mut().expect("the server");
        let start = Instant::now();
        loop {
            let text = std::fs::read_to_string(&log).unwrap_or_default();
            if text.contains("listening on http://") {
                return Ok(());
            }
            let ended = server.try_wait().expect("the server can be waited for");
            if ended.is_some() || start.elapsed() > TIMEOUT {
                return Err(format!("the server did not start:\n{text}"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn console(&self, text: &str) -> Result<(), String> {
        let mut commands: Vec<(String, String)> = Vec::new();
        for line in text.lines() {
            match (
                line.strip_prefix("$ "),
                line.strip_prefix("> "),
                commands.last_mut(),
            ) {
                (Some(command), _, _) => commands.push((command.to_owned(), String::new())),
                (None, Some(more), Some((command, output))) if output.is_empty() => {
                    *command += &format!("\n{more}")
                }
                (None, _, Some((_, output))) => *output += &format!("{line}\n"),
                (None, _, None) => return Err("a console block starts with '$ '".to_owned()),
            }
        }
        for (command, documented) in commands {
            // A command that fails may be documented too: its output is what counts.
            let Finished {
                stdout: real, stderr, ..
            } = self.finish(Command::new("sh").args(["-c", &command]));
            if !compare::matches(&documented, &real) {
                return Err(format!(
                    "$ {command}\ndocumented:\n{documented}\nreal:\n{real}\n{stderr}"
                ));
            }
        }
        Ok(())
    }

    /// Has `ragstone doctor` check a configuration, together with the other file where the document has one.
    fn check_configuration(&self, yaml: &str) -> Result<(), String> {
        std::fs::write(self.path().join("checked.yml"), yaml).map_err(|error| error.to_string())?;
        let is_models = yaml.lines().any(|line| line.starts_with("embeddings:"));
        let (settings, models) = if is_models {
            ("ragstone.yml", "checked.yml")
        } else {
            ("checked.yml", "embeddings.yml")
        };
        let mut command = Command::new(program());
        command.args(["doctor", "--port", "0", "--store", "sqlite://checked"]);
        let mut keys = yaml.to_owned();
        if let Ok(text) = std::fs::read_to_string(self.path().join(settings)) {
            command.args(["--config", settings]);
            keys += &text;
        }
        if self.path().join(models).exists() {
            command.args(["--embeddings-config", models]);
        } else {
            command.arg("--no-embeddings");
        }
        for name in keys.split("${").skip(1).filter_map(|rest| rest.split('}').next()) {
            command.env(name, "a-key-for-the-test");
        }
        self.finish(&mut command).check()
    }
}

fn parse_json(text: &str) -> Result<(), String> {
    serde_json::from_str::<serde_json::Value>(text)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// Ends a shell with everything that it started.
fn kill_group(child: &mut Child) {
    let _ = Command::new("sh")
        .args(["-c", &format!("kill -s KILL -- -{}", child.id())])
        .status();
    let _ = child.wait();
}

impl Drop for Workspace {
    fn drop(&mut self) {
        self.servers.iter_mut().for_each(kill_group);
    }
}
