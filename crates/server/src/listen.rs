//! Accepting connections, and stopping without breaking any.

mod unread;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_io_timeout::TimeoutStream;
use tower::ServiceExt;

use crate::http::state::Stopping;

/// More connections than this wait in the system's queue.
const MAX_CONNECTIONS: usize = 4096;
/// Pause before the next attempt after a connection could not be accepted.
const ACCEPT_COOLDOWN: Duration = Duration::from_millis(50);

/// How long a connection may make no progress.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// Reading the headers of a request, and waiting for the next one.
    pub headers: Duration,
    /// Writing: the time in which a client must read at least one byte.
    pub write: Duration,
    /// Finishing accepted requests after the signal to stop.
    pub shutdown: Duration,
}

/// Serves until `stop` resolves, then finishes the requests that were accepted.
///
/// `axum::serve` sets no timeout on reading headers, so a client that sends nothing would hold its
/// connection for ever; hyper's own builder has one. Neither has a timeout on writing: a client that
/// reads nothing would hold its response in memory for ever. HTTP/1.1 only: telling versions apart by
/// the first bytes would have to wait for them without a timeout, and HTTP/2 without TLS is rare.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    timeouts: Timeouts,
    stopping: Stopping,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(timeouts.headers);
    let open = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let graceful = GracefulShutdown::new();
    tokio::pin!(stop);
    loop {
        let permit = tokio::select! {
            permit = Arc::clone(&open).acquire_owned() => permit,
            () = &mut stop => break,
        };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, or the client is gone: neither ends the server.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_COOLDOWN).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
            let router = router.clone();
            async move {
                Ok::<_, Infallible>(
                    router
                        .oneshot(unread::drained(request))
                        .await
                        .unwrap_or_else(|never| match never {}),
                )
            }
        });
        let mut stream = Box::pin(TimeoutStream::new(stream));
        stream.as_mut().set_write_timeout_pinned(Some(timeouts.write));
        let connection = graceful.watch(builder.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                let error = anyhow::Error::from(error);
                tracing::debug!(error = format!("{error:#}"), "a connection ended early");
            }
            drop(permit);
        });
    }
    stopping.set();
    drop(listener);
    tracing::info!("stopping: finishing accepted requests");
    if tokio::time::timeout(timeouts.shutdown, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("some requests did not finish in time and were aborted");
    }
    Ok(())
}

/// Resolves on Ctrl-C or on the signal that service managers send. The signals are caught from this
/// call on, not from the first wait: one that comes right after the start must not kill.
pub(crate) fn stop_signal() -> impl Future<Output = ()> {
    #[cfg(unix)]
    let signals = {
        use tokio::signal::unix::{SignalKind, signal};
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    };
    async move {
        #[cfg(unix)]
        if let (Ok(mut terminate), Ok(mut interrupt)) = signals {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            return;
        }
        let _ = tokio::signal::ctrl_c().await;
    }
}
