//! A Postgres server with pgvector for the tests, from a Python package, on a free port and in a temporary
//! folder.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::port::unused_port;
use crate::run;

/// A running server, stopped on drop.
pub(crate) struct Postgres {
    /// The folder of the program and its data; `pg0 start --name NAME` in here starts another server.
    home: PathBuf,
    port: u16,
    owner: Option<Owner>,
}

/// Postgres does not run as root; for root, it runs as nobody.
#[derive(Clone, Copy)]
struct Owner {
    user: u32,
    group: u32,
}

impl Postgres {
    /// `python` must have the package installed.
    pub(crate) fn start(python: &Path) -> anyhow::Result<Self> {
        let packed = output(
            Command::new(python)
                .arg("-c")
                .arg("import pathlib, pg0; print(pathlib.Path(pg0.__file__).parent / 'bin' / 'pg0')"),
        )?;
        let owner = owner()?;
        // The user nobody cannot read the cache folder of the tests.
        let home = std::env::temp_dir().join(format!("ragstone-postgres-{}", std::process::id()));
        std::fs::create_dir_all(&home).with_context(|| format!("{} cannot be made", home.display()))?;
        let port = unused_port();
        let postgres = Self { home, port, owner };
        let program = postgres.home.join("pg0");
        std::fs::copy(&packed, &program).with_context(|| format!("{packed} cannot be copied"))?;
        if let Some(Owner { user, group }) = owner {
            for path in [&postgres.home, &program] {
                chown(path, Some(user), Some(group))
                    .with_context(|| format!("{} cannot be given to nobody", path.display()))?;
            }
        }
        run(postgres
            .pg0()
            .args(["start", "--config", "max_connections=300", "--port"])
            .arg(port.to_string()))?;
        Ok(postgres)
    }

    pub(crate) fn url(&self) -> String {
        format!("postgres://postgres:postgres@127.0.0.1:{}/postgres", self.port)
    }

    pub(crate) fn home(&self) -> &Path {
        &self.home
    }

    fn pg0(&self) -> Command {
        let mut command = Command::new(self.home.join("pg0"));
        command.env("HOME", &self.home).current_dir(&self.home);
        if let Some(Owner { user, group }) = self.owner {
            command.uid(user).gid(group);
        }
        command
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let _ = self.pg0().arg("stop").output();
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

fn owner() -> anyhow::Result<Option<Owner>> {
    let number =
        |args: &[&str]| -> anyhow::Result<u32> { Ok(output(Command::new("id").args(args))?.parse()?) };
    if number(&["-u"])? != 0 {
        return Ok(None);
    }
    Ok(Some(Owner {
        user: number(&["-u", "nobody"])?,
        group: number(&["-g", "nobody"])?,
    }))
}

fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{command:?} cannot be started"))?;
    anyhow::ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
