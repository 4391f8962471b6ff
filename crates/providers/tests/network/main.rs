//! The client and the providers against servers on this machine that check what they are sent, and
//! misbehave.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod chat;
mod chat_tools;
mod client;
mod contract;
mod deadlines;
mod embedding;
mod faults;
mod registry;
mod rerank;
mod secrets;
