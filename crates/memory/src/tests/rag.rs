use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream, Message};
use ragstone_core::model::ModelError;
use serde_json::{Value, json};
use tokio::sync::{Barrier, Mutex};

use super::support::*;
use crate::chat::{ContextAwareModelAdapter, ContextOptions, HEADING};
use ragstone_search::gateway::NamedBackend;
use ragstone_search::{QueryVectors, StorageBackend};

use crate::{Buffer, Memory, MemoryEntry, MemoryKind, Rag, RagDefaults, Retrieval, RetrievedItem};
use ragstone_core::backend::BackendError;
use ragstone_core::models::Models;
use ragstone_core::service::Service;

const SOON: Duration = Duration::from_secs(30);

struct Filled {
    home: Home,
    embedder: Arc<StubEmbedder>,
    memory: Memory,
    buffer: Buffer,
}

async fn filled() -> Filled {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, quick());
    let reflection = MemoryEntry::Reflection {
        session_key: "s2".into(),
        content: "tea makes the user happy".into(),
    };
    let learning = MemoryEntry::Learning {
        trigger: "no tea".into(),
        fix: "boil water".into(),
        category: Some("kitchen".into()),
    };
    let entries = [
        (id("tea"), knowledge("tea is at four")),
        (id("fuel"), knowledge("diesel engines need glow plugs")),
        (id("o1"), observation("s1", "tea tea tea")),
        (id("o2"), observation("s2", "tea without milk")),
        (id("r2"), reflection),
        (id("l"), learning),
    ];
    let count = entries.len() as u64;
    for (id, entry) in entries {
        memory.save(id, entry).await.unwrap();
    }
    until_status(&memory, |status| status.embedded == count && status.queued == 0).await;
    Filled {
        home,
        embedder,
        memory,
        buffer,
    }
}

fn local(service: Service) -> NamedBackend {
    NamedBackend::local(StorageBackend::new(service, QueryVectors::default()))
}

impl Filled {
    fn rag(&self) -> Rag {
        Rag::new(
            self.memory.clone(),
            self.embedder.clone(),
            local(self.home.service()),
            QueryVectors::default(),
            RagDefaults {
                max_results: 10,
                ..RagDefaults::default()
            },
        )
    }

    /// Retrieval over a store that the test has a hand in.
    fn rag_over(&self, store: WatchedStore) -> Rag {
        let store = Arc::new(store);
        let memory = Memory::with_embedding(self.home.records(), store.clone(), self.buffer.clone());
        let service = Service {
            store,
            models: Arc::new(Models::default()),
        };
        Rag::new(
            memory,
            self.embedder.clone(),
            local(service),
            QueryVectors::default(),
            RagDefaults::default(),
        )
    }
}

fn ask(query: &str) -> Retrieval {
    Retrieval {
        query: query.into(),
        ..Retrieval::default()
    }
}

fn ids(found: &[RetrievedItem]) -> Vec<&str> {
    found.iter().map(|found| found.id.as_str()).collect()
}

#[tokio::test]
async fn req_emb_006_parallel_collection_search() {
    let filled = filled().await;
    // Each search waits for the three others: one after another they would wait for ever.
    let rag = filled.rag_over(WatchedStore {
        inner: filled.home.store.clone(),
        meeting: Some(Barrier::new(4)),
        broken: None,
        away: Default::default(),
    });
    let retrieval = ask("tea");
    let answer = tokio::time::timeout(SOON, rag.retrieve(&retrieval))
        .await
        .unwrap()
        .unwrap();
    assert!(answer.warnings.is_empty());
    let mut collections: Vec<&str> = answer.found.iter().map(|f| f.collection.as_str()).collect();
    collections.sort_unstable();
    collections.dedup();
    assert_eq!(collections.len(), 4, "{collections:?}");
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_006_single_collection_failure() {
    let filled = filled().await;
    let rag = filled.rag_over(WatchedStore {
        inner: filled.home.store.clone(),
        meeting: None,
        broken: Some(MemoryKind::Observation.vectors()),
        away: Default::default(),
    });
    let answer = rag.retrieve(&ask("tea")).await.unwrap();
    assert!(answer.found.iter().any(|f| f.collection == "knowledge"));
    assert!(answer.found.iter().all(|f| f.collection != "observation"));
    assert_eq!(
        answer.warnings,
        ["Collection 'observation' could not be searched: the store failed"]
    );
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_006_results_sorted_and_limited() {
    let filled = filled().await;
    let rag = filled.rag();
    let all = rag.retrieve(&ask("tea")).await.unwrap().found;
    assert_eq!(all.len(), 6);
    assert!(all.is_sorted_by(|a, b| a.distance <= b.distance), "{all:?}");
    let few = Retrieval {
        limit: Some(2),
        ..ask("tea")
    };
    assert_eq!(rag.retrieve(&few).await.unwrap().found, all[..2]);
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn content_is_resolved_from_the_source_stores() {
    let filled = filled().await;
    let retrieval = Retrieval {
        collections: Some(vec!["learning".into()]),
        ..ask("water")
    };
    let found = filled.rag().retrieve(&retrieval).await.unwrap().found;
    assert_eq!(found[0].content, "Trigger: no tea\nFix: boil water");
    assert_eq!(found[0].metadata["category"], "kitchen");
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn the_query_is_embedded_once_for_all_collections_and_requests() {
    let filled = filled().await;
    let before = filled.embedder.calls().len();
    let rag = filled.rag();
    for _ in 0..3 {
        rag.retrieve(&ask("tea at four")).await.unwrap();
    }
    assert_eq!(filled.embedder.calls()[before..], [["tea at four".to_owned()]]);
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_012_results_beyond_max_distance_are_excluded() {
    let filled = filled().await;
    let rag = filled.rag();
    let all = rag.retrieve(&ask("tea")).await.unwrap().found;
    let limit = all[2].distance;
    let near = Retrieval {
        max_distance: Some(limit + 1e-6),
        ..ask("tea")
    };
    let near = rag.retrieve(&near).await.unwrap().found;
    assert!(near.len() >= 3 && near.len() < all.len());
    assert!(near.iter().all(|f| f.distance <= limit + 1e-6));
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_012_with_max_distance_zero_all_results_are_returned() {
    let filled = filled().await;
    let retrieval = Retrieval {
        max_distance: Some(0.0),
        ..ask("diesel")
    };
    assert_eq!(filled.rag().retrieve(&retrieval).await.unwrap().found.len(), 6);
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_013_with_a_session_key_only_that_sessions_entries_are_returned() {
    let filled = filled().await;
    let of_session = Retrieval {
        session_key: Some("s1".into()),
        ..ask("tea")
    };
    let found = filled.rag().retrieve(&of_session).await.unwrap().found;
    let mut found = ids(&found);
    found.sort_unstable();
    assert_eq!(found, ["fuel", "l", "o1", "tea"]);
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_013_without_a_session_key_all_results_are_returned() {
    let filled = filled().await;
    let found = filled.rag().retrieve(&ask("tea")).await.unwrap().found;
    assert!(ids(&found).contains(&"o1") && ids(&found).contains(&"o2"));
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_vector_without_an_entry_is_removed_and_its_place_is_given_to_another() {
    let filled = filled().await;
    let rag = filled.rag();
    let only = Retrieval {
        collections: Some(vec!["observation".into()]),
        limit: Some(1),
        ..ask("tea tea tea")
    };
    assert_eq!(ids(&rag.retrieve(&only).await.unwrap().found), ["o1"]);
    // As a process would leave it that died between the two writes.
    let gone = ragstone_core::records::RecordChange::Delete {
        kind: "memory.observation".into(),
        key: "o1".into(),
        expect: ragstone_core::records::Expect::Anything,
    };
    filled.home.records().apply(vec![gone]).await.unwrap();
    assert_eq!(ids(&rag.retrieve(&only).await.unwrap().found), ["o2"]);
    assert_eq!(filled.home.vectors(MemoryKind::Observation).await, ["o2"]);
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_text_that_changed_is_not_found_by_the_vector_of_the_old_one() {
    let filled = filled().await;
    filled.buffer.stop(SOON).await;
    // Nothing is embedded any more: what is saved now stays due.
    filled
        .memory
        .save(id("o1"), observation("s2", "a secret of s2"))
        .await
        .unwrap();
    filled
        .memory
        .save(id("o2"), observation("s2", "tea without milk"))
        .await
        .unwrap();
    let of_first = Retrieval {
        session_key: Some("s1".into()),
        ..ask("tea tea tea")
    };
    let found = filled.rag().retrieve(&of_first).await.unwrap().found;
    assert!(!ids(&found).contains(&"o1"), "{found:?}");
    assert_eq!(
        filled.home.vectors(MemoryKind::Observation).await,
        ["o2"],
        "what is the same stays"
    );
    let status = filled.memory.status().await.unwrap();
    assert_eq!((status.embedded, status.queued), (5, 1));
}

#[tokio::test]
async fn a_vector_that_is_late_does_not_lead_to_the_text_of_another_session() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("o"), observation("s1", "tea")).await.unwrap();
    embedder.called(1).await;
    memory
        .save(id("o"), observation("s2", "a secret of s2"))
        .await
        .unwrap();
    embedder.let_through(1);
    until(|| async { !home.vectors(MemoryKind::Observation).await.is_empty() }).await;
    let asked = StubEmbedder::new();
    let rag = Rag::new(
        memory,
        asked,
        local(home.service()),
        QueryVectors::default(),
        RagDefaults::default(),
    );
    for session_key in [Some("s1".to_owned()), None] {
        let retrieval = Retrieval {
            session_key,
            ..ask("tea")
        };
        assert_eq!(rag.retrieve(&retrieval).await.unwrap().found, []);
    }
    buffer.stop(Duration::ZERO).await;
}

#[tokio::test]
async fn a_query_that_cannot_be_embedded_is_an_error() {
    let filled = filled().await;
    filled
        .embedder
        .reply([Reply::Fail(ModelError::Unavailable("down".into()))]);
    let retrieval = Retrieval {
        collections: Some(vec!["knowledge".into()]),
        ..ask("tea")
    };
    let error = filled.rag().retrieve(&retrieval).await.unwrap_err();
    assert!(
        matches!(error, BackendError::Model(ModelError::Unavailable(_))),
        "{error}"
    );
    for wrong in [
        vec![],
        vec!["a b".to_owned()],
        vec!["x".to_owned(), "x".to_owned()],
    ] {
        let retrieval = Retrieval {
            collections: Some(wrong),
            ..ask("tea")
        };
        let error = filled.rag().retrieve(&retrieval).await.unwrap_err();
        assert!(matches!(error, BackendError::Invalid(_)), "{error}");
    }
    filled.buffer.stop(SOON).await;
}

/// Answers with what it was asked.
#[derive(Default)]
struct Echo(Mutex<Vec<ChatRequest>>);

#[async_trait]
impl ChatModel for Echo {
    fn provider(&self) -> &str {
        "echo"
    }
    fn model(&self) -> &str {
        "echo-1"
    }
    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        self.0.lock().await.push(request);
        Ok(json!({}))
    }
    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        self.0.lock().await.push(request);
        Ok(Box::pin(futures::stream::empty()))
    }
}

fn question(text: &str) -> ChatRequest {
    ChatRequest::new(vec![
        Message::new("system", "Be brief."),
        Message::new("user", text),
    ])
}

#[tokio::test]
async fn req_emb_007_the_section_is_put_into_the_system_prompt_before_each_call() {
    let filled = filled().await;
    let echo = Arc::new(Echo::default());
    let adapter =
        ContextAwareModelAdapter::new(echo.clone(), Arc::new(filled.rag()), ContextOptions::default());
    adapter.complete(question("when is tea?")).await.unwrap();
    adapter.stream(question("when is tea?")).await.map(drop).unwrap();
    for request in echo.0.lock().await.iter() {
        let system = request.messages[0].text();
        assert!(
            system.starts_with(&format!("Be brief.\n\n{HEADING}\n")),
            "{system}"
        );
        assert!(
            system.contains("### [knowledge] tea\n```text\ntea is at four\n```"),
            "{system}"
        );
    }
    let prepared = adapter.prepare(question("when is tea?"), Some("s1")).await;
    assert!(prepared.sources.iter().all(|source| source.id != "o2"));
    filled.buffer.stop(SOON).await;
}

#[tokio::test]
async fn retrieval_that_fails_finds_nothing_or_is_slow_leaves_the_request_alone() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let (memory, buffer) = home.embedding(&embedder, quick());
    let (local, vectors) = (local(home.service()), QueryVectors::default());
    let rag = Rag::new(memory, embedder.clone(), local, vectors, RagDefaults::default());
    let options = ContextOptions {
        deadline: Duration::from_millis(20),
        ..ContextOptions::default()
    };
    let adapter = ContextAwareModelAdapter::new(Arc::new(Echo::default()), Arc::new(rag), options);
    let unchanged = async |adapter: &ContextAwareModelAdapter| {
        let prepared = adapter.prepare(question("tea"), None).await;
        prepared.request == question("tea") && prepared.sources.is_empty()
    };
    // The embedder hangs, then fails, then panics, then works over an empty memory.
    assert!(unchanged(&adapter).await);
    embedder.reply([Reply::Fail(ModelError::Failed("no".into())), Reply::Panic]);
    embedder.let_through(100);
    assert!(unchanged(&adapter).await);
    assert!(unchanged(&adapter).await);
    assert!(unchanged(&adapter).await);
    buffer.stop(SOON).await;
}
