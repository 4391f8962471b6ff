//! Black-box tests of the built program, as clients, users and operators see it.
//!
//! `spec` has one test per scenario of the specification, by its name; `routes` follows the URLs;
//! `process` tests starting and stopping; `durability` crashes and concurrency; `clients` third-party
//! client libraries; `docs` runs the code blocks of the documents.

#![allow(
    unreachable_pub,
    clippy::redundant_closure_for_method_calls,
    clippy::semicolon_if_nothing_returned,
    clippy::redundant_closure,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod clients;
mod docs;
mod durability;
mod evaluation;
mod gateway;
mod ingest;
mod memory;
mod moving;
mod postgres;
mod process;
mod routes;
mod spec;
mod support;
