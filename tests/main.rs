//! Black-box tests against the built program: what a client, a user at a terminal and an operator
//! can rely on.
//!
//! `spec` has one test per scenario of the specification, by its name; `routes` follows the URLs;
//! `process` is about starting and stopping; `durability` about what survives; `clients` about
//! other people's client libraries; `docs` runs the code blocks of the documents.

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
