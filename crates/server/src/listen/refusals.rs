//! A body for the refusals that never reach a route.
//!
//! Where a request cannot even be parsed, hyper answers by itself, with a status and nothing more,
//! and offers no way to say more. So the answer is caught on its way out and gets the sentence that
//! every other error has.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::http::error::ErrorBody;

/// How long the rest of a refused request is thrown away, so that the end of the connection does
/// not overtake the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// What hyper says by itself, and what is to be done about it.
const EXPLAINED: [(&str, &str); 3] = [
    (
        "HTTP/1.1 400 Bad Request\r\n",
        "The request is not valid HTTP/1.1: check its first line and its headers",
    ),
    (
        "HTTP/1.1 414 URI Too Long\r\n",
        "The address of the request is too long: send what it carries in a body",
    ),
    (
        "HTTP/1.1 431 Request Header Fields Too Large\r\n",
        "The headers of the request are too many or too large: send fewer or shorter ones",
    ),
];

/// A connection whose bare refusals are explained.
pub(super) struct Explained<S> {
    stream: S,
    /// The rest of an explained refusal that is not written yet.
    unwritten: Vec<u8>,
    /// Set once a request was refused, which ends the connection.
    refused: Option<Pin<Box<Sleep>>>,
}

impl<S> Explained<S> {
    pub(super) fn new(stream: S) -> Self {
        Self {
            stream,
            unwritten: Vec::new(),
            refused: None,
        }
    }
}

/// The same refusal with a body, if this is one of hyper's own. Nothing a route answers looks like
/// it: their errors have a body, and in a body of JSON or of lines no bare `\r\n` can stand.
fn explained(answer: &[u8]) -> Option<Vec<u8>> {
    let (line, detail) = EXPLAINED
        .iter()
        .find(|(line, _)| answer.starts_with(line.as_bytes()))?;
    let headers = std::str::from_utf8(&answer[line.len()..])
        .ok()?
        .strip_suffix("\r\n\r\n")?;
    if !headers
        .split("\r\n")
        .any(|header| header.eq_ignore_ascii_case("content-length: 0"))
    {
        return None;
    }
    let body = serde_json::to_string(&ErrorBody {
        detail: (*detail).to_owned(),
        errors: Vec::new(),
    })
    .ok()?;
    let mut whole = (*line).to_owned();
    for header in headers
        .split("\r\n")
        .filter(|header| !header.to_ascii_lowercase().starts_with("content-length:"))
    {
        whole.push_str(header);
        whole.push_str("\r\n");
    }
    whole.push_str(&format!(
        "content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ));
    Some(whole.into_bytes())
}

impl<S: AsyncRead + AsyncWrite + Unpin> Explained<S> {
    /// Writes what replaces `answer`, which counts as written once all of that is.
    fn poll_replaced(&mut self, context: &mut Context<'_>, answer: &[u8]) -> Option<Poll<io::Result<usize>>> {
        if self.unwritten.is_empty() {
            self.unwritten = explained(answer)?;
            self.refused = Some(Box::pin(tokio::time::sleep(PATIENCE)));
        }
        while !self.unwritten.is_empty() {
            match Pin::new(&mut self.stream).poll_write(context, &self.unwritten) {
                Poll::Ready(Ok(0)) => return Some(Poll::Ready(Err(io::ErrorKind::WriteZero.into()))),
                Poll::Ready(Ok(written)) => drop(self.unwritten.drain(..written)),
                Poll::Ready(Err(error)) => return Some(Poll::Ready(Err(error))),
                Poll::Pending => return Some(Poll::Pending),
            }
        }
        Some(Poll::Ready(Ok(answer.len())))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Explained<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Explained<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.poll_replaced(context, bytes) {
            Some(written) => written,
            None => Pin::new(&mut self.stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let [only] = slices
            && let Some(written) = self.poll_replaced(context, only)
        {
            return written;
        }
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        let Self { stream, refused, .. } = &mut *self;
        let Some(patience) = refused else {
            return Poll::Ready(Ok(()));
        };
        let mut scratch = [0; 4096];
        while patience.as_mut().poll(context).is_pending() {
            let mut buffer = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bare_refusal_is_explained() {
        let bare = "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n\
                    content-length: 0\r\ndate: Mon, 16 Nov 2026 10:00:00 GMT\r\n\r\n";
        let whole = String::from_utf8(explained(bare.as_bytes()).unwrap()).unwrap();
        assert!(
            whole.contains("\r\nconnection: close\r\n") && whole.ends_with("ones\"}"),
            "{whole}"
        );
        assert_eq!(whole.matches("content-length").count(), 1);
        for other in [
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n",
            "HTTP/1.1 400 Bad Request\r\n",
        ] {
            assert_eq!(explained(other.as_bytes()), None, "{other}");
        }
    }
}
