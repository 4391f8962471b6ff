//! `ragstone backup` and `restore`: the embedded store as one file, even while a server uses it.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use ragstone_store::{BackedUp, Occupied};

use crate::config::{ConfigError, StoreArgs, StoreLocation};

#[derive(Args)]
pub(super) struct BackupArgs {
    /// File to write; it gets this name when it is complete
    file: PathBuf,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Args)]
pub(super) struct RestoreArgs {
    /// File written by `ragstone backup`
    file: PathBuf,
    /// Replace the contents of the data directory
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    store: StoreArgs,
}

fn directory(store: &StoreArgs) -> Result<PathBuf, ConfigError> {
    match store.settings()?.store {
        StoreLocation::Embedded(directory) => Ok(directory),
        other => Err(ConfigError(format!(
            "The store {other} is not an embedded one: use its own backup tools, or `ragstone export`"
        ))),
    }
}

pub(super) fn backup(args: &BackupArgs) -> anyhow::Result<()> {
    if args.file == Path::new("-") {
        // A backup is verified by reading it, which a pipe does not allow.
        anyhow::bail!(
            "a backup cannot be written to standard output: name a file, such as ragstone-backup.db"
        );
    }
    let directory = directory(&args.store)?;
    let bar = std::io::stderr().is_terminal().then(bar);
    let done = ragstone_store::backup(&directory, &args.file, |copied, pages| {
        if let Some(bar) = &bar {
            bar.set_length(pages);
            bar.set_position(copied);
        }
    });
    if let Some(bar) = &bar {
        bar.finish_and_clear();
    }
    say(&format!(
        "backed up {} to {}: {}",
        directory.display(),
        args.file.display(),
        counted(&done?)
    ))
}

pub(super) fn restore(args: &RestoreArgs) -> anyhow::Result<()> {
    let directory = directory(&args.store)?;
    let occupied = if args.force {
        Occupied::Replace
    } else {
        Occupied::Refuse
    };
    let restored = ragstone_store::restore(&args.file, &directory, occupied)?;
    say(&format!(
        "restored {} to {}: {}",
        args.file.display(),
        directory.display(),
        counted(&restored)
    ))
}

fn counted(facts: &BackedUp) -> String {
    format!(
        "{} collections, {} documents, {}",
        facts.collections,
        facts.documents,
        indicatif::HumanBytes(facts.bytes)
    )
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {percent} % of {human_len} pages, {eta} left");
    ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn say(line: &str) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
