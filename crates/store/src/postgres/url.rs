//! The address of a database.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use crate::error::{Error, Result};

const CONNECT: Duration = Duration::from_secs(5);

/// The address of a database, `postgres://user:password@host:port/database?sslmode=require`, whose
/// password is never shown.
///
/// The options are those of libpq that the driver supports, and `sslrootcert`, the file with the
/// certificate of the authority that signed the server's. With `sslmode=require` the certificate is
/// always verified, as with `verify-full`.
#[derive(Clone, PartialEq, Eq)]
pub struct PostgresUrl {
    pub(super) config: Config,
    pub(super) root_certificate: Option<PathBuf>,
}

impl PostgresUrl {
    pub fn parse(url: &str) -> Result<Self> {
        let (plain, root_certificate) = without_file_options(url);
        let mut config: Config = plain.parse().map_err(|error: tokio_postgres::Error| {
            let reason = std::error::Error::source(&error).map_or_else(String::new, |e| format!(": {e}"));
            Error::DatabaseUrl(format!("it cannot be understood{reason}"))
        })?;
        if config.get_hosts().is_empty() {
            return Err(Error::DatabaseUrl("it names no host".into()));
        }
        // Probably the end of a password, which would be shown as part of the address.
        let has_at = |host: &Host| matches!(host, Host::Tcp(name) if name.contains('@'));
        if config.get_hosts().iter().any(has_at) {
            return Err(Error::DatabaseUrl(
                "it has more than one '@': in a user or password write it as %40".into(),
            ));
        }
        if config.get_user().is_none() {
            return Err(Error::DatabaseUrl("it names no user".into()));
        }
        if root_certificate.is_some() && config.get_ssl_mode() != SslMode::Require {
            return Err(Error::DatabaseUrl(
                "sslrootcert needs sslmode=require or sslmode=verify-full".into(),
            ));
        }
        config
            .application_name("ragstone")
            .connect_timeout(CONNECT)
            .keepalives_idle(Duration::from_secs(10))
            .keepalives_interval(Duration::from_secs(5))
            .keepalives_retries(3)
            .tcp_user_timeout(Duration::from_secs(20));
        Ok(Self {
            config,
            root_certificate,
        })
    }
}

/// Removes the options that the driver does not support.
fn without_file_options(url: &str) -> (String, Option<PathBuf>) {
    let Some((address, query)) = url.split_once('?') else {
        return (url.to_owned(), None);
    };
    let mut root = None;
    let mut rest = Vec::new();
    for option in query.split('&') {
        match option.split_once('=') {
            Some(("sslrootcert", path)) => root = Some(PathBuf::from(path)),
            Some(("sslmode", "verify-full" | "verify-ca")) => rest.push("sslmode=require"),
            _ => rest.push(option),
        }
    }
    (format!("{address}?{}", rest.join("&")), root)
}

impl fmt::Display for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("postgres://")?;
        for (number, host) in self.config.get_hosts().iter().enumerate() {
            let separator = if number == 0 { "" } else { "," };
            match host {
                Host::Tcp(name) => write!(f, "{separator}{name}")?,
                #[cfg(unix)]
                Host::Unix(path) => write!(f, "{separator}{}", path.display())?,
            }
            let ports = self.config.get_ports();
            if let Some(port) = ports.get(number).or_else(|| ports.first()) {
                write!(f, ":{port}")?;
            }
        }
        write!(
            f,
            "/{}",
            self.config
                .get_dbname()
                .or(self.config.get_user())
                .unwrap_or_default()
        )
    }
}

impl fmt::Debug for PostgresUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        let url = PostgresUrl::parse("postgres://ann:hunter2@db.example:6543/rag?connect_timeout=3").unwrap();
        assert_eq!(url.to_string(), "postgres://db.example:6543/rag");
        assert!(!format!("{url:?}").contains("hunter2"));
        for bad in [
            "postgres://ann:hunter2@db/rag?sslmode=perhaps",
            "postgres://ann:hunter2@db:port/rag",
            "postgres://:hunter2@",
            "postgres:///rag?password=hunter2",
            "postgres://ann:hunter2@db/rag?sslrootcert=/x",
            "postgres://ann:an@hunter2@db/rag",
        ] {
            let refusal = PostgresUrl::parse(bad).unwrap_err().to_string();
            assert!(!refusal.contains("hunter2"), "{refusal}");
        }
    }

    #[test]
    fn certificates_are_options_of_ours() {
        let url =
            PostgresUrl::parse("postgres://ann@db/rag?sslmode=verify-full&sslrootcert=/etc/ca.pem").unwrap();
        assert_eq!(url.root_certificate.as_deref(), Some("/etc/ca.pem".as_ref()));
        assert_eq!(url.config.get_ssl_mode(), SslMode::Require);
    }
}
