//! The backend that a request is for.
//!
//! The routes below `/collections` and below `/api/collections` have the same handlers. Below
//! `/collections` the backend is this process; below `/api` the request names it, in the query string
//! or in the body.

use axum::extract::{FromRequest, FromRequestParts, MatchedPath, Request};
use axum::http::request::Parts;
use ragstone_search::gateway::NamedBackend;
use serde::de::DeserializeOwned;
use serde_json::Value;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::{Components, Content, Object, OpenApi, Ref, RefOr, Required, ResponseBuilder, Schema};

use super::error::ApiError;
use super::extract::{Params, parse_object, read_body, read_large};
use super::state::AppState;

/// Where the routes with named backends begin.
pub(super) const GATEWAY: &str = "/api";

/// A request body that may name a backend.
pub(super) trait NamesBackend: DeserializeOwned + Send + 'static {
    /// Whether the body brings documents and may be large.
    const IS_LARGE: bool = false;

    fn service(&self) -> Option<&str>;
}

fn is_gateway(parts: &Parts) -> bool {
    let path = parts.extensions.get::<MatchedPath>();
    path.is_some_and(|path| path.as_str().starts_with(GATEWAY))
}

/// The backend of this name.
pub(super) fn named<'a>(state: &'a AppState, service: Option<&str>) -> Result<&'a NamedBackend, ApiError> {
    let name = service.map(str::trim).filter(|name| !name.is_empty());
    let name = name.ok_or_else(ApiError::no_service)?;
    Ok(state.gateway.service(name)?)
}

/// The backend of a request that names it in the query string.
pub(super) struct ScopedBackend(pub(super) NamedBackend);

impl FromRequestParts<AppState> for ScopedBackend {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        if !is_gateway(parts) {
            return Ok(Self(state.gateway.local().clone()));
        }
        let params = Params::from_request_parts(parts, state).await?;
        named(state, params.get("service")).cloned().map(Self)
    }
}

/// The body of a request, and the backend that the body or the query string names.
pub(super) struct Scoped<T> {
    pub(super) backend: NamedBackend,
    pub(super) body: T,
}

impl<T: NamesBackend> FromRequest<AppState> for Scoped<T> {
    type Rejection = ApiError;

    /// Below `/api`, a missing name is reported before anything else that is wrong with the body.
    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let (mut parts, body) = request.into_parts();
        let is_gateway = is_gateway(&parts);
        let in_query = if is_gateway {
            let params = Params::from_request_parts(&mut parts, state).await?;
            params.get("service").map(str::to_owned)
        } else {
            None
        };
        let request = Request::from_parts(parts, body);
        let (bytes, _budget) = if T::IS_LARGE {
            let (bytes, budget) = read_large(request, state).await?;
            (bytes, Some(budget))
        } else {
            (read_body(request, state.limits.body_bytes, state).await?, None)
        };
        let body: T = match parse_object(bytes.clone()).await {
            Ok(body) => body,
            Err(_) if is_gateway && in_query.is_none() && names_no_backend(&bytes) => {
                return Err(ApiError::no_service());
            }
            Err(error) => return Err(error),
        };
        let backend = if is_gateway {
            named(state, in_query.as_deref().or(body.service()))?
        } else {
            state.gateway.local()
        };
        Ok(Self {
            backend: backend.clone(),
            body,
        })
    }
}

/// Whether a JSON object names no backend. Asked only of bodies that could not be read otherwise.
fn names_no_backend(bytes: &[u8]) -> bool {
    let body = serde_json::from_slice::<serde_json::Map<_, _>>(bytes);
    body.is_ok_and(|body| match body.get("service") {
        None | Some(Value::Null) => true,
        Some(service) => service.as_str().is_some_and(|name| name.trim().is_empty()),
    })
}

/// Describes the routes below `/api/collections`, which are those below `/collections` with the name of a
/// backend.
pub(super) fn describe(api: &mut OpenApi) {
    let components = api.components.get_or_insert_default();
    for (path, item) in &mut api.paths.paths {
        if !path.starts_with("/api/collections") {
            continue;
        }
        let operations = [
            (&mut item.get, path.as_str() != "/api/collections"),
            (&mut item.delete, true),
            (&mut item.post, false),
            (&mut item.put, false),
        ];
        for (operation, names_it_in_query) in operations {
            if let Some(operation) = operation {
                describe_operation(operation, names_it_in_query, components);
            }
        }
    }
}

fn describe_operation(operation: &mut Operation, names_it_in_query: bool, components: &mut Components) {
    operation.tags = Some(vec!["gateway".to_owned()]);
    if names_it_in_query {
        let service = ParameterBuilder::new()
            .name("service")
            .parameter_in(ParameterIn::Query)
            .required(Required::True)
            .description(Some("The service that the collection is in"))
            .schema(Some(Object::with_type(utoipa::openapi::Type::String)))
            .build();
        operation
            .parameters
            .get_or_insert_default()
            .push(RefOr::T(service));
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        for content in body.content.values_mut() {
            if let RefOr::T(content) = content {
                name_backend_in_body(content, components);
            }
        }
    }
    let bad_service = [
        (
            "400",
            "No service is named, or the request is invalid; see `detail`",
        ),
        ("404", "No such service or collection"),
        ("429", "The service or a model is overloaded; see Retry-After"),
        ("502", "The service gave no usable answer"),
        ("504", "The service did not answer in time"),
    ];
    for (status, description) in bad_service {
        let schema = RefOr::Ref(Ref::from_schema_name("ErrorBody"));
        let response = ResponseBuilder::new()
            .description(description)
            .content("application/json", Content::new(Some(schema)))
            .build();
        operation
            .responses
            .responses
            .insert(status.to_owned(), RefOr::T(response));
    }
}

/// Fields of a body that the path below `/api/collections` stands for.
const IN_PATH: [&str; 3] = ["collection", "collections", "per_collection"];

/// Replaces the schema of a body by one that requires `service`. Bodies without that field, which only
/// DELETE has, stay as they are.
fn name_backend_in_body(content: &mut Content, components: &mut Components) {
    let Some(RefOr::Ref(reference)) = &mut content.schema else {
        return;
    };
    let Some(name) = reference.ref_location.rsplit('/').next().map(str::to_owned) else {
        return;
    };
    let Some(RefOr::T(Schema::Object(object))) = components.schemas.get(&name) else {
        return;
    };
    if !object.properties.contains_key("service") {
        return;
    }
    let mut object = object.clone();
    object.required.insert(0, "service".to_owned());
    for field in IN_PATH {
        object.properties.remove(field);
    }
    let scoped = format!("{name}InService");
    *reference = Ref::from_schema_name(&scoped);
    components
        .schemas
        .insert(scoped, RefOr::T(Schema::Object(object)));
}
