//! Settings: from flags, environment and file, in that order of precedence.
//!
//! [`Layers`] is what was typed; [`Settings`] is what it means, checked. Nothing else reads the
//! environment or the configuration file.

mod file;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use ragstone_providers::config::{ChatConfig, EmbeddingConfig, Providers, ServiceConfig};
use ragstone_store::PostgresUrl;
use secrecy::{ExposeSecret, SecretString};

pub use file::FileConfig;
use file::{ConversationsSection, ServerSection};

use crate::http::state::Limits;
use crate::telemetry::LogFormat;

pub const DEFAULT_PORT: u16 = 5006;
/// Names the configuration file where no flag does.
pub const CONFIG_VARIABLE: &str = "RAGSTONE_CONFIG";
const PORTS: &str = "a whole number from 0 to 65535";
const DEFAULT_DATA_DIR: &str = "ragstone-data";
/// Ten years, which is for ever, and far from where times overflow.
const MAX_TTL_SECONDS: u64 = 10 * 366 * 24 * 60 * 60;

/// Wrong configuration, in one sentence that says what to change. Ends the program with exit code 78.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// Flags of `serve`, as far as they are settings. The password of the store may be among them.
#[derive(Clone, Default)]
pub struct Flags {
    pub host: Option<String>,
    pub port: Option<u16>,
    pub data_dir: Option<PathBuf>,
    pub store: Option<String>,
    pub embeddings_config: Option<PathBuf>,
    pub no_embeddings: bool,
    pub cross_encoder: Option<String>,
    pub cross_encoder_path: Option<PathBuf>,
    pub allow_no_key: bool,
    pub threads: Option<NonZeroUsize>,
}

/// Everything that was said, before it is weighed.
pub struct Layers<'a> {
    pub flags: Flags,
    pub env: &'a dyn Fn(&str) -> Option<String>,
    pub file: FileConfig,
}

#[derive(Debug)]
pub struct Settings {
    pub host: IpAddr,
    pub port: u16,
    pub store: StoreLocation,
    pub api_keys: Vec<SecretString>,
    pub embeddings: EmbeddingsChoice,
    pub cross_encoder: Option<CrossEncoderChoice>,
    pub limits: Limits,
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

/// Reads the configuration file, if one is named by the flag or by `RAGSTONE_CONFIG`.
pub fn read_file(
    flag: Option<&Path>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<FileConfig, ConfigError> {
    let path = flag
        .map(Path::to_owned)
        .or_else(|| env(CONFIG_VARIABLE).map(PathBuf::from));
    path.map_or_else(|| Ok(FileConfig::default()), |path| FileConfig::read(&path))
}

/// Environment variables that are set to nothing count as not set.
pub fn process_env(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

pub fn build(layers: Layers<'_>) -> Result<Settings, ConfigError> {
    let Layers { flags, env, file } = layers;
    let server = file.server.unwrap_or_default();
    let host = flags
        .host
        .or_else(|| env("RAGSTONE_HOST"))
        .or_else(|| server.host.clone());
    let host = parse_host(host.as_deref().unwrap_or("127.0.0.1"))?;
    let port = match (flags.port, env("RAGSTONE_PORT")) {
        (Some(port), _) => port,
        (None, Some(text)) => parse_env("RAGSTONE_PORT", &text, PORTS)?,
        (None, None) => server.port.unwrap_or(DEFAULT_PORT),
    };
    let store = flags.store.or_else(|| env("RAGSTONE_STORE")).map_or_else(
        || {
            let from_file = server.store.as_deref();
            from_file.map(|url| file::interpolate(url, env)).transpose()
        },
        |url| Ok(Some(url)),
    )?;
    let data_dir = flags
        .data_dir
        .or_else(|| env("RAGSTONE_DATA_DIR").map(PathBuf::from))
        .or_else(|| server.data_dir.clone())
        .unwrap_or_else(|| DEFAULT_DATA_DIR.into());
    let threads = match (flags.threads, env("RAGSTONE_THREADS")) {
        (Some(threads), _) => Some(threads),
        (None, Some(text)) => Some(parse_env("RAGSTONE_THREADS", &text, "a whole number, 1 or more")?),
        (None, None) => server.threads,
    };
    let api_keys = api_keys(env, &server)?;
    if !host.is_loopback()
        && api_keys.is_empty()
        && !(flags.allow_no_key || server.allow_no_key.unwrap_or(false))
    {
        return Err(ConfigError(format!(
            "{host} can be reached from other machines, so an API key is needed: set RAGSTONE_API_KEYS, \
             or say --allow-no-key if no key is meant"
        )));
    }
    let embeddings = match flags.embeddings_config {
        _ if flags.no_embeddings => EmbeddingsChoice::None,
        Some(path) => EmbeddingsChoice::File(path),
        None => env("EMBEDDINGS_CONFIG")
            .map(PathBuf::from)
            .or_else(|| server.embeddings_config.clone())
            .map_or(EmbeddingsChoice::Unset, EmbeddingsChoice::File),
    };
    let from_flags = choose_cross_encoder(
        ("--cross-encoder-path", flags.cross_encoder_path),
        ("--cross-encoder", flags.cross_encoder),
    )?;
    let from_env = choose_cross_encoder(
        ("CROSS_ENCODER_PATH", env("CROSS_ENCODER_PATH").map(PathBuf::from)),
        ("CROSS_ENCODER_MODEL", env("CROSS_ENCODER_MODEL")),
    )?;
    let from_file = choose_cross_encoder(
        ("server.crossEncoderPath", server.cross_encoder_path.clone()),
        ("server.crossEncoder", server.cross_encoder.clone()),
    )?;
    Ok(Settings {
        host,
        port,
        store: match store {
            Some(url) => parse_store(&url, data_dir)?,
            None => StoreLocation::Embedded(data_dir),
        },
        api_keys,
        embeddings,
        cross_encoder: from_flags.or(from_env).or(from_file),
        limits: limits(&server)?,
        providers: file.providers,
        embedding: file.embedding,
        chat: file.chat,
        services: file.services,
        conversation_ttl: conversation_ttl(file.conversations.as_ref())?,
        threads,
        model_queue_tokens: model_queue_tokens(&server)?,
    })
}

/// Each with the name of the setting it comes from.
fn choose_cross_encoder(
    (path_setting, path): (&str, Option<PathBuf>),
    (name_setting, name): (&str, Option<String>),
) -> Result<Option<CrossEncoderChoice>, ConfigError> {
    let empty = |setting: &str, what: &str| {
        ConfigError(format!(
            "{setting} is empty: name {what}, or leave it out to run without a cross-encoder"
        ))
    };
    match (path, name) {
        (Some(path), _) if path.as_os_str().is_empty() => Err(empty(path_setting, "a directory")),
        (Some(path), _) => Ok(Some(CrossEncoderChoice::Directory(path))),
        (None, Some(name)) if name.trim().is_empty() => Err(empty(
            name_setting,
            "a Hugging Face model such as BAAI/bge-reranker-base",
        )),
        (None, name) => Ok(name.map(CrossEncoderChoice::Hub)),
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

fn parse_env<T: std::str::FromStr>(name: &str, text: &str, expected: &str) -> Result<T, ConfigError> {
    text.trim()
        .parse()
        .map_err(|_| ConfigError(format!("{name} is '{text}': it must be {expected}")))
}

/// The form of log lines: the flag's, or else the environment's.
pub fn log_format(
    flag: Option<LogFormat>,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<LogFormat, ConfigError> {
    match (flag, env("RAGSTONE_LOG_FORMAT")) {
        (Some(format), _) => Ok(format),
        (None, None) => Ok(LogFormat::Text),
        (None, Some(text)) => LogFormat::from_str(&text, true).map_err(|_| {
            ConfigError(format!(
                "RAGSTONE_LOG_FORMAT is '{text}': it must be text or json"
            ))
        }),
    }
}

/// `data_dir` is where what another engine cannot keep is kept.
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
        Some(_) => Err(ConfigError(format!(
            "conversations.ttlSeconds must be from 1 to {MAX_TTL_SECONDS}"
        ))),
    }
}

fn model_queue_tokens(server: &ServerSection) -> Result<Option<usize>, ConfigError> {
    match server
        .limits
        .as_ref()
        .and_then(|limits| limits.model_queue_tokens)
    {
        Some(0) => Err(ConfigError(
            "server.limits.modelQueueTokens must be at least 1".to_owned(),
        )),
        tokens => Ok(tokens),
    }
}

fn limits(server: &ServerSection) -> Result<Limits, ConfigError> {
    let given = server.limits.clone().unwrap_or_default();
    let defaults = Limits::default();
    let count = |name: &str, value: Option<usize>, default: usize| match value {
        Some(0) => Err(ConfigError(format!("server.limits.{name} must be at least 1"))),
        value => Ok(value.unwrap_or(default)),
    };
    let seconds = |name: &str, value: Option<u64>, default: Duration| match value {
        Some(0) => Err(ConfigError(format!("server.limits.{name} must be at least 1"))),
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

    fn settings(flags: Flags, env: &[(&str, &str)], yaml: &str) -> Result<Settings, ConfigError> {
        let file = FileConfig::from_yaml(yaml)?;
        let env = |name: &str| {
            env.iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        build(Layers {
            flags,
            env: &env,
            file,
        })
    }

    #[test]
    fn flags_win_over_environment_which_wins_over_file() {
        let yaml = "server: {port: 1, dataDir: /file, crossEncoder: file/model}";
        let env = [("RAGSTONE_PORT", "2"), ("CROSS_ENCODER_MODEL", "env/model")];
        let from_file = settings(Flags::default(), &[], yaml).unwrap();
        assert_eq!(
            (from_file.port, from_file.store),
            (1, StoreLocation::Embedded("/file".into()))
        );
        assert_eq!(
            from_file.cross_encoder,
            Some(CrossEncoderChoice::Hub("file/model".into()))
        );
        let from_env = settings(Flags::default(), &env, yaml).unwrap();
        assert_eq!(from_env.port, 2);
        assert_eq!(
            from_env.cross_encoder,
            Some(CrossEncoderChoice::Hub("env/model".into()))
        );
        let flags = Flags {
            port: Some(3),
            cross_encoder: Some("flag/model".into()),
            ..Flags::default()
        };
        let from_flags = settings(flags, &env, yaml).unwrap();
        assert_eq!(from_flags.port, 3);
        assert_eq!(
            from_flags.cross_encoder,
            Some(CrossEncoderChoice::Hub("flag/model".into()))
        );
    }

    #[test]
    fn priority_order_for_model_source() {
        let env = [
            ("CROSS_ENCODER_PATH", "/env"),
            ("CROSS_ENCODER_MODEL", "env/model"),
        ];
        let both = Flags {
            cross_encoder_path: Some("/flag".into()),
            cross_encoder: Some("flag/model".into()),
            ..Flags::default()
        };
        let chosen = |flags: Flags| settings(flags, &env, "").unwrap().cross_encoder.unwrap();
        assert_eq!(
            chosen(both.clone()),
            CrossEncoderChoice::Directory("/flag".into())
        );
        let name_only = Flags {
            cross_encoder_path: None,
            ..both
        };
        assert_eq!(chosen(name_only), CrossEncoderChoice::Hub("flag/model".into()));
        assert_eq!(
            chosen(Flags::default()),
            CrossEncoderChoice::Directory("/env".into())
        );
    }

    #[test]
    fn a_cross_encoder_without_a_name_is_named_by_its_setting() {
        let name = Flags {
            cross_encoder: Some(String::new()),
            ..Flags::default()
        };
        let path = Flags {
            cross_encoder_path: Some("".into()),
            ..Flags::default()
        };
        for (flags, yaml, says) in [
            (name, "", "--cross-encoder is empty: name a Hugging Face model"),
            (path, "", "--cross-encoder-path is empty: name a directory"),
            (
                Flags::default(),
                "server: {crossEncoder: ' '}",
                "server.crossEncoder is empty",
            ),
        ] {
            let message = settings(flags, &[], yaml).unwrap_err().to_string();
            assert!(message.starts_with(says), "{message}");
        }
    }

    #[test]
    fn an_open_address_needs_a_key_or_the_explicit_flag() {
        let open = Flags {
            host: Some("0.0.0.0".into()),
            ..Flags::default()
        };
        let refusal = settings(open.clone(), &[], "").unwrap_err().to_string();
        assert!(
            refusal.contains("RAGSTONE_API_KEYS") && refusal.contains("--allow-no-key"),
            "{refusal}"
        );
        assert!(settings(open.clone(), &[("RAGSTONE_API_KEYS", "k1,k2")], "").is_ok());
        assert!(
            settings(
                Flags {
                    allow_no_key: true,
                    ..open
                },
                &[],
                ""
            )
            .is_ok()
        );
    }

    #[test]
    fn keys_come_from_the_environment_by_name_and_are_never_printed() {
        let yaml = "server: {apiKeys: ['${MY_KEY}']}";
        let settings_with = settings(Flags::default(), &[("MY_KEY", "hunter2")], yaml).unwrap();
        assert_eq!(settings_with.api_keys[0].expose_secret(), "hunter2");
        assert!(!format!("{settings_with:?}").contains("hunter2"));
        let missing = settings(Flags::default(), &[], yaml).unwrap_err().to_string();
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
        for (env, name) in [
            (("RAGSTONE_PORT", "many"), "RAGSTONE_PORT"),
            (("RAGSTONE_HOST", "example.org"), "example.org"),
        ] {
            let message = settings(Flags::default(), &[env], "").unwrap_err().to_string();
            assert!(message.contains(name), "{message}");
        }
        let message = settings(
            Flags {
                store: Some("redis://u:secret@h".into()),
                ..Flags::default()
            },
            &[],
            "",
        )
        .unwrap_err();
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
        let all = settings(Flags::default(), &[("KEY", "canary-g")], yaml).unwrap();
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
        let shared = settings(Flags::default(), &env, yaml).unwrap();
        assert!(matches!(shared.store, StoreLocation::Postgres(_)) && shared.store.is_shared());
        assert!(!format!("{shared:?}").contains("hunter2"));
        for wrong in [
            "postgres://ann:hunter2@db:no-port/rag",
            "postgres://ann@db/rag?password=hunter2&sslmode=perhaps",
            "postgres://db/rag?password=hunter2",
        ] {
            let flags = Flags {
                store: Some(wrong.into()),
                ..Flags::default()
            };
            let refusal = settings(flags, &[], "").unwrap_err().to_string();
            assert!(refusal.contains("postgres://"), "{refusal}");
            assert!(!refusal.contains("hunter2"), "{refusal}");
        }
    }
}
