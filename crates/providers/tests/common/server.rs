//! A small HTTP server that answers as the test tells it, well or badly.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A request as it arrived.
#[derive(Debug, Clone)]
pub struct Seen {
    pub method: String,
    /// With its query.
    pub target: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    pub fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }
}

pub enum Reply {
    Answer {
        status: u16,
        headers: Vec<(&'static str, String)>,
        body: Vec<u8>,
    },
    /// Says nothing until the client gives up.
    Hang,
    /// Announces more than it sends, and closes.
    CutShort,
    /// Closes without a word.
    Close,
    /// A body that comes byte by byte.
    Drip,
    /// A body of a gigabyte; `announced` with its length or not.
    Flood { announced: bool },
    /// Events, each in a piece of its own; the connection is closed after them.
    Events(Vec<String>),
}

impl Reply {
    pub fn json(body: Value) -> Self {
        Self::status(200, body)
    }

    pub fn status(status: u16, body: Value) -> Self {
        Self::Answer {
            status,
            headers: vec![("content-type", "application/json".into())],
            body: body.to_string().into_bytes(),
        }
    }

    pub fn with_header(self, name: &'static str, value: impl Into<String>) -> Self {
        match self {
            Self::Answer {
                status,
                mut headers,
                body,
            } => {
                headers.push((name, value.into()));
                Self::Answer {
                    status,
                    headers,
                    body,
                }
            }
            other => other,
        }
    }
}

pub struct TestServer {
    pub url: String,
    seen: Arc<Mutex<Vec<Seen>>>,
    flooded: Arc<AtomicU64>,
    task: tokio::task::JoinHandle<()>,
}

impl TestServer {
    /// `answer` gets each request and how many came before it.
    pub async fn start(answer: impl Fn(&Seen, usize) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let flooded = Arc::new(AtomicU64::new(0));
        let (log, poured, answer) = (seen.clone(), flooded.clone(), Arc::new(answer));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let _ = stream.set_nodelay(true);
                let (log, poured, answer) = (log.clone(), poured.clone(), answer.clone());
                tokio::spawn(async move {
                    let _ = serve(stream, &log, &poured, &*answer).await;
                });
            }
        });
        Self {
            url,
            seen,
            flooded,
            task,
        }
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    /// How many bytes of floods were taken off its hands.
    pub fn flooded(&self) -> u64 {
        self.flooded.load(Ordering::SeqCst)
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An address that nobody listens on.
pub async fn refusing_url() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

async fn serve(
    mut stream: TcpStream,
    log: &Mutex<Vec<Seen>>,
    flooded: &AtomicU64,
    answer: &(impl Fn(&Seen, usize) -> Reply + ?Sized),
) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    while let Some(seen) = read_request(&mut stream, &mut buffer).await? {
        let before = {
            let mut log = log.lock().unwrap();
            log.push(seen.clone());
            log.len() - 1
        };
        if !write_reply(&mut stream, answer(&seen, before), flooded).await? {
            break;
        }
    }
    Ok(())
}

/// Whether the connection can be used again.
async fn write_reply(stream: &mut TcpStream, reply: Reply, flooded: &AtomicU64) -> std::io::Result<bool> {
    match reply {
        Reply::Answer {
            status,
            headers,
            body,
        } => {
            let mut head = format!("HTTP/1.1 {status} Said\r\ncontent-length: {}\r\n", body.len());
            for (name, value) in headers {
                head.push_str(&format!("{name}: {value}\r\n"));
            }
            head.push_str("\r\n");
            stream.write_all(head.as_bytes()).await?;
            stream.write_all(&body).await?;
            return Ok(true);
        }
        Reply::Hang => tokio::time::sleep(Duration::from_secs(600)).await,
        Reply::CutShort => {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{\"half\": ")
                .await?;
        }
        Reply::Close => {}
        Reply::Drip => {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
                .await?;
            loop {
                stream.write_all(b" ").await?;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        Reply::Flood { announced } => {
            const GIGABYTE: u64 = 1 << 30;
            const PIECE: usize = 64 << 10;
            let piece = vec![b' '; PIECE];
            let head = if announced {
                format!("content-length: {GIGABYTE}")
            } else {
                "transfer-encoding: chunked".to_owned()
            };
            stream
                .write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n").as_bytes())
                .await?;
            while flooded.load(Ordering::SeqCst) < GIGABYTE {
                if !announced {
                    stream.write_all(format!("{PIECE:x}\r\n").as_bytes()).await?;
                }
                stream.write_all(&piece).await?;
                if !announced {
                    stream.write_all(b"\r\n").await?;
                }
                flooded.fetch_add(PIECE as u64, Ordering::SeqCst);
            }
        }
        Reply::Events(events) => {
            stream
                .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
                .await?;
            for event in events {
                stream.write_all(event.as_bytes()).await?;
                stream.flush().await?;
                tokio::task::yield_now().await;
            }
        }
    }
    Ok(false)
}

async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> std::io::Result<Option<Seen>> {
    let end = loop {
        if let Some(end) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    let mut lines = head.lines();
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (method, target) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect();
    let length = headers
        .iter()
        .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
        .and_then(|(_, value)| value.parse().ok())
        .unwrap_or(0_usize);
    let body_start = end + 4;
    while buffer.len() < body_start + length {
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
    let seen = Seen {
        method: method.to_owned(),
        target: target.to_owned(),
        body: buffer[body_start..body_start + length].to_vec(),
        headers,
    };
    buffer.drain(..body_start + length);
    Ok(Some(seen))
}
