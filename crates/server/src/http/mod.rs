//! The HTTP interface: one readable list of routes, and what surrounds every request.

pub mod auth;
mod chat;
mod collect;
mod collections;
mod compatible;
mod contract;
mod conversations;
mod docs;
mod documents;
mod embeddings;
pub mod error;
mod extract;
mod health;
mod ingest;
mod memory;
mod observe;
mod providers;
mod query;
mod rag;
mod rerank;
mod scope;
pub mod state;
mod transfer;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::get;
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use error::ApiError;
use state::AppState;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Ragstone",
        description = "Retrieval for AI applications: collections of documents, search by meaning and by word, embedding and reranking models.\n\nEvery error is `{\"detail\": \"…\"}`; below `/v1` and `/v2` it says the same in `error.message` too, and below `/v2` in `message`, for the clients made for those interfaces. With API keys set, every route but the probes wants `Authorization: Bearer KEY` or `X-API-Key: KEY`.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    tags(
        (name = "collections", description = "Collections and their metadata"),
        (name = "documents", description = "Documents, found by id and by metadata"),
        (name = "ingestion", description = "Files and rows, read, split and embedded in the background"),
        (name = "search", description = "Documents, found by what they mean or say"),
        (name = "gateway", description = "Many RAG services behind one interface, and questions asked in conversations"),
        (name = "memory", description = "What agents save, and chats that know it"),
        (name = "models", description = "The models in this process"),
        (name = "service", description = "Health and observation"),
    ),
    security((), ("bearer" = []), ("api_key" = [])),
)]
struct ApiDoc;

/// The routes of collections, served for this process below `/collections` and for named backends below
/// `/api/collections`.
fn collection_routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::new()
        .routes(routes!(collections::create))
        .routes(routes!(collections::show, collections::delete))
        .routes(routes!(collections::update_metadata))
        .routes(routes!(documents::list, documents::add, documents::delete))
        .routes(routes!(documents::empty))
        .routes(routes!(documents::show))
        .routes(routes!(documents::metadata_values))
        .routes(routes!(transfer::export))
        .routes(routes!(transfer::import))
        .routes(routes!(query::query_collection))
        .route(
            "/collections/{name}/documents/all",
            get(documents::show_named_all),
        )
}

fn routes() -> OpenApiRouter<AppState> {
    OpenApiRouter::with_openapi(ApiDoc::openapi())
        .merge(collection_routes())
        .nest(scope::GATEWAY, collection_routes())
        .routes(routes!(collections::list))
        .routes(routes!(collections::list_all))
        .routes(routes!(query::ready, query::query))
        .routes(routes!(rerank::rerank))
        .routes(routes!(rerank::rerank_v1))
        .routes(routes!(rerank::rerank_v2))
        .routes(routes!(compatible::models))
        .routes(routes!(embeddings::openai))
        .routes(routes!(embeddings::plain))
        .routes(routes!(contract::embeddings, contract::delete_knowledge_base))
        .routes(routes!(ingest::ingest))
        .routes(routes!(ingest::sources, ingest::remove_sources))
        .routes(routes!(ingest::list))
        .routes(routes!(ingest::show, ingest::cancel))
        .routes(routes!(providers::list))
        .routes(routes!(providers::schema))
        .routes(routes!(providers::test))
        .routes(routes!(providers::services))
        .routes(routes!(collect::collect))
        .routes(routes!(conversations::show, conversations::delete))
        .routes(routes!(memory::status))
        .routes(routes!(memory::list, memory::create))
        .routes(routes!(memory::show, memory::replace, memory::delete))
        .routes(routes!(rag::retrieve))
        .routes(routes!(chat::completions))
        .routes(routes!(health::health))
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
}

/// The description of all routes, generated from them.
pub fn openapi() -> utoipa::openapi::OpenApi {
    let mut api = routes().into_openapi();
    let components = api.components.get_or_insert_default();
    components.security_schemes.insert(
        "bearer".to_owned(),
        SecurityScheme::Http(HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build()).into(),
    );
    components.security_schemes.insert(
        "api_key".to_owned(),
        SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key"))).into(),
    );
    scope::describe(&mut api);
    observe::describe_common_errors(&mut api);
    docs::name_operations(&mut api);
    api
}

pub fn router(state: AppState) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .route("/openapi.json", get(docs::openapi_json))
        .route("/docs", get(docs::page))
        .fallback(|| async { ApiError::route_not_found() })
        .method_not_allowed_fallback(|| async { ApiError::method_not_allowed() })
        .layer(from_fn_with_state(state.clone(), auth::require_key))
        .layer(from_fn_with_state(state.clone(), auth::refuse_other_sites))
        .layer(from_fn_with_state(state.clone(), observe::deadline))
        .layer(tower_http::catch_panic::CatchPanicLayer::custom(
            observe::after_panic,
        ))
        .layer(from_fn(compatible::explain_errors))
        .layer(from_fn(observe::request))
        .with_state(state)
}
