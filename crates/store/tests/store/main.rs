//! The store through its public interface.

mod collections;
mod common;
