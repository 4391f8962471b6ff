//! The error of everything that is parsed from outside.

/// Input that breaks a rule. The message is one sentence for the person who sent it: it names
/// the offender and says what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidInput(String);

impl InvalidInput {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    pub fn message(&self) -> &str {
        &self.0
    }
}

/// The message of a parser without the names of our own types, which mean nothing to whoever wrote
/// the text: `expected i64` becomes `expected a whole number`.
pub fn in_plain_words(message: &str) -> String {
    let Some((before, expected)) = message.rsplit_once("expected ") else {
        return message.to_owned();
    };
    let (kind, rest) = match expected.find([' ', ',']) {
        Some(end) => expected.split_at(end),
        None => (expected, ""),
    };
    let (plain, rest) = match kind {
        "i8" | "i16" | "i32" | "i64" | "isize" => ("a whole number", rest),
        "u8" | "u16" | "u32" | "u64" | "usize" => ("a whole number, zero or more", rest),
        "f32" | "f64" => ("a number", rest),
        // Their names say nothing, nor does how many fields they have.
        "struct" | "internally" | "adjacently" => ("an object", ""),
        "tuple" | "sequence" => ("a list", ""),
        "a" if expected.starts_with("a sequence") => ("a list", ""),
        "a" if expected.starts_with("a map") => ("an object", ""),
        "a" if expected.starts_with("a boolean") => ("true or false", ""),
        _ => return message.to_owned(),
    };
    format!("{before}expected {plain}{rest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_ours_are_named_in_plain_words() {
        for (message, plain) in [
            (
                "invalid type: string \"3\", expected i64",
                "invalid type: string \"3\", expected a whole number",
            ),
            (
                "invalid value: integer `-1`, expected usize",
                "invalid value: integer `-1`, expected a whole number, zero or more",
            ),
            (
                "invalid length 1, expected struct WeightsBody with 2 elements",
                "invalid length 1, expected an object",
            ),
            (
                "invalid type: map, expected a sequence",
                "invalid type: map, expected a list",
            ),
            (
                "invalid type: sequence, expected a string",
                "invalid type: sequence, expected a string",
            ),
            ("expected value", "expected value"),
        ] {
            assert_eq!(in_plain_words(message), plain);
        }
    }
}
