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

use std::borrow::Cow;
use std::marker::PhantomData;

use ragstone_rag::gateway::NamedService;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::error::ApiError;
use super::extract::Params;
use super::state::AppState;

/// The service that a request names.
fn named<'a>(state: &'a AppState, service: Option<&str>) -> Result<&'a NamedService, ApiError> {
    let name = service.map(str::trim).filter(|name| !name.is_empty());
    let name = name.ok_or_else(ApiError::no_service)?;
    Ok(state.gateway.service(name)?)
}

fn named_by_params<'a>(state: &'a AppState, params: &Params) -> Result<&'a NamedService, ApiError> {
    named(state, params.get("service"))
}

/// Describes the body of a service route as it is here: it names the service, and the collection stands
/// in the path. The annotations of a route take it under a name without brackets.
pub(crate) struct InService<T>(PhantomData<T>);

impl<T: ToSchema> PartialSchema for InService<T> {
    fn schema() -> RefOr<Schema> {
        let mut schema = T::schema();
        if let RefOr::T(Schema::Object(object)) = &mut schema {
            object.required.insert(0, "service".to_owned());
            for field in ["collection", "collections", "per_collection"] {
                object.properties.remove(field);
            }
        }
        schema
    }
}

impl<T: ToSchema> ToSchema for InService<T> {
    fn name() -> Cow<'static, str> {
        format!("{}InService", T::name()).into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        T::schemas(schemas);
    }
}
