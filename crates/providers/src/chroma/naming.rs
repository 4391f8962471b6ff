//! Collection names of Ragstone and of Chroma.
//!
//! Chroma's names have at least three characters, begin and end with a letter or digit, have no two dots
//! in a row, and are not IPv4 addresses. A service uses Chroma's names as they are. The default store must
//! accept every name, so it wraps the names that Chroma refuses.

use ragstone_core::CollectionName;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Naming {
    AsTheyAre,
    Wrapped,
}

const PREFIX: &str = "ragstone--";
const SUFFIX: &str = "-x";

impl Naming {
    /// The error is a message for the client.
    pub(super) fn chroma_name(self, name: &CollectionName) -> Result<String, String> {
        let text = name.as_str();
        match self {
            Self::AsTheyAre if is_possible(text) => Ok(text.to_owned()),
            Self::AsTheyAre => Err(format!(
                "Invalid collection name {text:?} for ChromaDB: it must have at least 3 characters, begin and end with \
                 a letter or digit, have no two dots in a row, and not be an IPv4 address"
            )),
            Self::Wrapped if is_possible(text) && !text.starts_with(PREFIX) => Ok(text.to_owned()),
            Self::Wrapped => Ok(wrap(text)),
        }
    }

    /// `None` for a name that is not valid here.
    pub(super) fn our_name(self, name: &str) -> Option<CollectionName> {
        if self == Self::Wrapped
            && let Some(rest) = name.strip_prefix(PREFIX)
        {
            let ours = unwrap(rest.strip_suffix(SUFFIX)?)?;
            return match ours.strip_prefix('.') {
                Some(internal) => Some(CollectionName::internal(internal)),
                None => CollectionName::parse(ours).ok(),
            };
        }
        CollectionName::parse(name).ok()
    }
}

fn is_possible(name: &str) -> bool {
    let plain = |byte: Option<u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric());
    name.len() >= 3
        && plain(name.bytes().next())
        && plain(name.bytes().last())
        && !name.contains("..")
        && !looks_like_an_address(name)
}

/// Matches a little more than addresses, and every name that Chroma takes for one.
fn looks_like_an_address(name: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    name.split('.').count() == 4 && name.split('.').all(number)
}

fn wrap(name: &str) -> String {
    let mut wrapped = PREFIX.to_owned();
    for c in name.chars() {
        match c {
            '-' => wrapped.push_str("-m"),
            '.' => wrapped.push_str("-d"),
            other => wrapped.push(other),
        }
    }
    wrapped + SUFFIX
}

fn unwrap(wrapped: &str) -> Option<String> {
    let mut name = String::new();
    let mut chars = wrapped.chars();
    while let Some(c) = chars.next() {
        name.push(match c {
            '-' => match chars.next()? {
                'm' => '-',
                'd' => '.',
                _ => return None,
            },
            other => other,
        });
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_survives_the_round_trip() {
        let long = "x-".repeat(64);
        let names = [
            "docs",
            "c",
            "a..b",
            "a-",
            "x.",
            "a_b",
            "127.0.0.1",
            "1.2.3.4.5",
            "ragstone--docs-x",
            "ragstone--a",
            &long,
        ];
        let mut seen = std::collections::HashSet::new();
        let ours = names.map(|name| CollectionName::parse(name).unwrap());
        for name in ours.iter().chain([&CollectionName::internal("memory.knowledge")]) {
            let there = Naming::Wrapped.chroma_name(name).unwrap();
            assert!(is_possible(&there) && there.len() <= 512, "{there}");
            assert_eq!(Naming::Wrapped.our_name(&there).as_ref(), Some(name));
            assert!(seen.insert(there));
        }
        assert_eq!(Naming::Wrapped.chroma_name(&ours[0]).unwrap(), "docs");
    }

    #[test]
    fn names_that_were_not_wrapped_are_not_unwrapped() {
        for name in ["ragstone--a-q-x", "ragstone--a", "ragstone---x"] {
            assert_eq!(Naming::Wrapped.our_name(name), None, "{name}");
        }
        assert!(
            Naming::AsTheyAre
                .chroma_name(&CollectionName::parse("ab").unwrap())
                .is_err()
        );
    }
}
