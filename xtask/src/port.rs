//! Ports for servers that start later, and perhaps again.

use std::net::TcpListener;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Below the usual range of ephemeral ports, so that no other program is likely to get the port before the
/// server listens or while it is stopped.
const FIRST: u32 = 20_000;
const COUNT: u32 = 12_000;

/// A free port that this process has not returned before.
pub(crate) fn unused_port() -> u16 {
    // Concurrent processes start at different ports.
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanos = now.map_or(0, |now| now.subsec_nanos());
        AtomicU32::new((std::process::id().wrapping_mul(7919) ^ nanos) % COUNT)
    });
    for _ in 0..COUNT {
        let offset = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = u16::try_from(FIRST + offset).unwrap_or_default();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("all ports from {FIRST} to {} are taken", FIRST + COUNT);
}
