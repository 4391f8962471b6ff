//! Agent memory over the embedded store, with an embedder that does as it is told.

mod buffer;
mod rag;
mod source;
mod support;
