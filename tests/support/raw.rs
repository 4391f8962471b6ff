//! Raw requests of slow and broken clients.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

pub struct RawClient(TcpStream);

impl RawClient {
    pub async fn connect(address: SocketAddr) -> Self {
        Self(
            TcpStream::connect(address)
                .await
                .expect("the server accepts the connection"),
        )
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0
            .write_all(bytes.as_ref())
            .await
            .expect("the server takes the bytes");
        self.0.flush().await.expect("the bytes are sent");
    }

    /// Reads until the server closes the connection.
    pub async fn read_to_end(mut self) -> String {
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(120), self.0.read_to_end(&mut bytes)).await;
        // A reset closes the connection, too.
        let _ = read.expect("the server closes the connection");
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
