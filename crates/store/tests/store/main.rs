//! The store through its public interface.

#![allow(clippy::unwrap_used)]

mod collections;
mod common;
mod deletion;
mod model;
mod records;
