//! A port for a server that is to listen on it later, and perhaps again.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Below what the system gives to outgoing connections and to whoever asks for any port: in the seconds
/// until the server listens, or while it is stopped, nobody is given this one.
const FIRST: u32 = 20_000;
const COUNT: u32 = 12_000;

/// A port on which nobody listens.
pub(crate) fn unused_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Processes that look for ports at the same time begin at different places.
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let begin = std::process::id().wrapping_mul(7919) ^ now.map_or(0, |now| now.subsec_nanos());
    for _ in 0..COUNT {
        let offset = begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT;
        let port = u16::try_from(FIRST + offset).unwrap_or_default();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("all ports from {FIRST} to {} are taken", FIRST + COUNT);
}
