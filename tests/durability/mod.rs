//! What was acknowledged stays; what was deleted is gone; what runs at once does not mix.

mod concurrency;
mod crash;
mod deletion;
mod model;
mod random_operations;

/// With `RAGSTONE_TEST_QUICK` set, long tests do a small part of their rounds.
fn rounds(full: u32, quick: u32) -> u32 {
    if std::env::var_os("RAGSTONE_TEST_QUICK").is_some() {
        quick
    } else {
        full
    }
}
