//! Helpers to create the databases of tests, whatever the engine.

use std::sync::atomic::{AtomicU32, Ordering};

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// A name that no other test database has.
pub fn new_name() -> String {
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("service_{}_{number}", std::process::id())
}

/// Waits on a thread with its own runtime, because tests call this with and without one.
pub fn wait_for<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    std::thread::spawn(move || {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime")
            .block_on(work)
    })
    .join()
    .expect("the work is done")
}
