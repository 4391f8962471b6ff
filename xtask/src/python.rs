//! The Python environment of tests that use third-party client libraries and servers.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::{cache, root, run, step};

/// Creates the environment unless one with exactly these packages exists, and returns its interpreter.
pub(crate) fn environment() -> anyhow::Result<PathBuf> {
    let requirements = root().join("tests/requirements.txt");
    let wanted = std::fs::read_to_string(&requirements)
        .with_context(|| format!("{} cannot be read", requirements.display()))?;
    let mut hasher = DefaultHasher::new();
    wanted.hash(&mut hasher);
    let folder = cache()?.join(format!("python-{:016x}", hasher.finish()));
    let interpreter = folder.join("bin/python");
    // Written last, so that an interrupted installation is repeated.
    let complete = folder.join("complete");
    if complete.is_file() && interpreter.is_file() {
        return Ok(interpreter);
    }
    if folder.exists() {
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("{} cannot be removed", folder.display()))?;
    }
    step(&format!(
        "installing {} into {}",
        requirements.display(),
        folder.display()
    ));
    run(Command::new("python3").args(["-m", "venv"]).arg(&folder))
        .context("Python 3 with its venv module is needed")?;
    run(Command::new(&interpreter)
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--requirement",
        ])
        .arg(&requirements))?;
    std::fs::write(&complete, &wanted)
        .with_context(|| format!("{} cannot be written", complete.display()))?;
    Ok(interpreter)
}
