//! A client that costs next to nothing, so that the server is what is measured.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

pub(crate) struct Answer {
    pub status: u16,
    pub body: String,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.expect("the server accepts");
        stream.set_nodelay(true).expect("an option of TCP");
        Self {
            stream,
            buffer: Vec::with_capacity(16 << 10),
        }
    }

    pub(crate) async fn get(&mut self, path: &str) -> Answer {
        self.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"))
            .await
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> Answer {
        let body = body.to_string();
        self.send(format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
        .await
    }

    /// Every answer of the routes that are measured says how long it is.
    async fn send(&mut self, request: String) -> Answer {
        self.stream
            .write_all(request.as_bytes())
            .await
            .expect("the request is sent");
        self.buffer.clear();
        loop {
            let read = self.stream.read_buf(&mut self.buffer).await.expect("an answer");
            assert!(read > 0, "the server closed the connection");
            let Some(end) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") else {
                continue;
            };
            let head = String::from_utf8_lossy(&self.buffer[..end]).to_ascii_lowercase();
            let length = head
                .split("content-length: ")
                .nth(1)
                .and_then(|rest| rest.split("\r\n").next());
            let length: usize = length.and_then(|length| length.parse().ok()).expect("a length");
            while self.buffer.len() < end + 4 + length {
                assert!(self.stream.read_buf(&mut self.buffer).await.expect("a body") > 0);
            }
            return Answer {
                status: head[9..12].parse().expect("a status"),
                body: String::from_utf8_lossy(&self.buffer[end + 4..]).into_owned(),
            };
        }
    }
}

#[derive(Default)]
pub(crate) struct Latencies(Vec<f64>);

impl Latencies {
    pub(crate) fn add(&mut self, took: Duration) {
        self.0.push(took.as_secs_f64() * 1e3);
    }

    pub(crate) fn merge(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// In milliseconds.
    pub(crate) fn percentile(&self, part: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let at = ((sorted.len() as f64 * part).ceil() as usize).clamp(1, sorted.len().max(1)) - 1;
        sorted.get(at).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p90, p99, max] = [0.5, 0.9, 0.99, 1.0].map(|part| self.percentile(part));
        write!(
            f,
            "p50 {p50:.2} ms, p90 {p90:.2} ms, p99 {p99:.2} ms, max {max:.2} ms ({} calls)",
            self.0.len()
        )
    }
}
