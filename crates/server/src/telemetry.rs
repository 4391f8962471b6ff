//! Logs to stderr, counters for Prometheus.

use std::fmt::{self, Write as _};
use std::io::IsTerminal;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{Writer, debug_fn};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One line for people, coloured in a terminal.
    Text,
    /// One JSON object a line.
    Json,
}

/// Bounds of the latency buckets, in seconds.
const SECONDS: [f64; 14] = [
    0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0,
];

/// What is logged is set by `RAGSTONE_LOG`, in the syntax of the `env_filter` crate; `info` unless set.
pub fn start_logs(format: LogFormat) {
    start_logs_from("info", format);
}

/// The same with another level for when nothing is set.
pub fn start_logs_from(level: &str, format: LogFormat) {
    // What parsers think of a page is of no use to whoever ingests it.
    let filter = EnvFilter::try_from_env("RAGSTONE_LOG")
        .unwrap_or_else(|_| EnvFilter::new(format!("{level},html5ever=error,markup5ever=error")));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    // A second start, in a test, changes nothing.
    let _ = match format {
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
        LogFormat::Text => logs
            .with_ansi(std::io::stderr().is_terminal())
            .fmt_fields(one_line())
            .try_init(),
    };
    // A panic in a thread belongs in the same log as everything else.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panic: {}", panic.payload_as_str().unwrap_or("no message"));
    }));
}

/// Fields of text logs. What a service or a client says is among them, and must not look like a line of
/// ours, nor move the cursor of a terminal.
fn one_line() -> impl for<'w> FormatFields<'w> + 'static {
    debug_fn(|writer: &mut Writer<'_>, field, value| {
        if field.name() != "message" {
            write!(writer, "{field}=")?;
        }
        write!(OneLine(writer), "{value:?}")
    })
    .delimited(" ")
}

/// Writes control characters as escapes.
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

pub fn start_metrics() -> anyhow::Result<PrometheusHandle> {
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)?
        .install_recorder()?;
    metrics::describe_counter!("ragstone_http_requests_total", "Requests answered");
    metrics::describe_histogram!(
        "ragstone_http_request_seconds",
        metrics::Unit::Seconds,
        "Time to answer a request"
    );
    metrics::describe_counter!("ragstone_documents_added_total", "Documents added or replaced");
    metrics::describe_counter!("ragstone_queries_total", "Searches, by mode");
    metrics::describe_counter!("ragstone_reranks_total", "Calls of a rerank route");
    metrics::describe_counter!("ragstone_memory_saves_total", "Entries saved, by kind");
    metrics::describe_counter!("ragstone_memory_embedded_total", "Entries embedded");
    metrics::describe_counter!(
        "ragstone_memory_embed_calls_total",
        "Calls of the embedder of agent memory"
    );
    metrics::describe_counter!(
        "ragstone_memory_embed_failures_total",
        "Entries that could not be embedded, each time"
    );
    metrics::describe_gauge!("ragstone_memory_queued", "Entries that wait to be embedded");
    metrics::describe_gauge!(
        "ragstone_memory_failed",
        "Entries whose embedding was given up for now"
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
    metrics::describe_counter!(
        "ragstone_collects_total",
        "Messages whose context was collected, by result"
    );
    metrics::describe_counter!(
        "ragstone_embedding_cache_hits_total",
        "Searches that found the vector of their query made already"
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

    #[test]
    fn what_is_logged_stays_on_its_line() {
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
