//! Licenses, bans, sources and advisories of dependencies, checked by cargo-deny.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use crate::{cache, cargo, root, run, step};

const VERSION: &str = "0.20.2";

/// Checks the dependencies of the workspace and of the fuzz targets against `deny.toml`.
pub(crate) fn check() -> anyhow::Result<()> {
    let program = install()?;
    for folder in [root(), root().join("fuzz")] {
        step(&format!("licenses, bans and sources of {}", folder.display()));
        run(deny(&program, &folder).args(["check", "licenses", "bans", "sources"]))?;
    }
    step("advisories");
    let fetched = deny(&program, &root())
        .args(["fetch", "db"])
        .output()
        .with_context(|| format!("{} cannot be started", program.display()))?;
    if !fetched.status.success() {
        step("advisories were NOT checked: their database cannot be fetched from this machine");
        return Ok(());
    }
    run(deny(&program, &root()).args(["check", "--disable-fetch", "advisories"]))
}

fn deny(program: &Path, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .args(["--log-level", "error", "--config"])
        .arg(root().join("deny.toml"))
        .current_dir(folder);
    command
}

/// Builds cargo-deny once per version. Without optimization this takes about a minute on two cores, and
/// its checks a few seconds.
fn install() -> anyhow::Result<PathBuf> {
    let folder = cache()?.join(format!("cargo-deny-{VERSION}"));
    let program = folder.join("bin/cargo-deny");
    if program.is_file() {
        return Ok(program);
    }
    step(&format!(
        "installing cargo-deny {VERSION} into {}",
        folder.display()
    ));
    let build = folder.join("build");
    run(cargo()
        .args(["install", "--locked", "--quiet", "--debug", "cargo-deny"])
        .args(["--version", VERSION, "--root"])
        .arg(&folder)
        .arg("--target-dir")
        .arg(&build)
        .env("CARGO_PROFILE_DEV_DEBUG", "0"))?;
    std::fs::remove_dir_all(&build).with_context(|| format!("{} cannot be removed", build.display()))?;
    Ok(program)
}
