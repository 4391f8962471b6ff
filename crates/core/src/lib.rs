//! Domain types and rules of Ragstone.
//!
//! Everything here is plain data and pure functions: no file, socket, clock or thread. The other
//! crates meet at the types and at the few traits defined here.

pub mod analysis;
pub mod backend;
pub mod backoff;
pub mod bm25;
pub mod call;
pub mod chat;
pub mod circuit_breaker;
pub mod collection;
pub mod conversation;
pub mod document;
pub mod document_line;
pub mod error;
pub mod filter;
pub mod fusion;
pub mod measures;
pub mod model;
pub mod models;
pub mod records;
pub mod search;
pub mod service;
pub mod siblings;
pub mod storage;
pub mod vector;

pub use collection::{Collection, CollectionName};
pub use document::{Document, DocumentId, Metadata};
pub use error::InvalidInput;
pub use filter::Filter;
