//! `/api`: one interface over many RAG services, and questions asked in conversations.
//!
//! Bodies and answers are those of the service routes. Which service is meant stands in the query of
//! a GET or DELETE and in the body of everything else.

pub(super) mod collect;
pub(super) mod collections;
pub(super) mod conversations;
pub(super) mod documents;
pub(super) mod providers;
pub(super) mod query;

use ragstone_rag::gateway::NamedService;

use super::error::ApiError;
use super::extract::Params;
use super::state::AppState;

/// The service that a request names.
fn named<'a>(state: &'a AppState, service: Option<&str>) -> Result<&'a NamedService, ApiError> {
    let name = service.map(str::trim).filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ApiError::bad_request("Service name is required"))?;
    Ok(state.gateway.service(name)?)
}

fn named_by_params<'a>(state: &'a AppState, params: &Params) -> Result<&'a NamedService, ApiError> {
    named(state, params.get("service"))
}
