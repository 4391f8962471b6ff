//! What callers rely on from an embedding model or a reranker, wherever it runs.

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;

/// What a vector was made by. Recorded with every vector so that a change of model is noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelIdentity {
    /// The alias a user chose, such as `minilm`.
    pub id: String,
    /// Changes whenever the same text could give another vector.
    pub version: String,
    pub dimensions: usize,
}

impl ModelIdentity {
    /// What a version begins with that nobody stated: what is known of a model behind an API is its
    /// name, and the service may change what it means.
    const UNSTATED: &str = "unversioned:";

    pub fn unstated_version(known: &str) -> String {
        format!("{}{known}", Self::UNSTATED)
    }

    /// Whether the version is that of the model's files, or one that its configuration states.
    pub fn has_stated_version(&self) -> bool {
        !self.version.is_empty() && !self.version.starts_with(Self::UNSTATED)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelInfo {
    pub identity: ModelIdentity,
    /// Where the model comes from: a hub id, a directory, or a provider's model name.
    pub name: String,
    /// Longer texts are cut to this many tokens, where the model knows its limit.
    pub max_tokens: Option<usize>,
}

/// Models that were trained with different prompts for questions and for texts need to know which it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Query,
    Passage,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmbedInput {
    Text(String),
    /// Token ids of the model's own vocabulary, without special tokens.
    Tokens(Vec<u32>),
}

impl From<String> for EmbedInput {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Embedding {
    pub vector: Vec<f32>,
    /// Tokens that were read, special tokens included.
    pub tokens: usize,
    /// The text was longer than the model reads, and its end was left out.
    pub truncated: bool,
}

/// What an embedder takes in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallLimits {
    pub texts: usize,
    /// Of all texts together. No token is shorter than a byte, so a limit on tokens holds when bytes
    /// keep to it.
    pub bytes: usize,
}

impl CallLimits {
    pub const NONE: Self = Self {
        texts: usize::MAX,
        bytes: usize::MAX,
    };
}

/// Turns texts into vectors of one fixed width.
///
/// The answer has one embedding per input, in the order of the inputs, each of the width that
/// [`ModelInfo`] names and made of finite numbers. Dropping the future cancels the work.
#[async_trait]
pub trait Embedder: Send + Sync {
    fn info(&self) -> &ModelInfo;

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError>;

    /// Inputs beyond these limits are worked on in several pieces, and when one of them fails, what
    /// came of the others is lost. Whoever wants to keep it stays within the limits.
    fn limits(&self) -> CallLimits {
        CallLimits::NONE
    }

    /// How many tokens the model would read of each text, special tokens not counted and nothing
    /// cut; `None` where only the far side of a network could tell.
    fn count_tokens(&self, _text: &str) -> Option<usize> {
        None
    }
}

/// What a reranker found out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Scored {
    /// One per text, in their order; higher is better.
    pub scores: Vec<f32>,
    /// Tokens that were read, special tokens included, the query's once for every text.
    pub tokens: usize,
}

/// Scores how well each text answers a query.
#[async_trait]
pub trait Reranker: Send + Sync {
    /// The name a user knows the model by.
    fn name(&self) -> &str;

    /// Of each text, at most `max_text_tokens` are read, where that is given.
    async fn score(
        &self,
        query: &str,
        texts: Vec<String>,
        max_text_tokens: Option<usize>,
    ) -> Result<Scored, ModelError>;
}

#[derive(Debug, Clone, thiserror::Error)]
pub enum ModelError {
    #[error("the model's queue is full; try again in {} s", .retry_after.as_secs().max(1))]
    Overloaded { retry_after: Duration },
    #[error("{0}")]
    InvalidInput(String),
    /// The model, or the service it runs in, does not answer.
    #[error("{0}")]
    Unavailable(String),
    #[error("{0}")]
    Failed(String),
    /// A model behind an API gave no vectors.
    #[error("{0}")]
    Remote(RemoteFailure),
}

impl ModelError {
    /// For a failure that passes by itself: after how long the model may be asked again, zero where
    /// nobody knows.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Overloaded { retry_after } => Some(*retry_after),
            Self::Unavailable(_) => Some(Duration::ZERO),
            Self::InvalidInput(_) | Self::Failed(_) => None,
            Self::Remote(failure) => match failure.fault {
                RemoteFault::Busy { retry_after } => Some(retry_after),
                RemoteFault::Down => Some(Duration::ZERO),
                RemoteFault::Refused { .. }
                | RemoteFault::Misconfigured { .. }
                | RemoteFault::BadAnswer
                | RemoteFault::OtherModel => None,
            },
        }
    }
}

/// How a provider failed. Displayed, it is a sentence that any client may read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteFailure {
    pub provider: String,
    pub fault: RemoteFault,
    /// What the provider said, for whoever runs this server; not for its clients.
    pub reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemoteFault {
    /// It has too much to do.
    Busy { retry_after: Duration },
    /// It cannot be reached, does not answer in time, or fails by itself.
    Down,
    /// It refuses this request: for a text in it, or for something that is configured.
    Refused { status: u16 },
    /// It would refuse any request: the key, the address or the model is wrong.
    Misconfigured { status: u16 },
    /// It answered what cannot be an answer.
    BadAnswer,
    /// It answers with another version or width of the model than is configured. The reason says with
    /// which, in our own words, and clients may read it.
    OtherModel,
}

impl fmt::Display for RemoteFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "provider '{}' ", self.provider)?;
        match self.fault {
            RemoteFault::Busy { retry_after } => {
                write!(
                    f,
                    "is overloaded; try again in {} s",
                    retry_after.as_secs().max(1)
                )
            }
            RemoteFault::Down => write!(f, "does not answer; try again later"),
            RemoteFault::Refused { status } => {
                write!(f, "refuses to embed this text (status {status}); is it too long?")
            }
            RemoteFault::Misconfigured { status } => write!(
                f,
                "refuses what it is asked (status {status}); are its apiKey, address and model right?"
            ),
            RemoteFault::BadAnswer => write!(f, "gave an answer that cannot be used"),
            RemoteFault::OtherModel => write!(
                f,
                "answers with another model than is configured: {}",
                self.reason
            ),
        }
    }
}
