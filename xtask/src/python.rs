//! The Python environment that tests of other people's client libraries run in.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::{root, run, step};

/// Makes the environment, unless one with these very packages is there, and gives its interpreter.
pub(crate) fn environment() -> anyhow::Result<PathBuf> {
    let requirements = root().join("tests/requirements.txt");
    let wanted = std::fs::read_to_string(&requirements)
        .with_context(|| format!("{} cannot be read", requirements.display()))?;
    let mut hasher = DefaultHasher::new();
    wanted.hash(&mut hasher);
    let folder = cache()?.join(format!("python-{:016x}", hasher.finish()));
    let interpreter = folder.join("bin/python");
    // Written last, so that an installation that broke off is made again.
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

fn cache() -> anyhow::Result<PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name)
            .filter(|value| !value.is_empty())
            .map(PathBuf::from)
    };
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    let folder = base
        .context("neither XDG_CACHE_HOME nor HOME is set")?
        .join("ragstone-tests");
    std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    Ok(folder)
}
