//! What Ragstone does with stores, models and providers.
//!
//! Functions here take a [`Service`], which is nothing but the parts they work with, and answer
//! with domain types and a [`ServiceError`]. They know neither HTTP nor SQL.

pub mod chat;
pub mod error;
pub mod ingest;
pub mod jobs;
mod lease;
pub mod ledger;
pub mod memory;

pub use error::ServiceError;
pub use ragstone_core::models::{self, Models};
pub use ragstone_core::service::Service;

#[cfg(test)]
use ragstone_search::testing as test_parts;
