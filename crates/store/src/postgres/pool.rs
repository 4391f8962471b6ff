//! Connections: pooled, with deadlines, and never given back in the middle of something.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, QueueMode, RecyclingMethod, Runtime,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls_platform_verifier::BuilderVerifierExt;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::nearest::BREADTH;
use super::statement::Statement;
use super::url::PostgresUrl;
use crate::error::{Error, Result};

/// What every connection is set to. A transaction whose process is gone does not hold its locks.
/// Without the iterative scan, a filtered search would come back with too few. How broad a walk is
/// depends on the search. pgvector is found in whichever schema it was put.
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

/// So many statements are kept ready on one connection; those of tables that are gone are among them.
const PREPARED_AT_MOST: usize = 200;

pub(super) struct PoolSize {
    pub(super) connections: usize,
    /// How long a caller waits for a connection before it is told to come back later.
    pub(super) wait: Duration,
    /// A statement that takes longer is given up by the server, also when nobody waits for it any more.
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
    let session = format!(
        "{SESSION} SET hnsw.ef_search = {BREADTH}; SET statement_timeout = {}",
        size.statement.as_millis()
    );
    Pool::builder(manager)
        .max_size(size.connections)
        // The one that was used last has what it needs at hand.
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
        .map_err(|error| Error::DatabaseUrl(error.to_string()))
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

/// A connection with a transaction on it. Whoever drops it before its end undoes the transaction. If
/// that happens in the middle of a statement, because nobody waits for the answer any more, the
/// connection is closed: one that is still busy must not go back to the pool.
pub(super) struct Session {
    connection: Option<Object>,
    /// How many statements have been sent and not answered.
    busy: AtomicUsize,
    /// The answer to a statement that was sent before it was asked for.
    ahead: Mutex<Option<Ahead>>,
}

struct Ahead {
    sql: String,
    answer: Result<Vec<Row>>,
}

impl Session {
    /// A transaction whose reads see one state and never wait for a writer; the state is that of the
    /// statement it is begun with. `ahead` is what will likely be asked next: when it is, the answer is
    /// there.
    pub(super) async fn read(
        pool: &Pool,
        first: &Statement,
        ahead: Option<&Statement>,
    ) -> Result<(Self, Vec<Row>)> {
        let session = Self::on(pool).await?;
        let begin = session.batch("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY");
        let further = async {
            match ahead {
                Some(statement) => Some(session.query(statement).await),
                None => None,
            }
        };
        // Sent together, in this order: only the first of them is a journey.
        let (begun, rows, further) = futures::join!(begin, session.query(first), further);
        begun?;
        let rows = rows?;
        if let (Some(statement), Some(answer)) = (ahead, further) {
            let sql = statement.sql.clone();
            *session.ahead() = Some(Ahead { sql, answer });
        }
        Ok((session, rows))
    }

    fn ahead(&self) -> MutexGuard<'_, Option<Ahead>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was sent ahead cannot be answered, and nothing more will be in this transaction.
    pub(super) fn failed_ahead(&self) -> bool {
        self.ahead().as_ref().is_some_and(|ahead| ahead.answer.is_err())
    }

    pub(super) async fn write(pool: &Pool) -> Result<Self> {
        let session = Self::on(pool).await?;
        session.batch("BEGIN").await?;
        Ok(session)
    }

    async fn on(pool: &Pool) -> Result<Self> {
        Ok(Self {
            connection: Some(pool.get().await?),
            busy: AtomicUsize::new(0),
            ahead: Mutex::default(),
        })
    }

    fn client(&self) -> Result<&deadpool_postgres::Client> {
        self.connection.as_ref().ok_or(Error::Closed)
    }

    pub(super) async fn batch(&self, sql: &str) -> Result<()> {
        self.busy.fetch_add(1, Ordering::Relaxed);
        let done = self.client()?.batch_execute(sql).await;
        self.busy.fetch_sub(1, Ordering::Relaxed);
        Ok(done?)
    }

    pub(super) async fn query(&self, statement: &Statement) -> Result<Vec<Row>> {
        let ahead = self.ahead().take_if(|ahead| ahead.sql == statement.sql);
        if let Some(ahead) = ahead {
            return ahead.answer;
        }
        let client = self.client()?;
        let setting = async {
            match statement.setting() {
                Some(setting) => self.batch(setting).await,
                None => Ok(()),
            }
        };
        let rows = async {
            self.busy.fetch_add(1, Ordering::Relaxed);
            let rows = if statement.recurs() {
                Self::query_prepared(client, statement).await
            } else {
                client.query_typed(&statement.sql, &statement.parameters()).await
            };
            self.busy.fetch_sub(1, Ordering::Relaxed);
            rows
        };
        // Sent together, in this order.
        let (set, rows) = futures::join!(setting, rows);
        set?;
        Ok(rows?)
    }

    async fn query_prepared(
        client: &deadpool_postgres::Client,
        statement: &Statement,
    ) -> std::result::Result<Vec<Row>, tokio_postgres::Error> {
        if client.statement_cache.size() > PREPARED_AT_MOST {
            client.statement_cache.clear();
        }
        let parameters = statement.parameters();
        let types: Vec<Type> = parameters.iter().map(|(_, kind)| kind.clone()).collect();
        let values: Vec<&(dyn ToSql + Sync)> = parameters.iter().map(|(value, _)| *value).collect();
        let prepared = client.prepare_typed_cached(&statement.sql, &types).await?;
        let rows = client.query(&prepared, &values).await;
        if rows.is_err() {
            // Its table may be gone, and it with it.
            client.statement_cache.remove(&statement.sql, &types);
        }
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
        self.busy.fetch_add(1, Ordering::Relaxed);
        let rows = self.client()?.query(sql, values).await;
        self.busy.fetch_sub(1, Ordering::Relaxed);
        Ok(rows?)
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
        if self.busy.load(Ordering::Relaxed) > 0 || connection.is_closed() {
            drop(Object::take(connection));
            return;
        }
        // Nobody has to wait for the end of a transaction that changes nothing.
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
