//! Acknowledged writes survive, deleted data is gone, and concurrent requests are isolated.

mod concurrency;
mod crash;
mod deletion;
mod model;
mod random_operations;

/// Number of rounds of a long test, fewer with `RAGSTONE_TEST_QUICK`.
fn rounds(full: u32, quick: u32) -> u32 {
    if std::env::var_os("RAGSTONE_TEST_QUICK").is_some() {
        quick
    } else {
        full
    }
}
