//! The program `ragstone`: command line, configuration and HTTP interface over the other crates.
//!
//! Only this crate knows axum, status codes and the JSON shapes of the wire.

mod agent;
pub mod cli;
pub mod config;
pub mod http;
mod listen;
mod progress;
mod startup;
mod stores;
pub mod telemetry;
