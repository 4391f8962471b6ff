//! `ragstone doctor`: checks everything that a server needs, changes nothing, and suggests fixes.

mod data;
mod models;
mod providers;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{FAILED, block_on, printable};
use crate::config::{ServerArgs, Settings};

#[derive(Args)]
pub(super) struct DoctorArgs {
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
    /// Also check that providers and services answer; may cost a few tokens
    #[arg(long)]
    online: bool,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum CheckStatus {
    Pass,
    Warn,
    Fail,
    Skip,
}

/// The result of one check. Unless it passed, the message names the fix.
#[derive(Debug, Serialize)]
struct Check {
    name: String,
    status: CheckStatus,
    message: String,
}

impl Check {
    fn new(name: impl Into<String>, status: CheckStatus, message: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            status,
            message: message.into(),
        }
    }

    fn pass(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(name, CheckStatus::Pass, message)
    }

    fn warn(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(name, CheckStatus::Warn, message)
    }

    fn fail(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(name, CheckStatus::Fail, message)
    }

    fn skip(name: impl Into<String>, message: impl Into<String>) -> Self {
        Self::new(name, CheckStatus::Skip, message)
    }
}

/// Whether the network may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Offline,
    Online,
}

pub(super) fn run(args: &DoctorArgs) -> ExitCode {
    let checks = match block_on(async { Ok(examine(args).await) }) {
        Ok(checks) => checks,
        Err(error) => vec![Check::fail("Runtime", format!("{error:#}"))],
    };
    let shown = if args.json {
        json(&checks)
    } else {
        text(&checks, &ReportStyle::of_stdout())
    };
    // A closed pipe is not a failed check.
    let _ = std::io::stdout().lock().write_all(shown.as_bytes());
    if count(&checks, CheckStatus::Fail) == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    }
}

async fn examine(args: &DoctorArgs) -> Vec<Check> {
    let settings = match args.server.settings() {
        Ok(settings) => settings,
        Err(error) => {
            let rest = "requires a valid configuration";
            let mut checks = vec![Check::fail("Configuration", error.to_string())];
            checks.extend(["Data directory", "Embedding / RAG", "Chat"].map(|name| Check::skip(name, rest)));
            return checks;
        }
    };
    let reach = if args.online {
        Reach::Online
    } else {
        Reach::Offline
    };
    let from = match &args.server.local.store.config {
        Some(path) => format!("{} is valid", path.display()),
        None => "no file is named; flags, environment variables and defaults apply".to_owned(),
    };
    let mut checks = vec![
        Check::pass("Configuration", from),
        keys(&settings),
        data::port(&settings),
    ];
    let (mut found, stored) = data::store(&settings).await;
    checks.append(&mut found);
    checks.extend(models::embeddings(&settings, &stored));
    checks.push(models::cross_encoder(&settings));
    checks.push(providers::embedding(&settings, &stored));
    checks.push(providers::chat(&settings));
    checks.extend(providers::entries(&settings));
    checks.extend(providers::services(&settings, reach).await);
    checks.extend(providers::online(&settings, reach).await);
    checks
}

fn keys(settings: &Settings) -> Check {
    let name = "API keys";
    match settings.api_keys.len() {
        0 if settings.host.is_loopback() => Check::pass(
            name,
            format!("none; only this machine can reach {}", settings.host),
        ),
        0 => Check::warn(
            name,
            format!(
                "none, and other machines can reach {}: set RAGSTONE_API_KEYS unless this is intended",
                settings.host
            ),
        ),
        count => Check::pass(name, format!("{count} set")),
    }
}

fn count(checks: &[Check], status: CheckStatus) -> usize {
    checks.iter().filter(|check| check.status == status).count()
}

fn json(checks: &[Check]) -> String {
    let report = serde_json::json!({
        "results": checks,
        "summary": {
            "passed": count(checks, CheckStatus::Pass),
            "warnings": count(checks, CheckStatus::Warn),
            "failed": count(checks, CheckStatus::Fail),
            "skipped": count(checks, CheckStatus::Skip),
        },
    });
    format!("{report:#}\n")
}

/// Whether to use colours and symbols.
struct ReportStyle {
    is_terminal: bool,
}

impl ReportStyle {
    fn of_stdout() -> Self {
        Self {
            is_terminal: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
        }
    }

    fn mark(&self, status: CheckStatus) -> &'static str {
        match (self.is_terminal, status) {
            (true, CheckStatus::Pass) => "\x1b[32m✓\x1b[0m",
            (true, CheckStatus::Warn) => "\x1b[33m!\x1b[0m",
            (true, CheckStatus::Fail) => "\x1b[31m✗\x1b[0m",
            (true, CheckStatus::Skip) => "\x1b[2m–\x1b[0m",
            (false, CheckStatus::Pass) => "pass",
            (false, CheckStatus::Warn) => "warn",
            (false, CheckStatus::Fail) => "FAIL",
            (false, CheckStatus::Skip) => "skip",
        }
    }
}

fn text(checks: &[Check], style: &ReportStyle) -> String {
    let width = checks
        .iter()
        .map(|check| check.name.chars().count())
        .max()
        .unwrap_or_default();
    let mut out = String::new();
    for check in checks {
        let message = printable(&check.message);
        let pad = " ".repeat(width - check.name.chars().count());
        out.push_str(&format!(
            "{}  {}{pad}  {message}\n",
            style.mark(check.status),
            check.name
        ));
    }
    out.push_str(&format!(
        "\n{} passed, {} warnings, {} failed, {} skipped\n",
        count(checks, CheckStatus::Pass),
        count(checks, CheckStatus::Warn),
        count(checks, CheckStatus::Fail),
        count(checks, CheckStatus::Skip),
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_symbols_and_a_pipe_gets_words() {
        let checks = [
            Check::pass("A", "fine"),
            Check::fail("Long name", "bad\x1b[31m: mend it"),
        ];
        let piped = text(&checks, &ReportStyle { is_terminal: false });
        assert_eq!(
            piped,
            "pass  A          fine\nFAIL  Long name  bad [31m: mend it\n\n1 passed, 0 warnings, 1 failed, 0 skipped\n"
        );
        let shown = text(&checks, &ReportStyle { is_terminal: true });
        assert!(shown.contains('✓') && shown.contains('✗'), "{shown}");
    }
}
