//! `ragstone eval`: the quality of search, measured against relevance judgments.
//!
//! The documents go into a temporary store, and are searched by the functions that serve requests.

mod show;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use ragstone_core::collection::CollectionName;
use ragstone_core::models::Models;
use ragstone_core::records::Records;
use ragstone_core::search::SearchMode;
use ragstone_core::service::Service;
use ragstone_core::storage::Storage;
use ragstone_models::config::{LocalEntry, Quantize};
use ragstone_models::default_model;
use ragstone_search::conversations::{Conversations, DEFAULT_TTL};
use ragstone_search::evaluate::{
    self, Corpus, Half, ModeResult, Setting, evaluate_conversations, evaluate_mode, read_benchmark,
    read_corpus, read_dialogues,
};
use ragstone_search::{QueryVectors, StorageBackend};
use ragstone_store::{SqliteStore, StoreOptions};
use tempfile::TempDir;

use super::{block_on, note};
use crate::config::{self, ComputeArgs, CrossEncoderArgs, FileConfig, ServerArgs};
use crate::{startup, telemetry};

const COLLECTION: &str = "evaluation";

#[derive(Args)]
pub(super) struct EvalArgs {
    /// Folder with corpus.jsonl, queries.jsonl and qrels.tsv in the format of BEIR; with --conversations, with
    /// corpus.jsonl and dialogs.jsonl
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Measure questions in conversations instead of search modes
    #[arg(long, conflicts_with_all = ["runs", "cross_encoder", "cross_encoder_path"])]
    conversations: bool,
    /// Half of the dialogues to measure: `tuning` is the one that the method was tuned on
    #[arg(long, value_enum, default_value = "reported", requires = "conversations")]
    half: HalfChoice,
    /// Embedding model: Hugging Face id or directory [default: the built-in default model]
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,
    /// Weight quantization
    #[arg(long, value_enum, value_name = "KIND")]
    quantize: Option<QuantizeChoice>,
    #[command(flatten)]
    cross_encoder: CrossEncoderArgs,
    /// Write the rankings to this folder as TREC runs, one file per mode
    #[arg(long, value_name = "DIR")]
    runs: Option<PathBuf>,
    /// Print JSON even in a terminal; the output to a pipe is always JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum HalfChoice {
    Reported,
    Tuning,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum QuantizeChoice {
    Int8,
    None,
}

impl From<QuantizeChoice> for Quantize {
    fn from(choice: QuantizeChoice) -> Self {
        match choice {
            QuantizeChoice::Int8 => Self::Int8,
            QuantizeChoice::None => Self::Never,
        }
    }
}

impl From<HalfChoice> for Half {
    fn from(choice: HalfChoice) -> Self {
        match choice {
            HalfChoice::Reported => Self::Reported,
            HalfChoice::Tuning => Self::Tuning,
        }
    }
}

pub(super) fn run(args: &EvalArgs) -> anyhow::Result<()> {
    // A server logs every search; here only warnings and downloads matter.
    telemetry::start_logs_from("warn,ragstone::progress=info", telemetry::LogFormat::Text);
    if args.conversations {
        block_on(run_conversations(args))
    } else {
        block_on(run_modes(args))
    }
}

/// The system under test. Dropping it deletes the folder of the store.
struct Bench {
    backend: StorageBackend,
    store: Arc<SqliteStore>,
    collection: CollectionName,
    model: String,
    _folder: TempDir,
}

async fn run_modes(args: &EvalArgs) -> anyhow::Result<()> {
    let benchmark = read_benchmark(&args.folder)?;
    let documents = benchmark.corpus.documents.len();
    let bench = bench(args, benchmark.corpus).await?;
    let reranking = bench.backend.service().models.reranker().is_ok();
    let mut results: Vec<ModeResult> = Vec::new();
    for mode in SearchMode::ALL {
        for rerank in [false, true].into_iter().filter(|rerank| reranking || !rerank) {
            let setting = Setting { mode, rerank };
            note(format!("{} …", show::setting_name(setting)));
            let queries = &benchmark.queries;
            let result = evaluate_mode(&bench.backend, &bench.collection, queries, setting).await?;
            if let Some(folder) = &args.runs {
                show::write_run(folder, &result)?;
            }
            results.push(result);
        }
    }
    let facts = show::Facts {
        model: &bench.model,
        documents,
        asked: benchmark.queries.len(),
    };
    show::modes(&facts, &results, args.json)?;
    bench.close().await
}

async fn run_conversations(args: &EvalArgs) -> anyhow::Result<()> {
    let dialogues = read_dialogues(&args.folder)?;
    let corpus = read_corpus(&args.folder)?;
    let documents = corpus.documents.len();
    let half = Half::from(args.half);
    let dialogues = half.of(dialogues);
    let bench = bench(args, corpus).await?;
    let conversations = Conversations {
        records: Arc::clone(&bench.store) as Arc<dyn Records>,
        models: Arc::clone(&bench.backend.service().models),
        vectors: bench.backend.vectors().clone(),
        chat: None,
        ttl: DEFAULT_TTL,
    };
    note(format!("Running {} dialogues …", dialogues.len()));
    let groups =
        evaluate_conversations(&bench.backend, &conversations, &bench.collection, &dialogues).await?;
    let facts = show::Facts {
        model: &bench.model,
        documents,
        asked: dialogues.len(),
    };
    show::conversations(&facts, half, &groups, args.json)?;
    bench.close().await
}

async fn bench(args: &EvalArgs, corpus: Corpus) -> anyhow::Result<Bench> {
    let models = load_models(args).await?;
    let model = models
        .default_embedder()
        .map(|embedder| embedder.info().name.clone())
        .unwrap_or_default();
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let store = Arc::new(SqliteStore::open(folder.path(), StoreOptions::default())?);
    let service = Service {
        store: Arc::clone(&store) as Arc<dyn Storage>,
        models: Arc::new(models),
    };
    let collection = CollectionName::parse(COLLECTION)?;
    if corpus.empty > 0 {
        note(format!("Skipping {} documents without text.", corpus.empty));
    }
    note(format!("Embedding {} documents …", corpus.documents.len()));
    // Modes are timed, embedding included; dialogues ask for the same few thousand texts many times.
    let cache = if args.conversations { 1 << 30 } else { 0 };
    let backend = StorageBackend::new(service, QueryVectors::with_capacity(cache));
    evaluate::load(&backend, &collection, corpus).await?;
    Ok(Bench {
        backend,
        store,
        collection,
        model,
        _folder: folder,
    })
}

impl Bench {
    async fn close(self) -> anyhow::Result<()> {
        self.store.close().await.context("the store could not be closed")
    }
}

async fn load_models(args: &EvalArgs) -> anyhow::Result<Models> {
    let mut server = ServerArgs {
        no_embeddings: true,
        cross_encoder: args.cross_encoder.clone(),
        ..ServerArgs::default()
    };
    server.local.compute = args.compute.clone();
    let settings = config::build(&server, FileConfig::default(), &config::process_env)?;
    let (engine, hub) = (startup::engine(&settings), startup::hub()?);
    let path = args.model.as_deref().unwrap_or(default_model::ID);
    let entry = LocalEntry {
        id: path.to_owned(),
        path: path.to_owned(),
        version: None,
        normalize: None,
        quantize: args.quantize.map(Quantize::from),
    };
    let embedder = startup::open_local(&engine, &hub, &entry).await?;
    let reranker = match settings.cross_encoder.as_ref().filter(|_| !args.conversations) {
        Some(choice) => startup::load_reranker(&engine, &hub, Some(choice)).await?,
        None => None,
    };
    Ok(Models::new(vec![embedder], reranker))
}
