//! Progress and result of an ingestion, for people and programs.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use ragstone_ingest::{Chunk, Progress, Report};
use serde_json::json;
use tokio::task::JoinHandle;

use crate::cli::printable;

const REDRAW: Duration = Duration::from_millis(200);
const PLAIN_LINE: Duration = Duration::from_secs(5);

/// Shows progress on stderr until it is stopped: a bar in a terminal, otherwise a line now and then.
pub(super) struct IngestDisplay {
    task: JoinHandle<()>,
    bar: Option<ProgressBar>,
}

impl IngestDisplay {
    /// `total` is in bytes; 0 where it is not known.
    pub(super) fn start(progress: Arc<Progress>, total: u64, for_machines: bool) -> Self {
        let bar = (std::io::stderr().is_terminal() && !for_machines).then(|| bar(total));
        let shown = bar.clone();
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(if shown.is_some() { REDRAW } else { PLAIN_LINE });
            tick.tick().await;
            loop {
                tick.tick().await;
                let report = progress.snapshot();
                match &shown {
                    Some(bar) => {
                        bar.set_position(report.bytes);
                        bar.set_message(line(&report, &progress, total));
                    }
                    None => eprintln!(
                        "{} of {}, {}",
                        size(report.bytes),
                        size(total),
                        line(&report, &progress, total)
                    ),
                }
            }
        });
        Self { task, bar }
    }

    pub(super) async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(total: u64) -> ProgressBar {
    let template = if total > 0 {
        "{wide_bar} {bytes}/{total_bytes} {msg}"
    } else {
        "{spinner} {bytes} {msg}"
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}

fn line(report: &Report, progress: &Progress, total: u64) -> String {
    let elapsed = progress.elapsed();
    let seconds = elapsed.as_secs_f64().max(0.001);
    let chunks = report.chunks.embedded + report.chunks.reused;
    let left = report
        .time_left(elapsed, total)
        .map(|left| format!(", {} left", HumanDuration(left)))
        .unwrap_or_default();
    format!(
        "{} documents, {chunks} chunks, {:.0} chunks/s, {:.0} tokens/s{left}",
        report.documents_done(),
        chunks as f64 / seconds,
        report.tokens as f64 / seconds
    )
}

/// Prints the result to stdout.
pub(super) fn report(progress: &Progress, collection: &str, as_json: bool) -> anyhow::Result<()> {
    let report = progress.snapshot();
    let (documents, chunks) = (&report.documents, &report.chunks);
    let seconds = progress.elapsed().as_secs_f64();
    let mut out = std::io::stdout().lock();
    if as_json {
        let json = json!({
            "collection": collection,
            "added": documents.added, "changed": documents.changed, "unchanged": documents.unchanged,
            "removed": documents.removed, "failed": documents.failed, "skipped": documents.skipped,
            "chunks": chunks, "tokens": report.tokens, "bytes": report.bytes, "seconds": seconds,
            "errors": report.errors, "more_errors": report.more_errors, "warnings": report.warnings,
        });
        writeln!(out, "{}", serde_json::to_string_pretty(&json)?)?;
        return Ok(());
    }
    writeln!(
        out,
        "{collection}: {} added, {} changed, {} unchanged, {} removed, {} failed{}",
        documents.added,
        documents.changed,
        documents.unchanged,
        documents.removed,
        documents.failed,
        skipped(&report)
    )?;
    writeln!(
        out,
        "{} chunks embedded, {} reused, {} unchanged, {} removed in {seconds:.1} s ({:.0} tokens/s)",
        chunks.embedded,
        chunks.reused,
        chunks.unchanged,
        chunks.removed,
        report.tokens as f64 / seconds.max(0.001)
    )?;
    Ok(())
}

/// Files that were skipped, by type.
fn skipped(report: &Report) -> String {
    match report.documents.skipped {
        0 => String::new(),
        count => {
            let types: Vec<String> = report.skipped_types.iter().map(|name| printable(name)).collect();
            format!(", {count} skipped (unsupported types: {})", types.join(", "))
        }
    }
}

/// Lists failures, and fails the command if there are any.
pub(super) fn failures(progress: &Progress, done: &str) -> anyhow::Result<()> {
    let report = progress.snapshot();
    for item in report.warnings.iter().chain(&report.errors) {
        eprintln!("{}: {}", printable(&item.source), printable(&item.error));
    }
    if report.more_errors > 0 {
        eprintln!("and {} more", report.more_errors);
    }
    let documents = &report.documents;
    if documents.failed == 0 {
        return Ok(());
    }
    let failed = match documents.failed {
        1 => "1 document".to_owned(),
        many => format!("{many} documents"),
    };
    let others = if documents.added + documents.changed + documents.unchanged > 0 {
        "; the others are"
    } else {
        ""
    };
    Err(anyhow::anyhow!("{failed} could not be {done}{others}"))
}

/// A chunk as `--dry-run` shows it.
pub(super) fn chunk(out: &mut impl Write, chunk: &Chunk) -> std::io::Result<()> {
    let metadata = &chunk.document.metadata;
    let text = |key: &str| {
        metadata
            .get(key)
            .and_then(|value| value.as_str())
            .unwrap_or_default()
    };
    writeln!(
        out,
        "── {} ({}, {} tokens)",
        printable(chunk.document.id.as_str()),
        text("doc_type"),
        chunk.tokens
    )?;
    for line in chunk.document.text.lines() {
        writeln!(out, "   {}", printable(line))?;
    }
    writeln!(out)
}

fn size(bytes: u64) -> String {
    indicatif::HumanBytes(bytes).to_string()
}
