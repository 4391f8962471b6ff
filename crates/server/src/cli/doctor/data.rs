//! Checks of the port, the data directory and the database.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use ragstone_core::storage::{Storage, StorageError};
use ragstone_providers::chroma::ChromaStorage;
use ragstone_store::{InspectedCollection, Inspection, check_access, inspect, inspect_postgres};

use super::Check;
use crate::config::{Settings, StoreLocation};
use crate::stores::connect_chroma;

const LITTLE_SPACE: u64 = 1 << 30;
const NO_SPACE: u64 = 64 << 20;

pub(super) fn port(settings: &Settings) -> Check {
    let address = SocketAddr::new(settings.host, settings.port);
    match TcpListener::bind(address) {
        Ok(_) => Check::pass("Port", format!("{address} is free")),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Check::warn(
            "Port",
            format!(
                "{address} is in use: if not by this server, stop the other program or choose another --port"
            ),
        ),
        Err(error) => Check::fail(
            "Port",
            format!("cannot listen on {address}: {error}; choose another --host or --port"),
        ),
    }
}

/// Checks the store, and returns its collections for further checks if it can be inspected.
pub(super) async fn store(settings: &Settings) -> (Vec<Check>, Vec<InspectedCollection>) {
    match &settings.store {
        StoreLocation::Embedded(path) => {
            let (database, collections) = database(path);
            (vec![writable(path), database], collections)
        }
        StoreLocation::Postgres(url) => {
            let (check, collections) = match inspect_postgres(url).await {
                Ok(found) if found.schema > found.known_schema => (
                    Check::fail(
                        "Store",
                        format!("{url}: {}", newer_schema(&found.schema, &found.known_schema)),
                    ),
                    Vec::new(),
                ),
                Ok(found) => (
                    Check::pass("Store", format!("{url} answers: {found}")),
                    found.collections,
                ),
                Err(error) => {
                    let message = format!("{url}: {error}: start the database, or correct --store");
                    (Check::fail("Store", message), Vec::new())
                }
            };
            (vec![check], collections)
        }
        StoreLocation::Chroma { url, data_dir } => {
            let name = "Store";
            let answered = match connect_chroma(url) {
                Ok(store) => in_chroma(&store).await.map_err(|error| error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            // Agent memory is stored with the records.
            let (database, mut collections) = database(data_dir);
            let check = match answered {
                Ok(found) => {
                    let message = format!("{url} answers: {} collections", found.len());
                    collections.extend(found);
                    Check::pass(name, message)
                }
                Err(problem) => Check::fail(
                    name,
                    format!("{url}: {problem}: start the server, or correct --store"),
                ),
            };
            (vec![check, writable(data_dir), database], collections)
        }
    }
}

async fn in_chroma(store: &ChromaStorage) -> Result<Vec<InspectedCollection>, StorageError> {
    store.health().await?;
    let found = store.collections().await?.into_iter();
    Ok(found
        .map(|collection| InspectedCollection {
            name: collection.name.to_string(),
            dimensions: collection.dimensions,
            metadata: collection.metadata,
        })
        .collect())
}

fn newer_schema(schema: &dyn std::fmt::Display, known: &dyn std::fmt::Display) -> String {
    format!("its schema {schema} is newer than this program's {known}: use a newer Ragstone")
}

fn writable(path: &Path) -> Check {
    let name = "Data directory";
    if path.exists() && !path.is_dir() {
        return Check::fail(
            name,
            format!("{} is not a directory: choose another --data-dir", path.display()),
        );
    }
    let Some(existing) = path
        .ancestors()
        .map(|part| {
            if part.as_os_str().is_empty() {
                Path::new(".")
            } else {
                part
            }
        })
        .find(|part| part.exists())
        .filter(|part| part.is_dir())
    else {
        return Check::fail(
            name,
            format!("{} cannot be created: choose another --data-dir", path.display()),
        );
    };
    let probe = existing.join(format!(".ragstone-doctor-{}", std::process::id()));
    if let Err(error) = std::fs::File::create_new(&probe).and_then(|_| std::fs::remove_file(&probe)) {
        return Check::fail(
            name,
            format!(
                "{} cannot be written to ({error}): change its permissions or choose another --data-dir",
                existing.display()
            ),
        );
    }
    let state = if path.is_dir() {
        "can be written to"
    } else {
        "does not exist yet and can be created"
    };
    match free_bytes(existing) {
        Some(free) if free < NO_SPACE => Check::fail(
            name,
            format!(
                "{}: only {} MB are free: make room on this disk",
                path.display(),
                free >> 20
            ),
        ),
        Some(free) if free < LITTLE_SPACE => Check::warn(
            name,
            format!(
                "{}: only {} MB are free: make room on this disk soon",
                path.display(),
                free >> 20
            ),
        ),
        Some(free) => Check::pass(
            name,
            format!("{} {state}, {} GB free", path.display(), free >> 30),
        ),
        None => Check::pass(name, format!("{} {state}", path.display())),
    }
}

#[cfg(unix)]
fn free_bytes(path: &Path) -> Option<u64> {
    rustix::fs::statvfs(path)
        .ok()
        .map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

const RESTORE: &str = "stop the server and restore the data directory from a backup";

/// The fix for a file that cannot be accessed differs from that for a damaged one.
fn unusable(error: &ragstone_store::Error) -> String {
    match error {
        ragstone_store::Error::Damaged(_) => format!("it cannot be read ({error}): {RESTORE}"),
        ragstone_store::Error::Directory { path, reason } => {
            let path = path.display();
            match reason.kind() {
                ErrorKind::PermissionDenied => format!(
                    "{path} cannot be read and written by this user ({reason}): \
                     change its owner or permissions, or run as the user it belongs to"
                ),
                ErrorKind::ReadOnlyFilesystem => {
                    format!(
                        "{path} cannot be written ({reason}): make its disk writable, or choose another --data-dir"
                    )
                }
                ErrorKind::IsADirectory => {
                    format!("{path} is a directory, but must be a file: move it away")
                }
                _ => format!("{path} cannot be opened ({reason}): check this file and its disk"),
            }
        }
        _ => format!("it cannot be read ({error}): check the permissions of its files and the disk"),
    }
}

fn database(path: &Path) -> (Check, Vec<InspectedCollection>) {
    let name = "Database";
    if let Err(error) = check_access(path) {
        return (Check::fail(name, unusable(&error)), Vec::new());
    }
    match inspect(path) {
        Ok(None) => (
            Check::skip(name, "there is none yet; the first start creates it"),
            Vec::new(),
        ),
        Err(error) => (Check::fail(name, unusable(&error)), Vec::new()),
        Ok(Some(Inspection {
            schema, known_schema, ..
        })) if schema > known_schema => {
            let message = newer_schema(&schema, &known_schema);
            (Check::fail(name, message), Vec::new())
        }
        Ok(Some(found)) if !found.problems.is_empty() => {
            let message = format!("it is damaged ({}): {RESTORE}", found.problems.join("; "));
            (Check::fail(name, message), found.collections)
        }
        Ok(Some(found)) if found.schema == 0 => {
            let message = "the file is empty, so the next start creates a new database: \
                           if it had data, restore the data directory from a backup";
            (Check::warn(name, message), Vec::new())
        }
        Ok(Some(found)) => {
            let visible = found
                .collections
                .iter()
                .filter(|collection| !collection.name.starts_with('.'))
                .count();
            let message = format!(
                "sound, schema {} of {}, {visible} collections",
                found.schema, found.known_schema
            );
            (Check::pass(name, message), found.collections)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tests may run as root, who is never denied a file.
    #[test]
    fn inaccessible_files_are_distinguished_from_damaged_ones() {
        let out_of_reach = |kind: ErrorKind| {
            unusable(&ragstone_store::Error::Directory {
                path: "/data/ragstone.lock".into(),
                reason: kind.into(),
            })
        };
        let denied = out_of_reach(ErrorKind::PermissionDenied);
        assert!(
            denied.contains("/data/ragstone.lock") && denied.contains("owner or permissions"),
            "{denied}"
        );
        let fixed = out_of_reach(ErrorKind::ReadOnlyFilesystem);
        assert!(fixed.contains("make its disk writable"), "{fixed}");
        for told in [denied, fixed, out_of_reach(ErrorKind::IsADirectory)] {
            assert!(!told.contains("backup"), "{told}");
        }
        let damaged = unusable(&ragstone_store::Error::Damaged("bad page".into()));
        assert!(damaged.contains("backup"), "{damaged}");
    }
}
