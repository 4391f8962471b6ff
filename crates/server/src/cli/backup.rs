//! `ragstone backup` and `restore`: the embedded store as one file, also while a server uses it.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use ragstone_store::{BackedUp, Occupied};

use crate::config::{self, ConfigError, Flags, Layers, StoreLocation};

#[derive(Args)]
pub(super) struct BackupArgs {
    /// Where to write the backup; it gets this name when it is whole
    file: PathBuf,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Args)]
pub(super) struct RestoreArgs {
    /// What `ragstone backup` wrote
    file: PathBuf,
    /// Replace what the data directory holds
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    place: PlaceArgs,
}

#[derive(Args)]
struct PlaceArgs {
    /// Where the embedded store keeps its file [default: ragstone-data; env: RAGSTONE_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Configuration file [env: RAGSTONE_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl PlaceArgs {
    fn directory(&self) -> Result<PathBuf, ConfigError> {
        let env = &config::process_env;
        let flags = Flags {
            data_dir: self.data_dir.clone(),
            // Nothing listens here, so nothing needs a key.
            allow_no_key: true,
            ..Flags::default()
        };
        let file = config::read_file(self.config.as_deref(), env)?;
        match config::build(Layers { flags, env, file })?.store {
            StoreLocation::Embedded(directory) => Ok(directory),
            _ => Err(ConfigError(
                "backup and restore are for the embedded store; another store has its engine's own tools, and \
                 `ragstone export` takes collections out of any"
                    .to_owned(),
            )),
        }
    }
}

pub(super) fn backup(args: &BackupArgs) -> anyhow::Result<()> {
    if args.file == Path::new("-") {
        // It is read back before it counts, and a pipe cannot be.
        anyhow::bail!(
            "a backup cannot be written to standard output: name a file, such as ragstone-backup.db"
        );
    }
    let directory = args.place.directory()?;
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
    let directory = args.place.directory()?;
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
