//! Downloads from the hub: chooses files, resumes transfers, verifies them and moves them into place.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use ragstone_core::backoff::{Backoff, RetryLimits};
use reqwest::header::{AUTHORIZATION, CONTENT_RANGE, RANGE, RETRY_AFTER};
use reqwest::{Response, StatusCode};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::{Hub, HubError, Progress, ProgressEvent, RepositoryCache};
use crate::encoder::config::RawConfig;
use crate::modules::Layout;
use crate::sentence::SENTENCE_CONFIGS;

/// A transfer that breaks off is resumed.
const TRANSFER_BACKOFF: Backoff = Backoff {
    max_attempts: 5,
    first_delay: Duration::from_millis(200),
    max_delay: Duration::from_secs(5),
    jitter: 0.25,
};
/// The largest repositories have some thousand files.
const MAX_DESCRIPTION_BYTES: usize = 16 << 20;
const DESCRIPTION_TIMEOUT: Duration = Duration::from_secs(20);

const DESCRIPTION_BACKOFF: Backoff = Backoff {
    max_attempts: 3,
    ..TRANSFER_BACKOFF
};

/// Files to download besides [`SENTENCE_CONFIGS`].
const WANTED: [&str; 7] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "model.safetensors",
    "model.safetensors.index.json",
];

#[derive(Deserialize)]
struct Description {
    sha: String,
    #[serde(default)]
    siblings: Vec<RemoteFile>,
}

#[derive(Deserialize, Clone)]
struct RemoteFile {
    #[serde(rename = "rfilename")]
    name: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize, Clone)]
struct Lfs {
    sha256: String,
    size: Option<u64>,
}

impl RemoteFile {
    /// Weights, and the tokenizer, which may have many megabytes.
    fn is_heavy(&self) -> bool {
        self.name.ends_with(".safetensors") || self.name.ends_with("tokenizer.json")
    }

    fn size(&self) -> Option<u64> {
        self.lfs.as_ref().and_then(|lfs| lfs.size).or(self.size)
    }

    /// The SHA-256 of large files, the git hash of small ones.
    fn blob_name(&self, commit: &str) -> String {
        let known = self.lfs.as_ref().map(|lfs| &lfs.sha256).or(self.blob.as_ref());
        match known.filter(|name| name.len() >= 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit())) {
            Some(name) => name.clone(),
            None => hex(&Sha256::digest(format!("{commit}/{}", self.name))),
        }
    }
}

pub(super) async fn pull(
    hub: &Hub,
    id: &str,
    revision: &str,
    progress: Progress<'_>,
) -> Result<PathBuf, HubError> {
    let description = describe(hub, id, revision).await?;
    let files = choose(id, &description.siblings)?;
    let cache = RepositoryCache::new(&hub.settings.cache, id);
    let unwritable = |source| HubError::Cache {
        path: cache.root().to_owned(),
        source,
    };
    cache.create(&description.sha).map_err(unwritable)?;
    let (heavy, light): (Vec<_>, Vec<_>) = files.iter().partition(|file| file.is_heavy());
    let first_heavy = light.len();
    for (number, file) in light.into_iter().chain(heavy).enumerate() {
        if number == first_heavy {
            check_architecture(id, &cache.snapshot(&description.sha))?;
        }
        let blob = file.blob_name(&description.sha);
        let transfer = Transfer {
            hub,
            id,
            commit: &description.sha,
            file,
            cache: &cache,
            blob: &blob,
            progress,
        };
        transfer.run().await?;
        cache
            .link(&description.sha, &file.name, &blob)
            .map_err(unwritable)?;
    }
    cache.point(revision, &description.sha).map_err(unwritable)?;
    Ok(cache.snapshot(&description.sha))
}

/// Checks that the model can be loaded, from its configuration, before anything large is fetched.
fn check_architecture(id: &str, snapshot: &Path) -> Result<(), HubError> {
    let encoder = |layout: Layout| RawConfig::read(&layout.encoder)?.encoder(&layout.encoder);
    let checked = Layout::read(snapshot).and_then(encoder);
    checked.map(drop).map_err(|error| HubError::Unusable {
        id: id.to_owned(),
        reason: error.to_string(),
    })
}

async fn describe(hub: &Hub, id: &str, revision: &str) -> Result<Description, HubError> {
    let url = format!(
        "{}/api/models/{id}/revision/{revision}?blobs=true",
        hub.settings.endpoint
    );
    let ask = || {
        let request = authorized(hub, hub.client.get(&url)).timeout(DESCRIPTION_TIMEOUT);
        async { request.send().await.map_err(|error| unreachable(hub, &error)) }
    };
    let mut attempts = 1;
    let mut response = ask().await?;
    while response.status().is_server_error()
        && let Some(delay) = retry(&DESCRIPTION_BACKOFF, attempts)
    {
        tokio::time::sleep(delay).await;
        attempts += 1;
        response = ask().await?;
    }
    let mut response = check(hub, id, revision, response)?;
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| unreachable(hub, &error))? {
        body.extend_from_slice(&chunk);
        if body.len() > MAX_DESCRIPTION_BYTES {
            return Err(HubError::Answer {
                url,
                reason: "it is too long".to_owned(),
            });
        }
    }
    let answer = |reason: String| HubError::Answer {
        url: url.clone(),
        reason,
    };
    let description: Description =
        serde_json::from_slice(&body).map_err(|error| answer(error.to_string()))?;
    if description.sha.len() < 7 || !description.sha.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(answer("it names no commit".to_owned()));
    }
    Ok(description)
}

/// Chooses the files that loading reads, and only one format of the weights.
fn choose(id: &str, siblings: &[RemoteFile]) -> Result<Vec<RemoteFile>, HubError> {
    let single = siblings.iter().any(|file| file.name == "model.safetensors");
    let wanted = |name: &str| {
        let (directory, base) = name.rsplit_once('/').unwrap_or(("", name));
        let shard = base.starts_with("model-") && base.ends_with(".safetensors");
        let here = is_wanted(base) && !(single && directory.is_empty() && base.ends_with(".index.json"));
        (is_module_directory(directory) && here) || (directory.is_empty() && (here || (shard && !single)))
    };
    let files: Vec<RemoteFile> = siblings
        .iter()
        .filter(|file| wanted(&file.name))
        .cloned()
        .collect();
    if !files.iter().any(|file| file.name.ends_with(".safetensors")) {
        let pickled = siblings
            .iter()
            .any(|file| file.name.ends_with(".bin") || file.name.ends_with(".pt"));
        let id = id.to_owned();
        return Err(if pickled {
            HubError::PickledOnly { id }
        } else {
            HubError::MissingFile {
                id,
                file: "model.safetensors",
            }
        });
    }
    for file in ["config.json", "tokenizer.json"] {
        if !files
            .iter()
            .any(|found| found.name == file || found.name.ends_with(&format!("/{file}")))
        {
            return Err(HubError::MissingFile {
                id: id.to_owned(),
                file,
            });
        }
    }
    Ok(files)
}

fn is_wanted(base: &str) -> bool {
    WANTED.contains(&base) || SENTENCE_CONFIGS.contains(&base)
}

/// Directories such as `1_Pooling`: sentence-transformers numbers its modules.
fn is_module_directory(name: &str) -> bool {
    name.is_empty()
        || name.split_once('_').is_some_and(|(number, kind)| {
            !number.is_empty()
                && number.bytes().all(|byte| byte.is_ascii_digit())
                && !kind.is_empty()
                && kind.bytes().all(|byte| byte.is_ascii_alphanumeric())
        })
}

struct Transfer<'a> {
    hub: &'a Hub,
    id: &'a str,
    commit: &'a str,
    file: &'a RemoteFile,
    cache: &'a RepositoryCache,
    blob: &'a str,
    progress: Progress<'a>,
}

/// The outcome of an attempt that may be followed by another.
enum DownloadOutcome {
    Complete,
    Interrupted(String),
}

impl Transfer<'_> {
    async fn run(&self) -> Result<(), HubError> {
        let target = self.cache.blob(self.blob);
        if target.is_file() {
            return Ok(());
        }
        let _lock = self.lock().await?;
        if target.is_file() {
            return Ok(());
        }
        let mut attempts = 0;
        loop {
            attempts += 1;
            let reason = match self.attempt().await? {
                DownloadOutcome::Complete => return self.finish(&target),
                DownloadOutcome::Interrupted(reason) => reason,
            };
            let Some(delay) = retry(&TRANSFER_BACKOFF, attempts) else {
                return Err(HubError::Interrupted {
                    file: self.file.name.clone(),
                    reason,
                });
            };
            tokio::time::sleep(delay).await;
        }
    }

    /// Waits until no other process downloads the file, and locks it.
    async fn lock(&self) -> Result<File, HubError> {
        let path = self.cache.lock(self.blob);
        let unwritable = |source| HubError::Cache {
            path: path.clone(),
            source,
        };
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(unwritable)?;
        if file.try_lock().is_ok() {
            return Ok(file);
        }
        (self.progress)(ProgressEvent::Note(
            "another process is downloading this file; waiting for it",
        ));
        let waiting = tokio::task::spawn_blocking(move || file.lock().map(|()| file));
        waiting
            .await
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(unwritable)
    }

    async fn attempt(&self) -> Result<DownloadOutcome, HubError> {
        let path = self.cache.incomplete(self.blob);
        let unwritable = |source| HubError::Cache {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(unwritable)?;
        let mut done = file.metadata().map_err(unwritable)?.len();
        if self.file.size().is_some_and(|size| done > size) {
            done = 0;
        }
        if done > 0 && self.file.size() == Some(done) {
            return Ok(DownloadOutcome::Complete);
        }
        let url = format!(
            "{}/{}/resolve/{}/{}",
            self.hub.settings.endpoint, self.id, self.commit, self.file.name
        );
        let mut request = authorized(self.hub, self.hub.client.get(&url));
        if done > 0 {
            request = request.header(RANGE, format!("bytes={done}-"));
        }
        let response = match request.send().await {
            Ok(response) if response.status().is_server_error() => {
                return Ok(DownloadOutcome::Interrupted(format!(
                    "status {}",
                    response.status()
                )));
            }
            Ok(response) if response.status() == StatusCode::RANGE_NOT_SATISFIABLE => {
                file.set_len(0).map_err(unwritable)?;
                return Ok(DownloadOutcome::Interrupted(
                    "the partial download could not be resumed".to_owned(),
                ));
            }
            Ok(response) => check(self.hub, self.id, self.commit, response)?,
            Err(error) if error.is_connect() => return Err(unreachable(self.hub, &error)),
            Err(error) => return Ok(DownloadOutcome::Interrupted(reason(&error))),
        };
        // A server that ignores the range sends the file from its start.
        if done > 0 && !continues_at(&response, done) {
            done = 0;
        }
        file.set_len(done).map_err(unwritable)?;
        file.seek(SeekFrom::Start(done)).map_err(unwritable)?;
        self.receive(response, &mut file, done).await
    }

    async fn receive(
        &self,
        response: Response,
        file: &mut File,
        mut done: u64,
    ) -> Result<DownloadOutcome, HubError> {
        let unwritable = |source| HubError::Cache {
            path: self.cache.incomplete(self.blob),
            source,
        };
        let name = self.file.name.as_str();
        let total = self
            .file
            .size()
            .or_else(|| response.content_length().map(|length| length + done));
        (self.progress)(ProgressEvent::Started {
            file: name,
            done,
            total,
        });
        let mut body = response.bytes_stream();
        while let Some(chunk) = body.next().await {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                Err(error) => return Ok(DownloadOutcome::Interrupted(reason(&error))),
            };
            done += chunk.len() as u64;
            if total.is_some_and(|total| done > total) {
                file.set_len(0).map_err(unwritable)?;
                return Ok(DownloadOutcome::Interrupted(
                    "more bytes arrived than announced".to_owned(),
                ));
            }
            file.write_all(&chunk).map_err(unwritable)?;
            (self.progress)(ProgressEvent::Advanced {
                file: name,
                done,
                total,
            });
        }
        if total.is_some_and(|total| done < total) {
            return Ok(DownloadOutcome::Interrupted(format!(
                "{done} bytes of {} arrived",
                total.unwrap_or_default()
            )));
        }
        file.sync_all().map_err(unwritable)?;
        Ok(DownloadOutcome::Complete)
    }

    fn finish(&self, target: &Path) -> Result<(), HubError> {
        let path = self.cache.incomplete(self.blob);
        let unwritable = |source| HubError::Cache {
            path: path.clone(),
            source,
        };
        if let Some(lfs) = &self.file.lfs {
            let found = sha256_of(&path).map_err(unwritable)?;
            if !found.eq_ignore_ascii_case(&lfs.sha256) {
                std::fs::remove_file(&path).map_err(unwritable)?;
                let (id, file) = (self.id.to_owned(), self.file.name.clone());
                return Err(HubError::Checksum {
                    id,
                    file,
                    expected: lfs.sha256.clone(),
                    found,
                });
            }
        }
        std::fs::rename(&path, target).map_err(unwritable)?;
        (self.progress)(ProgressEvent::Finished {
            file: &self.file.name,
        });
        Ok(())
    }
}

/// Whether the server continues exactly where the partial file ends.
fn continues_at(response: &Response, done: u64) -> bool {
    let range = response
        .headers()
        .get(CONTENT_RANGE)
        .and_then(|range| range.to_str().ok());
    response.status() == StatusCode::PARTIAL_CONTENT
        && range.is_some_and(|range| range.starts_with(&format!("bytes {done}-")))
}

fn retry(backoff: &Backoff, attempts: u32) -> Option<Duration> {
    backoff.retry(attempts, fastrand::f64(), RetryLimits::default())
}

fn authorized(hub: &Hub, request: reqwest::RequestBuilder) -> reqwest::RequestBuilder {
    match &hub.settings.token {
        Some(token) => request.header(AUTHORIZATION, format!("Bearer {token}")),
        None => request,
    }
}

fn check(hub: &Hub, id: &str, revision: &str, response: Response) -> Result<Response, HubError> {
    let status = response.status();
    match status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => Ok(response),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(HubError::Unauthorized {
            id: id.to_owned(),
            status: status.as_u16(),
        }),
        StatusCode::NOT_FOUND => Err(HubError::NotFound {
            id: id.to_owned(),
            revision: revision.to_owned(),
        }),
        StatusCode::TOO_MANY_REQUESTS => {
            let header = response
                .headers()
                .get(RETRY_AFTER)
                .and_then(|value| value.to_str().ok());
            let seconds = header.and_then(|value| value.trim().parse().ok()).unwrap_or(60);
            Err(HubError::RateLimited { seconds })
        }
        _ => {
            // Redirects lead to signed URLs, which do not belong in messages.
            let url = format!("{}{}", hub.settings.endpoint, response.url().path());
            Err(HubError::Status {
                url,
                status: status.as_u16(),
            })
        }
    }
}

fn unreachable(hub: &Hub, error: &reqwest::Error) -> HubError {
    HubError::Unreachable {
        endpoint: hub.settings.endpoint.clone(),
        reason: reason(error),
    }
}

/// The innermost cause of an error. The outer ones repeat the URL.
fn reason(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "timed out".to_owned();
    }
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}

pub(crate) fn sha256_of(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut chunk = vec![0; 1 << 20];
    loop {
        match file.read(&mut chunk)? {
            0 => return Ok(hex(&hash.finalize())),
            read => hash.update(&chunk[..read]),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
