//! Logs to stderr, counters for Prometheus.

use std::io::IsTerminal;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::EnvFilter;

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
    let filter = EnvFilter::try_from_env("RAGSTONE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let logs = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    // A second start, in a test, changes nothing.
    let _ = match format {
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
        LogFormat::Text => logs.with_ansi(std::io::stderr().is_terminal()).try_init(),
    };
    // A panic in a thread belongs in the same log as everything else.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        tracing::error!(place, "panic: {}", panic.payload_as_str().unwrap_or("no message"));
    }));
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
