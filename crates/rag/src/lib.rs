//! What Ragstone does with stores, models and providers.
//!
//! Functions here take a [`Service`], which is nothing but the parts they work with, and answer
//! with domain types and a [`ServiceError`]. They know neither HTTP nor SQL.

pub mod chat;
pub mod collect;
pub mod conversations;
pub mod documents;
pub mod error;
pub mod evaluate;
pub mod gateway;
pub mod ingest;
pub mod jobs;
mod lease;
pub mod ledger;
pub mod memory;
pub mod models;
pub mod moving;
pub mod search;

#[cfg(test)]
mod test_parts;

use std::sync::Arc;

use ragstone_core::storage::Storage;

pub use error::ServiceError;
pub use models::Models;

/// The parts that every operation works with.
#[derive(Clone)]
pub struct Service {
    pub store: Arc<dyn Storage>,
    pub models: Arc<Models>,
}
