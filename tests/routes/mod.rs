//! Laid out like the URLs: what each route answers, and how it refuses what is wrong.

mod collections;
mod common;
mod documents;
mod documents_add;
mod documents_delete;
mod embeddings;
mod filters;
mod keys;
mod limits;
mod metadata_values;
mod openapi;
mod query;
mod query_models;
mod query_modes;
mod rerank;
mod service;
mod work;
