//! Progress of downloads: a bar in a terminal, plain lines elsewhere. Always on stderr.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::Mutex;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use ragstone_models::hub::ProgressEvent;

/// Shows the progress of downloads.
pub(crate) fn downloads() -> impl Fn(ProgressEvent<'_>) + Send + Sync {
    let bars = std::io::stderr().is_terminal().then(Bars::default);
    move |event| match &bars {
        Some(bars) => bars.show(event),
        None => log(event),
    }
}

fn log(event: ProgressEvent<'_>) {
    match event {
        ProgressEvent::Started {
            file,
            done: 0,
            total: Some(total),
        } => tracing::info!(file, bytes = total, "downloading"),
        ProgressEvent::Started {
            file,
            done: 0,
            total: None,
        } => tracing::info!(file, "downloading"),
        ProgressEvent::Started { file, done, .. } => tracing::info!(file, done, "resuming the download"),
        ProgressEvent::Advanced { .. } => {}
        ProgressEvent::Finished { file } => tracing::info!(file, "downloaded"),
        ProgressEvent::Note(note) => tracing::info!("{note}"),
    }
}

#[derive(Default)]
struct Bars {
    all: MultiProgress,
    by_file: Mutex<HashMap<String, ProgressBar>>,
}

impl Bars {
    fn show(&self, event: ProgressEvent<'_>) {
        let mut by_file = match self.by_file.lock() {
            Ok(guard) => guard,
            Err(poisoned) => poisoned.into_inner(),
        };
        match event {
            ProgressEvent::Started { file, done, total } => {
                let bar = self
                    .all
                    .add(ProgressBar::new(total.unwrap_or_default()).with_style(style()));
                bar.set_message(file.to_owned());
                bar.set_position(done);
                by_file.insert(file.to_owned(), bar);
            }
            ProgressEvent::Advanced { file, done, total } => {
                if let Some(bar) = by_file.get(file) {
                    bar.set_length(total.unwrap_or(done));
                    bar.set_position(done);
                }
            }
            ProgressEvent::Finished { file } => {
                if let Some(bar) = by_file.remove(file) {
                    bar.finish();
                }
            }
            ProgressEvent::Note(note) => {
                let _ = self.all.println(note);
            }
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{msg:32!} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}
