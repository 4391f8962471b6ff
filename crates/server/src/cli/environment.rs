//! Parsing arguments: rules of environment variables and hints beyond those of clap.

use std::ffi::OsStr;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, CommandFactory, FromArgMatches};

use super::Cli;
use crate::config::{ConfigError, SUPERSEDED_VARIABLES};
use crate::telemetry::{self, LogFormat};

/// Parses the command line. Usage errors end the program; an invalid environment variable is an error of
/// the configuration.
pub(super) fn parse() -> Result<Cli, ConfigError> {
    let given: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    // `query` searches a server unless a flag names a store: variables meant for `serve` do not count.
    let command = with_variables(Cli::command(), &given).mut_subcommand("query", |query| {
        query
            .mut_arg("data_dir", |arg| {
                without_variable(arg).help("Search this data directory, without a server")
            })
            .mut_arg("store", |arg| {
                without_variable(arg).help(
                    "Search this store, without a server: sqlite://DIR, postgres://… or chroma://HOST:PORT",
                )
            })
    });
    match command.clone().try_get_matches() {
        Ok(matches) => Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())),
        Err(mut error) => {
            if let Some(message) = variable_at_fault(&error, &command, &given) {
                if wants_json(&given) {
                    telemetry::set_format(LogFormat::Json);
                }
                return Err(ConfigError(message));
            }
            suggest_serve(&mut error, &command, &given);
            error.exit()
        }
    }
}

/// Ignores variables that are blank, and those of alternatives to a given flag. Help never shows values,
/// because one may be a password.
fn with_variables(command: Command, given: &[String]) -> Command {
    command
        .mut_args(|arg| {
            let Some(variable) = arg.get_env() else {
                return arg;
            };
            if is_blank(variable) || is_superseded(variable, given) {
                without_variable(arg)
            } else {
                arg.hide_env_values(true)
            }
        })
        .mut_subcommands(|command| with_variables(command, given))
}

fn without_variable(arg: Arg) -> Arg {
    arg.env(Resettable::Reset)
}

fn is_blank(variable: &OsStr) -> bool {
    std::env::var_os(variable).is_some_and(|value| value.to_string_lossy().trim().is_empty())
}

fn is_superseded(variable: &OsStr, given: &[String]) -> bool {
    SUPERSEDED_VARIABLES
        .iter()
        .any(|(flag, superseded)| variable == OsStr::new(superseded) && is_given(flag, given))
}

fn is_given(flag: &str, given: &[String]) -> bool {
    given
        .iter()
        .any(|argument| argument.split('=').next() == Some(flag))
}

/// Names the variable that has an invalid value, where the flag was not given. clap names only the flag.
fn variable_at_fault(error: &clap::Error, command: &Command, given: &[String]) -> Option<String> {
    let text = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (flag, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let flag = flag.split(' ').next()?;
    if is_given(flag, given) {
        return None;
    }
    let command = command.find_subcommand(given.first()?)?;
    let mut args = command.get_arguments();
    let arg = args.find(|arg| arg.get_long() == flag.strip_prefix("--"))?;
    let variable = arg.get_env()?.to_string_lossy().into_owned();
    let reason = match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) => format!("must be one of: {}", values.join(", ")),
        _ => std::error::Error::source(error)?.to_string(),
    };
    Some(format!("{variable} is '{value}': {reason}"))
}

/// Whether the log is to be JSON, for an error before the arguments are parsed.
fn wants_json(given: &[String]) -> bool {
    let is_json = |value: &str| value.eq_ignore_ascii_case("json");
    let flag = "--log-format";
    given.iter().enumerate().any(|(index, argument)| {
        let value = match argument.strip_prefix(flag) {
            Some("") => given.get(index + 1).map(String::as_str),
            Some(rest) => rest.strip_prefix('='),
            None => None,
        };
        value.is_some_and(is_json)
    }) || std::env::var("RAGSTONE_LOG_FORMAT").is_ok_and(|value| is_json(&value))
}

/// Adds a hint for a flag of `serve` that was given without it.
fn suggest_serve(error: &mut clap::Error, command: &Command, given: &[String]) {
    let Some(ContextValue::String(flag)) = error.get(ContextKind::InvalidArg) else {
        return;
    };
    let is_of_serve = command.find_subcommand("serve").is_some_and(|serve| {
        serve
            .get_arguments()
            .any(|arg| arg.get_long() == flag.strip_prefix("--"))
    });
    if given.first() == Some(flag) && is_of_serve {
        let hint = format!("'{flag}' is a flag of `ragstone serve`: run `ragstone serve {flag}`");
        error.insert(
            ContextKind::Suggested,
            ContextValue::StyledStrs(vec![hint.into()]),
        );
    }
}
