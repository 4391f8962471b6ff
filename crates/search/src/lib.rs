//! Search over this process and other backends.
//!
//! * [`StorageBackend`]: a backend made of a storage engine and the models of this process.
//! * [`fanout`]: many collections of many backends, one merge.
//! * [`vectors`]: the cache of query vectors.
//! * [`conversations`] and [`plan`]: the queries that answer a message.
//! * [`gateway`]: names for backends.
//! * [`evaluate`]: search quality on judged queries.

pub mod conversations;
mod documents;
pub mod evaluate;
pub mod fanout;
pub mod gateway;
pub mod plan;
mod rerank;
mod storage_backend;
pub mod vectors;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use storage_backend::StorageBackend;
pub use vectors::QueryVectors;
