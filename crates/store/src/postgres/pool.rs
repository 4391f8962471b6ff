//! Pooled connections with deadlines, and transactions on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, QueueMode, RecyclingMethod, Runtime,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use tokio_postgres_rustls::MakeRustlsConnect;

use super::statement::Statement;
use super::url::PostgresUrl;
use crate::error::{Error, Result};

/// Settings of every connection. pgvector may be installed in any schema. A transaction whose process
/// is gone must not keep its locks. Without the iterative scan, a filtered search would return too few
/// documents.
const SESSION: &str = "
SELECT set_config('search_path',
    concat_ws(', ', nullif(current_setting('search_path'), ''), quote_ident(nspname)), false)
FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector';
SET idle_in_transaction_session_timeout = '20s';
SET hnsw.iterative_scan = 'relaxed_order';
SET hnsw.max_scan_tuples = 40000;
SET hnsw.scan_mem_multiplier = 4;
SET jit = off;
";

/// PreparedText statements per connection, including those of tables that were dropped.
const MAX_CACHED_STATEMENTS: usize = 200;

pub(super) struct PoolSize {
    pub(super) connections: usize,
    /// How long a caller waits for a free connection.
    pub(super) wait: Duration,
    /// Statement timeout on the server, which also ends statements that nobody waits for.
    pub(super) statement: Duration,
}

pub(super) fn pool(url: &PostgresUrl, size: &PoolSize) -> Result<Pool> {
    let manager = Manager::from_config(
        url.config.clone(),
        MakeRustlsConnect::new(tls(url)?),
        ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        },
    );
    let session = format!("{SESSION} SET statement_timeout = {}", size.statement.as_millis());
    let connections = deadpool_postgres::Pool::builder(manager)
        .max_size(size.connections)
        // The connection used last has the most prepared statements.
        .queue_mode(QueueMode::Lifo)
        .wait_timeout(Some(size.wait))
        .create_timeout(Some(Duration::from_secs(5)))
        .recycle_timeout(Some(Duration::from_secs(5)))
        .runtime(Runtime::Tokio1)
        .post_create(Hook::async_fn(move |client, _| {
            let session = session.clone();
            Box::pin(async move { client.batch_execute(&session).await.map_err(HookError::Backend) })
        }))
        .build()
        .map_err(|error| Error::DatabaseUrl(error.to_string()))?;
    Ok(Pool {
        connections,
        round_trips: Arc::default(),
    })
}

fn tls(url: &PostgresUrl) -> Result<rustls::ClientConfig> {
    let failed = |error: &dyn std::fmt::Display| Error::DatabaseUrl(format!("TLS cannot be set up: {error}"));
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| failed(&error))?;
    let Some(path) = &url.root_certificate else {
        return builder
            .with_platform_verifier()
            .map(rustls::ConfigBuilder::<rustls::ClientConfig, _>::with_no_client_auth)
            .map_err(|error| failed(&error));
    };
    let mut roots = rustls::RootCertStore::empty();
    let unreadable = |error: &dyn std::fmt::Display| {
        Error::DatabaseUrl(format!("sslrootcert {} cannot be read: {error}", path.display()))
    };
    for certificate in CertificateDer::pem_file_iter(path).map_err(|error| unreadable(&error))? {
        let certificate = certificate.map_err(|error| unreadable(&error))?;
        roots.add(certificate).map_err(|error| unreadable(&error))?;
    }
    if roots.is_empty() {
        return Err(unreadable(&"it has no certificate"));
    }
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// A pool of connections that counts round trips.
#[derive(Clone)]
pub(super) struct Pool {
    connections: deadpool_postgres::Pool,
    round_trips: Arc<AtomicU64>,
}

impl Pool {
    pub(super) async fn get(&self) -> Result<Object> {
        Ok(self.connections.get().await?)
    }

    pub(super) fn close(&self) {
        self.connections.close();
    }

    /// Number of times that sessions of this pool have waited for the server.
    pub(super) fn round_trips(&self) -> u64 {
        self.round_trips.load(Ordering::Relaxed)
    }
}

/// A connection with a transaction on it. Dropping it before [`Session::commit`] rolls the
/// transaction back. If a statement is still running then, because the caller no longer waits for
/// it, the connection is closed: a busy one must not go back to the pool.
pub(super) struct Session {
    connection: Option<Object>,
    /// Number of statements sent and not yet answered.
    in_flight: AtomicUsize,
    round_trips: Arc<AtomicU64>,
}

/// A statement that is ready to be sent.
enum PreparedText<'a> {
    Cached(tokio_postgres::Statement, &'a Statement),
    OneShot(&'a Statement),
    Failed(Error),
}

impl Session {
    /// Begins a transaction whose reads see one state and never wait for a writer, and runs the
    /// statements in it, in one round trip. Returns one result per statement.
    pub(super) async fn read_all(
        pool: &Pool,
        statements: &[&Statement],
    ) -> Result<(Self, Vec<Result<Vec<Row>>>)> {
        let session = Self::on(pool).await?;
        let results = session
            .pipeline(
                Some("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"),
                statements,
            )
            .await?;
        Ok((session, results))
    }

    /// [`Session::read_all`] for one statement.
    pub(super) async fn read(pool: &Pool, first: &Statement) -> Result<(Self, Vec<Row>)> {
        let (session, mut results) = Self::read_all(pool, &[first]).await?;
        let rows = results.pop().unwrap_or_else(|| Ok(Vec::new()))?;
        Ok((session, rows))
    }

    pub(super) async fn write(pool: &Pool) -> Result<Self> {
        let session = Self::on(pool).await?;
        session.batch("BEGIN").await?;
        Ok(session)
    }

    async fn on(pool: &Pool) -> Result<Self> {
        Ok(Self {
            connection: Some(pool.get().await?),
            in_flight: AtomicUsize::new(0),
            round_trips: Arc::clone(&pool.round_trips),
        })
    }

    fn client(&self) -> Result<&deadpool_postgres::Client> {
        self.connection.as_ref().ok_or(Error::Closed)
    }

    /// Waits for an answer. Statements that are sent while another one is in flight share its round
    /// trip.
    async fn sent<T>(
        &self,
        answer: impl Future<Output = std::result::Result<T, tokio_postgres::Error>>,
    ) -> Result<T> {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            self.count_round_trip();
        }
        let answer = answer.await;
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        Ok(answer?)
    }

    fn count_round_trip(&self) {
        self.round_trips.fetch_add(1, Ordering::Relaxed);
        metrics::counter!("ragstone_postgres_round_trips_total").increment(1);
    }

    pub(super) async fn batch(&self, sql: &str) -> Result<()> {
        self.sent(self.client()?.batch_execute(sql)).await
    }

    pub(super) async fn query(&self, statement: &Statement) -> Result<Vec<Row>> {
        let mut results = self.query_all(&[statement]).await?;
        results.pop().unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Runs several statements in one round trip. The outer error means that none was sent.
    pub(super) async fn query_all(&self, statements: &[&Statement]) -> Result<Vec<Result<Vec<Row>>>> {
        self.pipeline(None, statements).await
    }

    async fn pipeline(
        &self,
        begin: Option<&str>,
        statements: &[&Statement],
    ) -> Result<Vec<Result<Vec<Row>>>> {
        let client = self.client()?;
        // All are prepared before the first is sent, so that they are carried out in their order.
        let mut prepared = Vec::with_capacity(statements.len());
        for statement in statements {
            prepared.push(self.prepare(client, statement).await);
        }
        let begin = async {
            match begin {
                Some(begin) => self.batch(begin).await,
                None => Ok(()),
            }
        };
        let results = futures::future::join_all(prepared.into_iter().map(|one| self.execute(client, one)));
        let (begun, results) = futures::join!(begin, results);
        begun?;
        Ok(results)
    }

    async fn prepare<'a>(
        &self,
        client: &deadpool_postgres::Client,
        statement: &'a Statement,
    ) -> PreparedText<'a> {
        if !statement.is_cached() {
            return PreparedText::OneShot(statement);
        }
        let cache = &client.statement_cache;
        if cache.size() > MAX_CACHED_STATEMENTS {
            cache.clear();
        }
        let known = cache.size();
        match client
            .prepare_typed_cached(&statement.sql, &statement.types())
            .await
        {
            Ok(ready) => {
                if cache.size() > known {
                    self.count_round_trip();
                }
                PreparedText::Cached(ready, statement)
            }
            Err(error) => PreparedText::Failed(error.into()),
        }
    }

    async fn execute(
        &self,
        client: &deadpool_postgres::Client,
        prepared: PreparedText<'_>,
    ) -> Result<Vec<Row>> {
        let setting = async {
            match &prepared {
                PreparedText::Cached(_, statement) | PreparedText::OneShot(statement) => {
                    match statement.setting() {
                        Some(setting) => self.batch(setting).await,
                        None => Ok(()),
                    }
                }
                PreparedText::Failed(_) => Ok(()),
            }
        };
        let rows = async {
            match &prepared {
                PreparedText::Cached(ready, statement) => {
                    let rows = self.sent(client.query(ready, &statement.values())).await;
                    if rows.is_err() {
                        // The plan is useless if its table is gone.
                        client.statement_cache.remove(&statement.sql, &statement.types());
                    }
                    rows
                }
                PreparedText::OneShot(statement) => {
                    let parameters = statement.parameters();
                    self.sent(client.query_typed(&statement.sql, &parameters)).await
                }
                PreparedText::Failed(_) => Ok(Vec::new()),
            }
        };
        let (set, rows) = futures::join!(setting, rows);
        if let PreparedText::Failed(error) = prepared {
            return Err(error);
        }
        set?;
        rows
    }

    pub(super) async fn query_one(&self, statement: &Statement) -> Result<Row> {
        let rows = self.query(statement).await?;
        rows.into_iter()
            .next()
            .ok_or_else(|| Error::Damaged("a row is missing".into()))
    }

    /// Runs a statement whose parameters are of types that only the server knows.
    pub(super) async fn query_untyped(&self, sql: &str, values: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>> {
        self.sent(self.client()?.query(sql, values)).await
    }

    /// Makes the changes durable.
    pub(super) async fn commit(mut self) -> Result<()> {
        self.batch("COMMIT").await?;
        drop(self.connection.take());
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        if self.in_flight.load(Ordering::Relaxed) > 0 || connection.is_closed() {
            drop(Object::take(connection));
            return;
        }
        // The caller does not wait for the rollback.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if connection.batch_execute("ROLLBACK").await.is_err() {
                    drop(Object::take(connection));
                }
            });
        } else {
            drop(Object::take(connection));
        }
    }
}
