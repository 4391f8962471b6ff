//! Everything Ragstone reaches over the network: embedding APIs, chat APIs and RAG backends.
//!
//! All of it goes through one HTTP client, [`http::ServiceClient`]: a deadline for every call,
//! retries of what is worth retrying, a circuit breaker, limits on answers, redirects and
//! addresses, and credentials that never show. On top of it there are three families, each with a
//! function that makes one from its configuration:
//!
//! * [`embedding`]: embedders for OpenAI, Google and Ollama, and the client side of the embedding
//!   service contract;
//! * [`chat`]: chat models for OpenAI-compatible services, Anthropic, Gemini and Ollama;
//! * backends, listed in a [`registry::Registry`] with their capabilities and connection schemas:
//!   [`ragstone`], the client of our own API, and [`chroma`], storage in a ChromaDB server.
//!
//! [`config`] holds the structures of the configuration file that concern them.

pub mod chat;
pub mod chroma;
pub mod config;
pub mod embedding;
mod error;
mod health;
pub mod http;
mod model_name;
pub mod ragstone;
pub mod registry;
#[cfg(feature = "conformance")]
pub mod testing;

pub use error::ConfigError;
