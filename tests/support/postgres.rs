//! The Postgres server that `cargo xtask test` starts.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use super::port::unused_port;
use super::{signal, test_databases};

const MISSING: &str =
    "no Postgres to test with: run `cargo xtask test`, or `cargo xtask with-postgres cargo test …`";

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Creates an empty database and returns its URL.
pub fn new_database() -> String {
    let server = std::env::var("RAGSTONE_TEST_POSTGRES").expect(MISSING);
    let name = test_databases::new_name();
    let (address, _) = server.rsplit_once('/').expect("a database in the address");
    let url = format!("{address}/{name}");
    test_databases::wait_for(async move {
        let (client, connection) = tokio_postgres::connect(&server, tokio_postgres::NoTls)
            .await
            .expect("the Postgres server answers");
        tokio::spawn(connection);
        client
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .expect("a new database");
    });
    url
}

/// Runs statements on a new connection.
pub fn run_sql(url: &str, sql: &str) -> Result<(), String> {
    let (url, sql) = (url.to_owned(), sql.to_owned());
    test_databases::wait_for(async move {
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls)
            .await
            .expect("the Postgres server answers");
        tokio::spawn(connection);
        client
            .batch_execute(&sql)
            .await
            .map_err(|error| error.to_string())
    })
}

/// A Postgres server for one test, which can stop and start it.
pub struct Engine {
    home: PathBuf,
    name: String,
    port: u16,
}

impl Engine {
    pub fn start() -> Self {
        let home = PathBuf::from(std::env::var_os("RAGSTONE_TEST_POSTGRES_HOME").expect(MISSING));
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let engine = Self {
            home,
            name: format!("alone-{}-{number}", std::process::id()),
            port: unused_port(),
        };
        engine.start_again();
        engine
    }

    pub fn url(&self) -> String {
        format!("postgres://postgres:postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// The folder of the Postgres programs, owned by the user that runs them.
    pub fn home(&self) -> &Path {
        &self.home
    }

    pub fn start_again(&self) {
        self.pg0(&["start", "--port", &self.port.to_string(), "--name", &self.name]);
    }

    pub fn stop(&self) {
        self.pg0(&["stop", "--name", &self.name]);
    }

    /// Until [`Self::resume`], it accepts connections and answers nothing.
    pub fn pause(&self) {
        // The main process first, so that it starts no others.
        let main = self.main_process();
        signal::pause(&[main]);
        signal::pause(&children(main));
    }

    pub fn resume(&self) {
        let main = self.main_process();
        signal::resume(&children(main));
        signal::resume(&[main]);
    }

    fn main_process(&self) -> u32 {
        let output = Command::new("ps").args(["-eo", "pid=,args="]).output();
        let listed = String::from_utf8_lossy(&output.expect("ps runs").stdout).into_owned();
        let line = listed
            .lines()
            .find(|line| line.contains("postgres") && line.contains(" -D ") && line.contains(&self.name))
            .expect("the server runs");
        number(line.split_whitespace().next().unwrap_or_default())
    }

    /// Runs as the owner of the folder, since Postgres does not run as root.
    fn pg0(&self, args: &[&str]) {
        let owner = std::fs::metadata(&self.home).expect("the folder of Postgres");
        let output = Command::new(self.home.join("pg0"))
            .args(args)
            .env("HOME", &self.home)
            .current_dir(&self.home)
            .uid(owner.uid())
            .gid(owner.gid())
            .output()
            .expect("pg0 runs");
        assert!(output.status.success(), "{args:?}: {output:?}");
    }
}

fn children(process: u32) -> Vec<u32> {
    let output = Command::new("ps").args(["-eo", "pid=,ppid="]).output();
    let listed = String::from_utf8_lossy(&output.expect("ps runs").stdout).into_owned();
    listed
        .lines()
        .filter_map(|line| {
            line.split_once(char::is_whitespace)
                .map(|_| line.split_whitespace())
        })
        .map(|mut words| {
            (
                number(words.next().unwrap_or_default()),
                number(words.next().unwrap_or_default()),
            )
        })
        .filter(|(_, parent)| *parent == process)
        .map(|(child, _)| child)
        .collect()
}

fn number(text: &str) -> u32 {
    text.parse().unwrap_or_else(|_| panic!("no process id: {text:?}"))
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.stop()));
    }
}
