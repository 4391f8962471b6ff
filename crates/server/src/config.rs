//! Settings: from flags, environment variables, the configuration file and defaults, in this order of
//! precedence.
//!
//! clap resolves flags and variables ([`args`]); [`build`] adds the file and the defaults, and checks the
//! result.

mod args;
mod file;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use ragstone_providers::config::{ChatConfig, EmbeddingConfig, Providers, ServiceConfig};
use ragstone_store::PostgresUrl;
use secrecy::{ExposeSecret, SecretString};

pub(crate) use args::SUPERSEDED_VARIABLES;
pub use args::{
    ComputeArgs, CrossEncoderArgs, DEFAULT_DATA_DIR, DEFAULT_HOST, DEFAULT_PORT, ListenArgs, LocalArgs,
    ServerArgs, StoreArgs,
};
pub use file::FileConfig;
use file::{ConversationsSection, ServerSection};

use crate::http::state::Limits;

/// Ten years: practically for ever, and far from where times overflow.
const MAX_TTL_SECONDS: u64 = 10 * 366 * 24 * 60 * 60;

/// Longer than a client on a bad network pauses, short enough that clients that never read cannot fill
/// memory with their responses.
const DEFAULT_WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Invalid configuration, in one sentence that names the setting and the fix. Ends the program with exit
/// code 78.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

#[derive(Debug)]
pub struct Settings {
    pub host: IpAddr,
    pub port: u16,
    pub store: StoreLocation,
    pub api_keys: Vec<SecretString>,
    pub embeddings: EmbeddingsChoice,
    pub cross_encoder: Option<CrossEncoderChoice>,
    pub limits: Limits,
    /// How long a client may read nothing of its response.
    pub write_timeout: Duration,
    /// Named credentials; keys in them are looked up where they are used.
    pub providers: Providers,
    pub embedding: EmbeddingConfig,
    pub chat: Option<ChatConfig>,
    /// The gateway's backends, by name. Keys in them are looked up when the services are connected.
    pub services: BTreeMap<String, ServiceConfig>,
    /// How long a conversation is kept after its last message.
    pub conversation_ttl: Duration,
    /// Compute threads of the models; as many as there are cores unless set.
    pub threads: Option<NonZeroUsize>,
    /// Large requests are refused if more tokens than this would wait for the models; the engine's own unless set.
    pub model_queue_tokens: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreLocation {
    /// The embedded store, in this directory.
    Embedded(PathBuf),
    Postgres(Box<PostgresUrl>),
    /// A ChromaDB server; what it cannot keep is in this directory.
    Chroma {
        url: String,
        data_dir: PathBuf,
    },
}

impl StoreLocation {
    /// Whether other processes may work on the same records. The directory they are in is locked.
    pub fn is_shared(&self) -> bool {
        match self {
            Self::Embedded(_) | Self::Chroma { .. } => false,
            Self::Postgres(_) => true,
        }
    }
}

/// Without any password.
impl std::fmt::Display for StoreLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedded(directory) => write!(f, "{}", directory.display()),
            Self::Postgres(url) => write!(f, "{url}"),
            Self::Chroma { url, .. } => f.write_str(url),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmbeddingsChoice {
    /// Nothing was said about models, which is an error of `serve`.
    Unset,
    /// It was said that none are wanted.
    None,
    File(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CrossEncoderChoice {
    Directory(PathBuf),
    Hub(String),
}

/// Environment variables that are set to nothing count as not set.
pub fn process_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

pub fn build(
    args: &ServerArgs,
    file: FileConfig,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Settings, ConfigError> {
    let ServerArgs {
        listen,
        local,
        no_embeddings,
        cross_encoder,
    } = args;
    let server = file.server.unwrap_or_default();
    let host = parse_host(
        listen
            .host
            .as_deref()
            .or(server.host.as_deref())
            .unwrap_or(DEFAULT_HOST),
    )?;
    let data_dir = local
        .store
        .data_dir
        .clone()
        .or_else(|| server.data_dir.clone())
        .unwrap_or_else(|| DEFAULT_DATA_DIR.into());
    let store = match (&local.store.store, &server.store) {
        (Some(url), _) => Some(url.clone()),
        (None, Some(url)) => Some(file::interpolate(url, env)?),
        (None, None) => None,
    };
    let api_keys = api_keys(env, &server)?;
    if !host.is_loopback()
        && api_keys.is_empty()
        && !(listen.allow_no_key || server.allow_no_key.unwrap_or(false))
    {
        return Err(ConfigError(format!(
            "Other machines can reach the address {host}, so an API key is required: set RAGSTONE_API_KEYS, \
             or pass --allow-no-key to run without one"
        )));
    }
    let embeddings = match local
        .embeddings_config
        .as_ref()
        .or(server.embeddings_config.as_ref())
    {
        _ if *no_embeddings => EmbeddingsChoice::None,
        Some(path) => EmbeddingsChoice::File(path.clone()),
        None => EmbeddingsChoice::Unset,
    };
    let from_args = choose_cross_encoder(
        ("--cross-encoder-path", cross_encoder.cross_encoder_path.as_ref()),
        ("--cross-encoder", cross_encoder.cross_encoder.as_ref()),
    )?;
    let from_file = choose_cross_encoder(
        ("server.crossEncoderPath", server.cross_encoder_path.as_ref()),
        ("server.crossEncoder", server.cross_encoder.as_ref()),
    )?;
    Ok(Settings {
        host,
        port: listen.port.or(server.port).unwrap_or(DEFAULT_PORT),
        store: match store {
            Some(url) => parse_store(&url, data_dir)?,
            None => StoreLocation::Embedded(data_dir),
        },
        api_keys,
        embeddings,
        cross_encoder: from_args.or(from_file),
        limits: limits(&server)?,
        write_timeout: write_timeout(&server)?,
        providers: file.providers,
        embedding: file.embedding,
        chat: file.chat,
        services: file.services,
        conversation_ttl: conversation_ttl(file.conversations.as_ref())?,
        threads: local.compute.threads.or(server.threads),
        model_queue_tokens: model_queue_tokens(&server)?,
    })
}

/// Each value comes with the name of its setting.
fn choose_cross_encoder(
    (path_setting, path): (&str, Option<&PathBuf>),
    (name_setting, name): (&str, Option<&String>),
) -> Result<Option<CrossEncoderChoice>, ConfigError> {
    let empty = |setting: &str, expected: &str| {
        ConfigError(format!(
            "{setting} is empty: name {expected}, or leave it out to run without a cross-encoder"
        ))
    };
    match (path, name) {
        (Some(path), _) if path.as_os_str().is_empty() => Err(empty(path_setting, "a directory")),
        (Some(path), _) => Ok(Some(CrossEncoderChoice::Directory(path.clone()))),
        (None, Some(name)) if name.trim().is_empty() => Err(empty(
            name_setting,
            "a Hugging Face model such as BAAI/bge-reranker-base",
        )),
        (None, name) => Ok(name.cloned().map(CrossEncoderChoice::Hub)),
    }
}

fn parse_host(text: &str) -> Result<IpAddr, ConfigError> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        other => other.trim_matches(['[', ']']).parse().map_err(|_| {
            ConfigError(format!(
                "'{other}' is not an address to bind to: give an IP address or 'localhost'"
            ))
        }),
    }
}

/// `data_dir` holds what another engine cannot store.
pub fn parse_store(url: &str, data_dir: PathBuf) -> Result<StoreLocation, ConfigError> {
    match url.split_once("://") {
        Some(("sqlite", path)) if !path.is_empty() => Ok(StoreLocation::Embedded(path.into())),
        Some(("postgres" | "postgresql", _)) => PostgresUrl::parse(url)
            .map(|url| StoreLocation::Postgres(Box::new(url)))
            .map_err(|error| ConfigError(format!("'{}': {error}", without_credentials(url)))),
        Some(("chroma" | "chromas", _)) => {
            crate::stores::connect_chroma(url)?;
            Ok(StoreLocation::Chroma {
                url: url.to_owned(),
                data_dir,
            })
        }
        _ => Err(ConfigError(format!(
            "'{}' is not a store: give sqlite://DIRECTORY, postgres://USER:PASSWORD@HOST/DATABASE or \
             chroma://HOST:PORT, or leave it out to use the data directory",
            without_credentials(url)
        ))),
    }
}

/// A store's address may carry a password, before the host or among the options, which must not
/// reach a message.
fn without_credentials(url: &str) -> String {
    let address = url.split_once('?').map_or(url, |(address, _)| address);
    match (address.split_once("://"), address.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, rest))) => format!("{scheme}://…@{rest}"),
        (None, Some((_, rest))) => format!("…@{rest}"),
        (_, None) => address.to_owned(),
    }
}

fn api_keys(
    env: &dyn Fn(&str) -> Option<String>,
    server: &ServerSection,
) -> Result<Vec<SecretString>, ConfigError> {
    let keys: Vec<SecretString> = match env("RAGSTONE_API_KEYS").or_else(|| env("RAGSTONE_API_KEY")) {
        Some(list) => list
            .split(',')
            .map(|key| SecretString::from(key.trim()))
            .collect(),
        None => server
            .api_keys
            .iter()
            .flatten()
            .map(|key| file::interpolate(key, env).map(SecretString::from))
            .collect::<Result<_, _>>()?,
    };
    if keys.iter().any(|key| key.expose_secret().is_empty()) {
        return Err(ConfigError(
            "An API key is empty: give each key at least one character".to_owned(),
        ));
    }
    Ok(keys)
}

fn conversation_ttl(section: Option<&ConversationsSection>) -> Result<Duration, ConfigError> {
    match section.and_then(|section| section.ttl_seconds) {
        None => Ok(ragstone_search::conversations::DEFAULT_TTL),
        Some(seconds @ 1..=MAX_TTL_SECONDS) => Ok(Duration::from_secs(seconds)),
        Some(seconds) => Err(ConfigError(format!(
            "conversations.ttlSeconds is {seconds}: it must be from 1 to {MAX_TTL_SECONDS}"
        ))),
    }
}

fn write_timeout(server: &ServerSection) -> Result<Duration, ConfigError> {
    match server.limits.as_ref().and_then(|limits| limits.write_seconds) {
        Some(0) => Err(ConfigError(
            "server.limits.writeSeconds is 0: it must be at least 1".to_owned(),
        )),
        Some(seconds) => Ok(Duration::from_secs(seconds)),
        None => Ok(DEFAULT_WRITE_TIMEOUT),
    }
}

fn model_queue_tokens(server: &ServerSection) -> Result<Option<usize>, ConfigError> {
    match server
        .limits
        .as_ref()
        .and_then(|limits| limits.model_queue_tokens)
    {
        Some(0) => Err(ConfigError(
            "server.limits.modelQueueTokens is 0: it must be at least 1".to_owned(),
        )),
        tokens => Ok(tokens),
    }
}

fn limits(server: &ServerSection) -> Result<Limits, ConfigError> {
    let given = server.limits.clone().unwrap_or_default();
    let defaults = Limits::default();
    let count = |name: &str, value: Option<usize>, default: usize| match value {
        Some(0) => Err(ConfigError(format!(
            "server.limits.{name} is 0: it must be at least 1"
        ))),
        value => Ok(value.unwrap_or(default)),
    };
    let seconds = |name: &str, value: Option<u64>, default: Duration| match value {
        Some(0) => Err(ConfigError(format!(
            "server.limits.{name} is 0: it must be at least 1"
        ))),
        value => Ok(value.map_or(default, Duration::from_secs)),
    };
    Ok(Limits {
        body_bytes: count("bodyBytes", given.body_bytes, defaults.body_bytes)?,
        add_bytes: count("addBytes", given.add_bytes, defaults.add_bytes)?,
        add_documents: count("addDocuments", given.add_documents, defaults.add_documents)?,
        rerank_documents: count(
            "rerankDocuments",
            given.rerank_documents,
            defaults.rerank_documents,
        )?,
        top_k: count("topK", given.top_k, defaults.top_k)?,
        open_jobs: count("openJobs", given.open_jobs, defaults.open_jobs)?,
        body_timeout: seconds("bodySeconds", given.body_seconds, defaults.body_timeout)?,
        request_timeout: seconds("requestSeconds", given.request_seconds, defaults.request_timeout)?,
        header_timeout: seconds("headerSeconds", given.header_seconds, defaults.header_timeout)?,
        shutdown_timeout: seconds(
            "shutdownSeconds",
            given.shutdown_seconds,
            defaults.shutdown_timeout,
        )?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(args: ServerArgs, env: &[(&str, &str)], yaml: &str) -> Result<Settings, ConfigError> {
        let file = FileConfig::from_yaml(yaml)?;
        let env = |name: &str| {
            env.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        build(&args, file, &env)
    }

    fn with_store(url: &str) -> ServerArgs {
        let mut args = ServerArgs::default();
        args.local.store.store = Some(url.to_owned());
        args
    }

    fn with_cross_encoder(name: Option<&str>, path: Option<&str>) -> ServerArgs {
        ServerArgs {
            cross_encoder: CrossEncoderArgs {
                cross_encoder: name.map(str::to_owned),
                cross_encoder_path: path.map(PathBuf::from),
            },
            ..ServerArgs::default()
        }
    }

    #[test]
    fn arguments_win_over_the_file_which_wins_over_defaults() {
        let yaml = "server: {port: 1, dataDir: /file, crossEncoder: file/model}";
        let from_file = settings(ServerArgs::default(), &[], yaml).unwrap();
        assert_eq!(
            (from_file.port, from_file.store),
            (1, StoreLocation::Embedded("/file".into()))
        );
        assert_eq!(
            from_file.cross_encoder,
            Some(CrossEncoderChoice::Hub("file/model".into()))
        );
        let mut args = with_cross_encoder(Some("flag/model"), None);
        args.listen.port = Some(3);
        let from_args = settings(args, &[], yaml).unwrap();
        assert_eq!(from_args.port, 3);
        assert_eq!(
            from_args.cross_encoder,
            Some(CrossEncoderChoice::Hub("flag/model".into()))
        );
        let defaults = settings(ServerArgs::default(), &[], "").unwrap();
        assert_eq!(
            (defaults.port, defaults.store),
            (DEFAULT_PORT, StoreLocation::Embedded(DEFAULT_DATA_DIR.into()))
        );
    }

    #[test]
    fn a_cross_encoder_directory_wins_over_a_name() {
        let both = with_cross_encoder(Some("flag/model"), Some("/flag"));
        assert_eq!(
            settings(both, &[], "").unwrap().cross_encoder,
            Some(CrossEncoderChoice::Directory("/flag".into()))
        );
    }

    #[test]
    fn an_empty_cross_encoder_is_reported_by_its_setting() {
        for (args, yaml, expected) in [
            (
                with_cross_encoder(Some(""), None),
                "",
                "--cross-encoder is empty: name a Hugging Face model",
            ),
            (
                with_cross_encoder(None, Some("")),
                "",
                "--cross-encoder-path is empty: name a directory",
            ),
            (
                ServerArgs::default(),
                "server: {crossEncoder: ' '}",
                "server.crossEncoder is empty",
            ),
        ] {
            let message = settings(args, &[], yaml).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn an_open_address_needs_a_key_or_the_explicit_flag() {
        let mut open = ServerArgs::default();
        open.listen.host = Some("0.0.0.0".to_owned());
        let refusal = settings(open.clone(), &[], "").unwrap_err().to_string();
        assert!(
            refusal.contains("RAGSTONE_API_KEYS") && refusal.contains("--allow-no-key"),
            "{refusal}"
        );
        assert!(settings(open.clone(), &[("RAGSTONE_API_KEYS", "k1,k2")], "").is_ok());
        open.listen.allow_no_key = true;
        assert!(settings(open, &[], "").is_ok());
    }

    #[test]
    fn keys_come_from_the_environment_by_name_and_are_never_printed() {
        let yaml = "server: {apiKeys: ['${MY_KEY}']}";
        let settings_with = settings(ServerArgs::default(), &[("MY_KEY", "hunter2")], yaml).unwrap();
        assert_eq!(settings_with.api_keys[0].expose_secret(), "hunter2");
        assert!(!format!("{settings_with:?}").contains("hunter2"));
        let missing = settings(ServerArgs::default(), &[], yaml)
            .unwrap_err()
            .to_string();
        assert!(missing.contains("MY_KEY"), "{missing}");
    }

    #[test]
    fn unknown_keys_are_named() {
        for (yaml, key) in [
            ("servr: {}", "servr"),
            ("server: {prt: 1}", "prt"),
            ("server: {limits: {topk: 3}}", "topk"),
        ] {
            let message = FileConfig::from_yaml(yaml).err().unwrap().to_string();
            assert!(message.contains(key), "{message}");
        }
        assert!(FileConfig::from_yaml("server: {data_dir: /x, limits: {top_k: 3}}").is_ok());
    }

    #[test]
    fn wrong_values_are_named() {
        let mut args = ServerArgs::default();
        args.listen.host = Some("example.org".to_owned());
        let message = settings(args, &[], "").unwrap_err().to_string();
        assert!(message.contains("example.org"), "{message}");
        let message = settings(with_store("redis://u:secret@h"), &[], "").unwrap_err();
        assert!(!message.to_string().contains("secret"), "{message}");
    }

    /// The message of a panic is logged, and it may have anything in it that can be formatted.
    #[test]
    fn a_panic_over_the_settings_shows_no_key() {
        let yaml = r#"
            server: {apiKeys: [canary-a], store: "postgres://ann:canary-b@db.example/rag"}
            providers:
              openai: {type: openai, apiKey: canary-c, baseUrl: "http://u:canary-h@h:4/?key=canary-i"}
              google: {type: google, apiKey: "${KEY}"}
            embedding: {provider: local, local: {baseUrl: "http://u:canary-j@h:5"}}
            services:
              one: {provider: chromadb-wrapper, url: "http://h:1", auth: {type: bearer, token: canary-d}}
              two: {provider: chromadb-wrapper, url: "http://h:2", auth: {type: basic, username: u, password: canary-e}}
              three: {provider: chromadb, url: "http://h:3", auth: {type: api_key, header: x-key, key: canary-f}}
        "#;
        let all = settings(ServerArgs::default(), &[("KEY", "canary-g")], yaml).unwrap();
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            panic!("cannot go on with {all:?}")
        }));
        let said = *panic.unwrap_err().downcast::<String>().unwrap();
        assert!(said.contains("three") && said.contains("db.example"), "{said}");
        assert!(!said.contains("canary"), "{said}");
    }

    #[test]
    fn a_database_is_named_by_its_url_and_its_password_is_never_printed() {
        let env = [("DB_PASSWORD", "hunter2")];
        let yaml = "server: {store: 'postgres://ann:${DB_PASSWORD}@db.example/rag'}";
        let shared = settings(ServerArgs::default(), &env, yaml).unwrap();
        assert!(matches!(shared.store, StoreLocation::Postgres(_)) && shared.store.is_shared());
        assert!(!format!("{shared:?}").contains("hunter2"));
        for wrong in [
            "postgres://ann:hunter2@db:no-port/rag",
            "postgres://ann@db/rag?password=hunter2&sslmode=perhaps",
            "postgres://db/rag?password=hunter2",
        ] {
            let refusal = settings(with_store(wrong), &[], "").unwrap_err().to_string();
            assert!(refusal.contains("postgres://"), "{refusal}");
            assert!(!refusal.contains("hunter2"), "{refusal}");
        }
    }
}
