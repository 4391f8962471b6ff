//! Fuzzing on the stable toolchain: rustc passes the instrumentation options of libFuzzer to LLVM, and
//! the `libfuzzer-sys` crate builds libFuzzer with the C++ compiler.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use crate::{cargo, root, run, step};

pub(crate) const DEFAULT_SECONDS: u32 = 20;

const TARGETS: [&str; 5] = ["filter", "documents", "safetensors", "model_config", "tokenizer"];

/// Counters on every edge, their addresses, and the operands of comparisons.
const INSTRUMENTATION: [&str; 6] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// Builds all targets and runs each for this long.
pub(crate) fn run_all(seconds: u32) -> anyhow::Result<()> {
    step("build fuzz targets");
    let folder = root().join("fuzz");
    let output = root().join("target/fuzz");
    let host = host()?;
    // An explicit target keeps the flags away from build scripts, which are not linked with libFuzzer.
    run(cargo()
        .current_dir(&folder)
        .args(["build", "--release", "--target", &host, "--target-dir"])
        .arg(&output)
        .env("CARGO_ENCODED_RUSTFLAGS", INSTRUMENTATION.join("\u{1f}")))?;
    let programs = output.join(&host).join("release");
    for target in TARGETS {
        step(&format!("fuzz {target} for {seconds} s"));
        let corpus = folder.join("corpus").join(target);
        let artifacts = folder.join("artifacts").join(target);
        for directory in [&corpus, &artifacts] {
            std::fs::create_dir_all(directory)
                .with_context(|| format!("{} cannot be made", directory.display()))?;
        }
        let mut prefix = artifacts.into_os_string();
        prefix.push("/");
        run(Command::new(programs.join(target))
            .args([
                "-timeout=10",
                "-rss_limit_mb=1024",
                "-verbosity=0",
                "-print_final_stats=1",
            ])
            .arg(format!("-max_total_time={seconds}"))
            .arg(option("-dict=", folder.join(format!("{target}.dict"))))
            .arg(option("-artifact_prefix=", PathBuf::from(prefix)))
            .arg(&corpus)
            .arg(folder.join("seeds").join(target)))
        .with_context(|| {
            format!(
                "fuzzing {target} found something: the input is in {}",
                folder.join("artifacts").join(target).display()
            )
        })?;
    }
    Ok(())
}

fn option(name: &str, path: PathBuf) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from(name);
    option.push(path);
    option
}

/// The target triple of this machine.
fn host() -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc)
        .arg("-vV")
        .output()
        .context("rustc cannot be started")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let host = text
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .context("rustc names no host")?;
    Ok(host.to_owned())
}
