//! Logs to stderr, counters for Prometheus.

use std::fmt::{self, Write as _};
use std::io::{IsTerminal, Write as _};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// Plain text, coloured in a terminal.
    Text,
    /// One JSON object per line.
    Json,
}

/// Bounds of the latency buckets, in seconds.
const SECONDS: [f64; 14] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];
/// Bounds of the buckets that count texts.
const TEXTS: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
/// The recorder keeps every sample until it is sorted into its bucket: on a scrape, or after this long.
const METRICS_UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Starts logging to stderr. `RAGSTONE_LOG` sets the filter, in the syntax of the `env_filter` crate; the
/// default is `info`.
pub fn start_logs(format: LogFormat) {
    start_logs_from("info", format);
}

/// The same with another default level.
pub fn start_logs_from(level: &str, format: LogFormat) {
    let _ = FORMAT.set(format);
    // Warnings of HTML parsers about a page are of no use to whoever ingests it.
    let filter = EnvFilter::try_from_env("RAGSTONE_LOG")
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},html5ever=error,markup5ever=error")));
    static LOST: AtomicU64 = AtomicU64::new(0);
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || LossyWriter {
            out: std::io::stderr().lock(),
            lost: &LOST,
            format,
        })
        // They would be printed to stderr, and a failure to do so is a panic.
        .log_internal_errors(false)
        .with_target(false);
    // A second start, in a test, changes nothing.
    let _ = match format {
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
        LogFormat::Text => logs
            .with_ansi(std::io::stderr().is_terminal())
            .fmt_fields(one_line())
            .try_init(),
    };
    // Panics of all threads go to the log.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panic: {}", panic.payload_as_str().unwrap_or("no message"));
    }));
}

/// Sets the format of fatal errors that occur before logging starts.
pub(crate) fn set_format(format: LogFormat) {
    let _ = FORMAT.set(format);
}

/// Writes the error that ends the program to stderr, in the format of the log. No log filter hides it.
pub(crate) fn report_fatal(message: &str) {
    let format = FORMAT.get().copied().unwrap_or(LogFormat::Text);
    let line = match format {
        LogFormat::Text => format!("ragstone: fatal: {message}\n"),
        LogFormat::Json => json_line("ERROR", &format!("fatal: {message}")),
    };
    // Nobody is left to tell where this fails.
    let _ = std::io::stderr().lock().write_all(line.as_bytes());
}

fn json_line(level: &str, message: &str) -> String {
    let timestamp = jiff::Timestamp::now().to_string();
    let line = serde_json::json!({"timestamp": timestamp, "level": level, "message": message});
    format!("{line}\n")
}

/// A log output that never fails. Lines that cannot be written, because the disk is full or nobody reads
/// the pipe, are counted, and reported once writing works again.
struct LossyWriter<W> {
    out: W,
    lost: &'static AtomicU64,
    format: LogFormat,
}

impl<W: std::io::Write> LossyWriter<W> {
    fn report_lost(&mut self) -> std::io::Result<()> {
        let lost = self.lost.load(Ordering::Relaxed);
        if lost == 0 {
            return Ok(());
        }
        let message = format!("{lost} log lines were lost because stderr could not be written");
        let line = match self.format {
            LogFormat::Text => format!("{}  WARN {message}\n", jiff::Timestamp::now()),
            LogFormat::Json => json_line("WARN", &message),
        };
        self.out.write_all(line.as_bytes())?;
        self.lost.fetch_sub(lost, Ordering::Relaxed);
        Ok(())
    }
}

impl<W: std::io::Write> std::io::Write for LossyWriter<W> {
    /// Called once per line.
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        if self
            .report_lost()
            .and_then(|()| self.out.write_all(line))
            .is_err()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Formats the fields of text logs. Text from services and clients must not look like a line of its own,
/// nor move the cursor of a terminal.
fn one_line() -> impl for<'w> FormatFields<'w> + 'static {
    debug_fn(|writer: &mut Writer<'_>, field, value| {
        if field.name() != "message" {
            write!(writer, "{field}=")?;
        }
        write!(OneLine(writer), "{value:?}")
    })
    .delimited(" ")
}

/// Escapes control characters.
struct OneLine<W>(W);

impl<W: fmt::Write> fmt::Write for OneLine<W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let breaks = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
        for piece in text.split_inclusive(breaks) {
            let last = piece.chars().next_back().filter(|c| breaks(*c));
            let plain = &piece[..piece.len() - last.map_or(0, char::len_utf8)];
            self.0.write_str(plain)?;
            if let Some(c) = last {
                write!(self.0, "{}", c.escape_default())?;
            }
        }
        Ok(())
    }
}

/// Bounds the memory of samples where nobody scrapes the metrics.
async fn keep_up(metrics: PrometheusHandle) {
    let mut ticks = tokio::time::interval(METRICS_UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

/// Installs the recorder of metrics. Must be called in a runtime.
pub fn start_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_texts".to_owned()), &TEXTS)?
        .install_recorder()?;
    tokio::spawn(keep_up(handle.clone()));
    metrics::describe_counter!("ragstone_http_requests_total", "Requests answered");
    metrics::describe_histogram!(
        "ragstone_http_request_seconds",
        metrics::Unit::Seconds,
        "Time to answer a request"
    );
    metrics::describe_counter!("ragstone_documents_added_total", "Documents added or replaced");
    metrics::describe_counter!("ragstone_queries_total", "Searches, by mode");
    metrics::describe_counter!("ragstone_reranks_total", "Rerank requests");
    metrics::describe_counter!("ragstone_memory_saves_total", "Entries saved, by kind");
    metrics::describe_counter!("ragstone_memory_embedded_total", "Entries embedded");
    metrics::describe_counter!(
        "ragstone_memory_embed_calls_total",
        "Calls to the embedder of agent memory"
    );
    metrics::describe_counter!(
        "ragstone_memory_embed_failures_total",
        "Failed attempts to embed an entry"
    );
    metrics::describe_gauge!("ragstone_memory_queued", "Entries waiting to be embedded");
    metrics::describe_gauge!(
        "ragstone_memory_failed",
        "Entries whose embedding failed repeatedly"
    );
    metrics::describe_gauge!(
        "ragstone_memory_lag_seconds",
        metrics::Unit::Seconds,
        "Age of the oldest entry embedded last"
    );
    metrics::describe_histogram!(
        "ragstone_context_seconds",
        metrics::Unit::Seconds,
        "Time to retrieve the context of a chat"
    );
    metrics::describe_counter!("ragstone_collects_total", "Context collections, by result");
    metrics::describe_counter!(
        "ragstone_embedding_cache_hits_total",
        "Searches whose query vector was cached"
    );
    Ok(handle)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Fails as often as it is told to.
    struct Failing {
        failures: usize,
        log: Log,
    }

    impl std::io::Write for Failing {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            if self.failures > 0 {
                self.failures -= 1;
                return Err(std::io::ErrorKind::StorageFull.into());
            }
            self.log.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lost_lines_are_counted_and_reported_once_writing_works() {
        static LOST: AtomicU64 = AtomicU64::new(0);
        let log = Log::default();
        let mut writer = LossyWriter {
            out: Failing {
                failures: 3,
                log: log.clone(),
            },
            lost: &LOST,
            format: LogFormat::Json,
        };
        for line in ["one\n", "two\n", "three\n", "four\n", "five\n"] {
            std::io::Write::write_all(&mut writer, line.as_bytes()).unwrap();
        }
        let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let (report, rest) = logged.split_once('\n').unwrap();
        let report: serde_json::Value = serde_json::from_str(report).unwrap();
        assert!(
            report["message"]
                .as_str()
                .unwrap()
                .starts_with("3 log lines were lost"),
            "{report}"
        );
        assert_eq!(rest, "four\nfive\n");
    }

    #[test]
    fn a_log_entry_stays_on_its_line() {
        let log = Log::default();
        let writer = log.clone();
        let logs = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .without_time()
            .with_ansi(false)
            .with_target(false)
            .fmt_fields(one_line())
            .finish();
        let said = "no\r\n INFO all is well\u{1b}[2J\u{2028}ü";
        tracing::subscriber::with_default(logs, || {
            tracing::info_span!("asked", %said).in_scope(|| {
                tracing::warn!(error = %said, quoted = said, number = 7, "not {said}");
            });
        });
        let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let escaped = "no\\r\\n INFO all is well\\u{1b}[2J\\u{2028}ü";
        assert_eq!(
            logged,
            format!(
                " WARN asked{{said={escaped}}}: not {escaped} error={escaped} quoted=\"{escaped}\" number=7\n"
            )
        );
    }
}
