//! Accepting connections, and stopping without breaking any.

mod refusals;
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
use tower::ServiceExt;

use crate::http::state::{Limits, Stopping};

/// More connections than this wait in the system's queue.
const MAX_CONNECTIONS: usize = 4096;

/// Serves until `stop` resolves, then finishes the requests that were accepted.
///
/// `axum::serve` sets no timeout on reading headers, so a client that sends nothing would hold its
/// connection for ever; hyper's own builder has one. HTTP/1.1 only: telling versions apart by the
/// first bytes would have to wait for them without a timeout, and HTTP/2 without TLS is rare.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: &Limits,
    stopping: Stopping,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout);
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
                // Out of file descriptors, or a connection that was gone again: neither ends the server.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(50)).await;
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
        let connection =
            graceful.watch(builder.serve_connection(TokioIo::new(refusals::Explained::new(stream)), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(permit);
        });
    }
    stopping.set();
    drop(listener);
    tracing::info!("stopping: finishing accepted requests");
    if tokio::time::timeout(limits.shutdown_timeout, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::warn!("some requests did not finish in time and were given up");
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
