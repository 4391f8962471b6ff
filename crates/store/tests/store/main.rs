//! The store through its public interface.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod collections;
mod common;
mod concurrency;
mod deletion;
mod filters;
mod generators;
mod model;
mod moving;
mod opening;
mod postgres;
mod ranking;
mod records;
