//! `cargo xtask test` runs all tests on a machine that has Rust, a C++ compiler and Python 3 with pip.

mod chroma;
mod deny;
mod fuzz;
mod port;
mod postgres;
mod python;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, bail};
use chroma::Chroma;
use postgres::Postgres;

/// Address of the ChromaDB server of the tests.
const CHROMA: &str = "RAGSTONE_TEST_CHROMA";

/// Tests that must pass on every store: the routes and the features built on them.
const ON_EVERY_STORE: [&str; 8] = [
    "routes::",
    "spec::",
    "ingest::contract::",
    "ingest::crash::",
    "ingest::jobs::",
    "gateway::collect::",
    "gateway::conversations::",
    "memory::chat::",
];

const USAGE: &str = "\
cargo xtask test [--quick]   Build, install what the tests need, run all tests and fuzz each target briefly;
                             --quick runs fewer rounds of long tests and does not fuzz
cargo xtask fuzz [SECONDS]   Fuzz each target for this long (default: 20)
cargo xtask deny             Check licenses, bans, sources and advisories of all dependencies
cargo xtask python           Create the Python environment of the tests and print its interpreter
cargo xtask with-postgres COMMAND...
                             Run a command with a Postgres server, named in RAGSTONE_TEST_POSTGRES and
                             RAGSTONE_TEST_POSTGRES_HOME
cargo xtask with-chroma COMMAND...
                             Run a command with a ChromaDB server, named in RAGSTONE_TEST_CHROMA
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args.as_slice() {
        ["test"] => test(Extent::Full),
        ["test", "--quick"] => test(Extent::Quick),
        ["fuzz"] => fuzz::run_all(fuzz::DEFAULT_SECONDS),
        ["fuzz", seconds] => match seconds.parse() {
            Ok(seconds) => fuzz::run_all(seconds),
            Err(_) => return usage(),
        },
        ["deny"] => deny::check(),
        ["python"] => print_python(),
        ["with-postgres", program, arguments @ ..] => with_postgres(program, arguments),
        ["with-chroma", program, arguments @ ..] => with_chroma(program, arguments),
        _ => return usage(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    eprint!("{USAGE}");
    ExitCode::from(2)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    Full,
    Quick,
}

fn test(extent: Extent) -> anyhow::Result<()> {
    let start = Instant::now();
    step("Python environment for the tests of client libraries");
    let python = python::environment()?;

    step("build");
    run(cargo().args(["test", "--workspace", "--no-run"]))?;

    step("default model, fetched once");
    run(Command::new(program()).args(["models", "pull", "default"]))?;

    step("Postgres");
    let postgres = Postgres::start(&python)?;

    step("tests");
    let mut tests = cargo();
    tests
        .args(["test", "--workspace"])
        .env("RAGSTONE_TEST_PYTHON", &python);
    name_postgres(&mut tests, &postgres);
    if extent == Extent::Quick {
        tests.env("RAGSTONE_TEST_QUICK", "1");
    }
    run(&mut tests)?;

    step("the routes on Postgres");
    let mut routes = routes_on("postgres", &python);
    routes.args(ON_EVERY_STORE);
    name_postgres(&mut routes, &postgres);
    run(&mut routes)?;
    drop(postgres);

    step("the routes on ChromaDB");
    let chroma = Chroma::start(&python)?;
    // ChromaDB does not report its size, and its index may miss documents after many deletions; /health
    // lists both limitations.
    const NOT_ON_CHROMA: [&str; 3] = [
        "health_tells_what_is_there",
        "health_check_with_details",
        "concurrent_readers_see_all_documents_or_none",
    ];
    // ChromaDB answers no other request while it deletes that many documents, so this test runs alone.
    const LARGE: &str = "spec::empty_collection_endpoint::empty_large_collection";
    let mut routes = routes_on("chroma", &python);
    routes.args(ON_EVERY_STORE).args(["--skip", LARGE]);
    routes.args(NOT_ON_CHROMA.iter().flat_map(|test| ["--skip", test]));
    run(routes.env(CHROMA, chroma.address()))?;
    run(routes_on("chroma", &python)
        .args(["--exact", LARGE])
        .env(CHROMA, chroma.address()))?;
    drop(chroma);

    if extent == Extent::Full {
        fuzz::run_all(fuzz::DEFAULT_SECONDS)?;
    }
    step(&format!("all passed in {} s", start.elapsed().as_secs()));
    Ok(())
}

/// The tests of every route on another store, without those about the database file and the timings of
/// the embedded store.
fn routes_on(store: &str, python: &Path) -> Command {
    let mut command = cargo();
    command
        .args(["test", "--workspace", "--test", "blackbox", "--"])
        .args(["--skip", "sqlite_vec", "--skip", "whole_answers"])
        .env("RAGSTONE_TEST_PYTHON", python)
        .env("RAGSTONE_TEST_STORE", store);
    command
}

#[allow(clippy::print_stdout, reason = "the path is the result of the command")]
fn print_python() -> anyhow::Result<()> {
    println!("{}", python::environment()?.display());
    Ok(())
}

fn with_postgres(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let postgres = Postgres::start(&python::environment()?)?;
    let mut command = Command::new(program);
    command.args(arguments);
    name_postgres(&mut command, &postgres);
    run(&mut command)
}

fn with_chroma(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let chroma = Chroma::start(&python::environment()?)?;
    run(Command::new(program)
        .args(arguments)
        .env(CHROMA, chroma.address()))
}

fn name_postgres(command: &mut Command, postgres: &Postgres) {
    command
        .env("RAGSTONE_TEST_POSTGRES", postgres.url())
        .env("RAGSTONE_TEST_POSTGRES_HOME", postgres.home());
}

/// Prints a line that stands out from the output of other programs.
fn step(what: &str) {
    eprintln!("==> {what}");
}

/// The cargo that runs this program, which keeps the selected toolchain.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map_or_else(PathBuf::new, Path::to_owned)
}

/// A folder for programs and packages that tests need, kept between runs.
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

/// The program as built for the tests. `cargo run` would build it again with other features of its
/// dependencies.
fn program() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    root()
        .join(target)
        .join("debug")
        .join(format!("ragstone{}", std::env::consts::EXE_SUFFIX))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let status = command
        .status()
        .with_context(|| format!("{command:?} cannot be started"))?;
    if !status.success() {
        bail!("{command:?} ended with {status}");
    }
    Ok(())
}
