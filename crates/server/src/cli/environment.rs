//! Environment variables of flags, beyond what clap does with them.

use std::ffi::OsStr;

use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, Command, CommandFactory, FromArgMatches};

use super::Cli;
use crate::config::{ConfigError, SUPERSEDED_VARIABLES};

/// Parses the command line. Usage errors end the program; an invalid environment variable is an error of
/// the configuration.
pub(super) fn parse() -> Result<Cli, ConfigError> {
    let given: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    let command = with_variables(Cli::command(), &given);
    match command.clone().try_get_matches() {
        Ok(matches) => Ok(Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())),
        Err(error) => match variable_at_fault(&error, &command, &given) {
            Some(message) => Err(ConfigError(message)),
            None => error.exit(),
        },
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
