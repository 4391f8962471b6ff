//! Progress of a transfer on stderr: a bar in a terminal, a line every few seconds elsewhere.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ragstone_transfer::TransferProgress;
use tokio::task::JoinHandle;

const REDRAW: Duration = Duration::from_millis(200);
const PLAIN_LINE: Duration = Duration::from_secs(5);

pub(super) struct Shown {
    pub(super) progress: TransferProgress,
    task: JoinHandle<()>,
    bar: Option<ProgressBar>,
    start: Instant,
}

impl Shown {
    /// `total` is 0 where it is not known.
    pub(super) fn start(done: &'static str, total: u64) -> Self {
        let progress = TransferProgress::default();
        let bar = std::io::stderr().is_terminal().then(|| bar(total));
        let start = Instant::now();
        let (shown, moved) = (bar.clone(), progress.clone());
        let task = tokio::spawn(async move {
            let mut tick = tokio::time::interval(if shown.is_some() { REDRAW } else { PLAIN_LINE });
            tick.tick().await;
            loop {
                tick.tick().await;
                let documents = moved.documents();
                match &shown {
                    Some(bar) => bar.set_position(documents),
                    None => {
                        let rate = documents as f64 / start.elapsed().as_secs_f64();
                        let of = if total > 0 {
                            format!(" of {total}")
                        } else {
                            String::new()
                        };
                        eprintln!("{documents}{of} documents {done}, {rate:.0}/s");
                    }
                }
            }
        });
        Self {
            progress,
            task,
            bar,
            start,
        }
    }

    /// Seconds since the start.
    pub(super) async fn stop(self) -> f64 {
        self.task.abort();
        let _ = self.task.await;
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
        self.start.elapsed().as_secs_f64()
    }
}

fn bar(total: u64) -> ProgressBar {
    let template = if total > 0 {
        "{wide_bar} {human_pos}/{human_len} documents, {per_sec}, {eta} left"
    } else {
        "{spinner} {human_pos} documents, {per_sec}"
    };
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(total).with_style(style)
}
