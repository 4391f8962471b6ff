//! The filter language: one parser, one meaning.
//!
//! [`Filter::parse`] turns JSON into a tree within fixed limits; [`Filter::matches`] says what the
//! tree means for one document. Stores answer filters from indexes of their own, and are tested
//! against `matches`.

mod matching;
mod parse;
mod scalar;

pub use parse::{MAX_DEPTH, MAX_LIST, MAX_NODES};
pub use scalar::{Number, Scalar};

/// Which documents are wanted, by their metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum Filter {
    /// True when every part is; of no parts, always.
    All(Vec<Filter>),
    /// True when some part is; of no parts, never.
    Any(Vec<Filter>),
    Not(Box<Filter>),
    Field {
        name: String,
        test: Test,
    },
}

/// What is asked of one field. A list is asked element by element, and one that fits is enough.
#[derive(Debug, Clone, PartialEq)]
pub enum Test {
    /// Equal to one of these.
    OneOf(Vec<Scalar>),
    /// A number or a string, compared with values of its own kind only.
    Compare(Comparison, Scalar),
    /// A list that has this scalar as an element, or a string that has this string within.
    Contains(Scalar),
    /// The field is there, whatever its value, null included.
    Exists,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    Greater,
    GreaterOrEqual,
    Less,
    LessOrEqual,
}

impl Comparison {
    pub fn holds(self, ordering: std::cmp::Ordering) -> bool {
        match self {
            Self::Greater => ordering.is_gt(),
            Self::GreaterOrEqual => ordering.is_ge(),
            Self::Less => ordering.is_lt(),
            Self::LessOrEqual => ordering.is_le(),
        }
    }
}

impl Filter {
    /// The filter that every document passes.
    pub fn everything() -> Self {
        Self::All(Vec::new())
    }

    /// Whether every document passes, whatever its metadata.
    pub fn is_everything(&self) -> bool {
        match self {
            Self::All(parts) => parts.iter().all(Self::is_everything),
            Self::Any(parts) => parts.iter().any(Self::is_everything),
            Self::Not(part) => part.is_nothing(),
            Self::Field { .. } => false,
        }
    }

    /// Whether no document passes, whatever its metadata.
    fn is_nothing(&self) -> bool {
        match self {
            Self::All(parts) => parts.iter().any(Self::is_nothing),
            Self::Any(parts) => parts.iter().all(Self::is_nothing),
            Self::Not(part) => part.is_everything(),
            Self::Field { .. } => false,
        }
    }

    /// Documents whose field equals a scalar, or has it as an element.
    pub fn equals(field: impl Into<String>, value: Scalar) -> Self {
        Self::Field {
            name: field.into(),
            test: Test::OneOf(vec![value]),
        }
    }
}

impl Default for Filter {
    fn default() -> Self {
        Self::everything()
    }
}
