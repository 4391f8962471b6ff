//! The parts of this process that documents are kept and embedded with.

use std::sync::Arc;

use crate::models::Models;
use crate::storage::Storage;

#[derive(Clone)]
pub struct Service {
    pub store: Arc<dyn Storage>,
    pub models: Arc<Models>,
}
