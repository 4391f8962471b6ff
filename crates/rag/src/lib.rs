//! What Ragstone does with stores, models and providers.
//!
//! Functions here take a [`Service`], which is nothing but the parts they work with, and answer
//! with domain types and a [`ServiceError`]. They know neither HTTP nor SQL.

pub mod documents;
pub mod error;
pub mod models;
pub mod search;

use std::sync::Arc;

use ragstone_core::store::Store;

pub use error::ServiceError;
pub use models::Models;

/// The parts that every operation works with.
#[derive(Clone)]
pub struct Service {
    pub store: Arc<dyn Store>,
    pub models: Arc<Models>,
}
