//! Request bodies that are answered before they are read completely.
//!
//! Closing a connection with unread bytes makes the system reset it, and the reset can overtake the
//! response: the client would see a broken connection instead of a 401, 413 or 503. So the rest of the
//! body is read and discarded for a short time while the response is sent.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, Incoming, SizeHint};

const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// A request body whose unread rest is discarded when it is dropped.
pub(super) struct DrainedBody {
    inner: Option<Incoming>,
    /// A client that waits for `100 Continue` has sent nothing yet, and reading would make it send.
    expects_continue: bool,
}

pub(super) fn drained(request: hyper::Request<Incoming>) -> hyper::Request<DrainedBody> {
    let expects_continue = request.headers().contains_key(header::EXPECT);
    request.map(|inner| DrainedBody {
        inner: Some(inner),
        expects_continue,
    })
}

impl Body for DrainedBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let frame = std::task::ready!(Pin::new(inner).poll_frame(context));
        if !matches!(frame, Some(Ok(_))) {
            self.inner = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.inner
            .as_ref()
            .map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

impl Drop for DrainedBody {
    fn drop(&mut self) {
        let Some(mut rest) = self.inner.take() else {
            return;
        };
        if rest.is_end_stream() || self.expects_continue {
            return;
        }
        // Dropped outside of a runtime only when the program ends.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(tokio::time::timeout(DRAIN_TIMEOUT, async move {
                while let Some(Ok(_)) = rest.frame().await {}
            }));
        }
    }
}
