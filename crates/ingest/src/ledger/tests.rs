//! The contract from both sides.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ragstone_core::model::{EmbedInput, Embedder, ModelError, ModelIdentity, ModelInfo, RemoteFault, Role};
use ragstone_core::records::Records as _;
use ragstone_providers::embedding::ContractClient;
use ragstone_providers::http::{ClientSettings, ServiceClient};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;
use ragstone_core::models::Models;
use ragstone_search::testing::{Parts, WordEmbedder, parts};

fn chunk(id: &str, content: &str, hash: &str) -> ChunkRequest {
    ChunkRequest {
        chunk_id: Some(id.into()),
        content: Some(content.into()),
        content_hash: Some(hash.into()),
    }
}

fn request(base: &str, chunks: Vec<ChunkRequest>) -> EmbeddingRequest {
    EmbeddingRequest {
        knowledgebase_id: Some(base.into()),
        chunks,
        ..EmbeddingRequest::default()
    }
}

fn ledger(parts: &Parts) -> Ledger {
    Ledger::new(parts.store.clone())
}

#[tokio::test]
async fn a_request_whose_answer_was_lost_can_be_repeated() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let (models, ledger) = (&parts.service.models, ledger(&parts));
    let chunks = || {
        vec![
            chunk("a", "one", "h1"),
            chunk("b", "two", "h2"),
            chunk("c", "one", "h1"),
        ]
    };
    let repeatable = || EmbeddingRequest {
        include_vectors: true,
        ..request("kb", chunks())
    };
    let first = embed_chunks(models, &ledger, repeatable()).await.unwrap();
    assert_eq!((first.embeddings.len(), first.skipped.len()), (2, 1));
    assert_eq!(
        first.skipped[0].vector.as_ref(),
        Some(&first.embeddings[0].vector),
        "also of content that is twice in the request"
    );
    let second = embed_chunks(models, &ledger, repeatable()).await.unwrap();
    assert_eq!((second.embeddings.len(), second.skipped.len()), (0, 3));
    for (skipped, embedded) in second.skipped.iter().zip(&first.embeddings) {
        assert_eq!(skipped.embedding_id, embedded.embedding_id);
        assert_eq!(skipped.vector.as_ref(), Some(&embedded.vector));
    }
    let plain = embed_chunks(models, &ledger, request("kb", chunks()))
        .await
        .unwrap();
    assert!(plain.skipped.iter().all(|skipped| skipped.vector.is_none()));
}

#[tokio::test]
async fn the_entries_of_a_knowledge_base_can_be_deleted() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let (models, ledger) = (&parts.service.models, ledger(&parts));
    let chunks = |count: usize| {
        let chunks = (0..count).map(|n| chunk(&n.to_string(), &format!("text {n}"), &format!("h{n}")));
        chunks.collect::<Vec<_>>()
    };
    for (base, count) in [("kb", PRUNE_BATCH + 1), ("other", 3)] {
        embed_chunks(models, &ledger, request(base, chunks(count)))
            .await
            .unwrap();
    }
    assert_eq!(ledger.forget_knowledge_base("kb").await.unwrap(), 1001);
    assert_eq!(ledger.forget_knowledge_base("kb").await.unwrap(), 0);
    assert_eq!(parts.store.counts(KIND).await.unwrap().total, 3);
    let again = embed_chunks(models, &ledger, request("kb", chunks(1)))
        .await
        .unwrap();
    assert_eq!(again.embeddings.len(), 1, "it is embedded anew");
}

#[tokio::test]
async fn concurrent_requests_for_the_same_content_embed_it_for_one_of_them() {
    let model = WordEmbedder::new("words");
    let parts = parts(Models::new(vec![model.clone()], None));
    let (models, ledger) = (&parts.service.models, ledger(&parts));
    let asks = (0..32).map(|n| {
        let chunks = (0..8)
            .map(|c| chunk(&format!("{n}-{c}"), &format!("text {c}"), &format!("h{c}")))
            .collect();
        embed_chunks(models, &ledger, request("kb", chunks))
    });
    let answers = futures::future::try_join_all(asks).await.unwrap();
    assert_eq!(model.calls(), 1, "the others wait for the first");
    for hash in 0..8 {
        let embedded: Vec<&EmbeddedChunk> = answers
            .iter()
            .flat_map(|answer| &answer.embeddings)
            .filter(|chunk| chunk.content_hash == format!("h{hash}"))
            .collect();
        assert_eq!(embedded.len(), 1);
        let skipped: Vec<&SkippedChunk> = answers
            .iter()
            .flat_map(|answer| &answer.skipped)
            .filter(|skipped| skipped.chunk_id.ends_with(&format!("-{hash}")))
            .collect();
        assert_eq!(skipped.len(), 31);
        assert!(
            skipped
                .iter()
                .all(|skipped| skipped.embedding_id == embedded[0].embedding_id)
        );
    }
}

#[tokio::test]
async fn a_model_without_a_version_is_refused() {
    let nameless = WordEmbedder::with_version("words", "");
    let parts = parts(Models::new(vec![nameless], None));
    let asked = embed_chunks(
        &parts.service.models,
        &ledger(&parts),
        request("kb", vec![chunk("c", "t", "h")]),
    )
    .await;
    assert!(
        asked
            .unwrap_err()
            .to_string()
            .starts_with("model version is required")
    );
}

/// A service that speaks the contract, made of our own side of it.
struct OtherService {
    parts: Parts,
    /// Every chunk that was sent, by knowledge base and hash.
    sent: Mutex<Vec<(String, String)>>,
    requests: AtomicUsize,
    /// How many answers get lost on their way.
    lose: AtomicUsize,
}

impl OtherService {
    async fn start(version: &str) -> (Arc<Self>, String) {
        let model = WordEmbedder::with_version("theirs", version);
        let service = Arc::new(Self {
            parts: parts(Models::new(vec![model], None)),
            sent: Mutex::default(),
            requests: AtomicUsize::new(0),
            lose: AtomicUsize::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serving = Arc::clone(&service);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let serving = Arc::clone(&serving);
                tokio::spawn(async move { serving.answer(stream).await });
            }
        });
        (service, url)
    }

    async fn answer(&self, mut stream: TcpStream) {
        let mut bytes = Vec::new();
        let body = loop {
            let mut buffer = [0; 4096];
            let count = stream.read(&mut buffer).await.unwrap();
            bytes.extend_from_slice(&buffer[..count]);
            let text = String::from_utf8_lossy(&bytes).to_lowercase();
            let Some(end) = text.find("\r\n\r\n") else {
                continue;
            };
            let length: usize = text
                .split("content-length: ")
                .nth(1)
                .unwrap()
                .split("\r\n")
                .next()
                .unwrap()
                .parse()
                .unwrap();
            if bytes.len() >= end + 4 + length {
                break serde_json::from_slice::<Value>(&bytes[end + 4..]).unwrap();
            }
        };
        self.requests.fetch_add(1, Ordering::Relaxed);
        let base = body["knowledgebase_id"].as_str().unwrap();
        let chunks: Vec<ChunkRequest> = body["chunks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|c| {
                chunk(
                    c["chunk_id"].as_str().unwrap(),
                    c["content"].as_str().unwrap(),
                    c["content_hash"].as_str().unwrap(),
                )
            })
            .collect();
        for chunk in &chunks {
            let sent = (base.to_owned(), chunk.content_hash.clone().unwrap());
            self.sent.lock().unwrap().push(sent);
        }
        let embedded = embed_chunks(
            &self.parts.service.models,
            &ledger(&self.parts),
            request(base, chunks),
        )
        .await
        .unwrap();
        let embeddings: Vec<Value> = embedded
            .embeddings
            .iter()
            .map(|e| {
                json!({"embedding_id": e.embedding_id, "chunk_id": e.chunk_id, "knowledgebase_id": e.knowledgebase_id,
                       "content_hash": e.content_hash, "model_id": e.model_id, "model_version": e.model_version,
                       "vector_dimension": e.vector.len(), "vector": e.vector})
            })
            .collect();
        let skipped: Vec<Value> = embedded
            .skipped
            .iter()
            .map(|s| json!({"chunk_id": s.chunk_id, "embedding_id": s.embedding_id}))
            .collect();
        let answer = json!({"embeddings": embeddings, "skipped": skipped}).to_string();
        let status = if self.lose.swap(0, Ordering::Relaxed) > 0 {
            "400 Lost"
        } else {
            "200 OK"
        };
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.len()
        );
        let _ = stream.write_all(format!("{head}{answer}").as_bytes()).await;
    }

    fn sent(&self) -> Vec<(String, String)> {
        std::mem::take(&mut self.sent.lock().unwrap())
    }
}

fn embedder(url: &str, own: &Parts, version: &str) -> ContractEmbedder {
    let client = ServiceClient::new(ClientSettings::new("theirs", url, "url").unwrap()).unwrap();
    let identity = ModelIdentity {
        id: "theirs".into(),
        version: version.into(),
        dimensions: 64,
    };
    let info = ModelInfo {
        identity,
        name: "theirs".into(),
        max_tokens: None,
    };
    let settings = ContractSettings {
        knowledgebase_id: "ours".into(),
        info,
    };
    ContractEmbedder::new(ContractClient::new(client), ledger(own), settings)
}

async fn embed(embedder: &ContractEmbedder, texts: &[&str]) -> Vec<Vec<f32>> {
    let inputs = texts
        .iter()
        .map(|text| EmbedInput::Text((*text).to_owned()))
        .collect();
    let embeddings = embedder.embed(inputs, Role::Passage).await.unwrap();
    embeddings.into_iter().map(|embedding| embedding.vector).collect()
}

#[tokio::test]
async fn known_chunks_are_never_sent() {
    let (service, url) = OtherService::start("v1").await;
    let own = parts(Models::default());
    let embedder = embedder(&url, &own, "v1");
    let first = embed(&embedder, &["one", "two", "one"]).await;
    assert_eq!(first[0], first[2]);
    assert_ne!(first[0], first[1]);
    assert_eq!(service.sent().len(), 2);
    assert_eq!(
        embed(&embedder, &["two", "one"]).await,
        [first[1].clone(), first[0].clone()]
    );
    assert_eq!(service.sent(), []);
    embed(&embedder, &["two", "three"]).await;
    assert_eq!(service.sent().len(), 1);
    let many: Vec<String> = (0..300).map(|n| format!("text {n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert_eq!(embed(&embedder, &many).await.len(), 300);
    assert_eq!(service.sent().len(), 300);
}

#[tokio::test]
async fn an_answer_that_was_lost_is_asked_for_again() {
    let (service, url) = OtherService::start("v1").await;
    let own = parts(Models::default());
    let embedder = embedder(&url, &own, "v1");
    service.lose.store(1, Ordering::Relaxed);
    assert!(
        embedder
            .embed(vec![EmbedInput::Text("one".into())], Role::Passage)
            .await
            .is_err()
    );
    // The service has it now and would skip it under the same knowledge base for ever.
    let vectors = embed(&embedder, &["one", "two"]).await;
    assert_eq!(vectors.len(), 2);
    assert_eq!(embed(&embedder, &["one"]).await[0], vectors[0]);
}

#[tokio::test]
async fn a_service_with_another_version_is_refused() {
    let (_service, url) = OtherService::start("v2").await;
    let own = parts(Models::default());
    let asked = embedder(&url, &own, "v1")
        .embed(vec![EmbedInput::Text("one".into())], Role::Query)
        .await;
    let refused = asked.unwrap_err().to_string();
    assert!(
        refused.contains("version 'v2'") && refused.contains("'v1'"),
        "{refused}"
    );
}

#[tokio::test]
async fn another_version_is_a_fault_of_the_provider() {
    let (_service, url) = OtherService::start("v2").await;
    let own = parts(Models::default());
    let asked = embedder(&url, &own, "v1")
        .embed(vec![EmbedInput::Text("one".into())], Role::Passage)
        .await;
    let Err(ModelError::Remote(failure)) = asked else {
        panic!("a fault of the provider is expected: {asked:?}")
    };
    assert_eq!(
        (failure.provider.as_str(), failure.fault),
        ("theirs", RemoteFault::OtherModel)
    );
}

#[tokio::test]
async fn clients_and_our_own_content_at_a_service_are_apart() {
    let (_service, url) = OtherService::start("v1").await;
    let mut own = parts(Models::default());
    let far = Arc::new(embedder(&url, &own, "v1"));
    own.service.models = Arc::new(Models::new(vec![far.clone()], None));
    let ledger = ledger(&own);
    // The hash is right, and yet this is new to who sends it.
    let hash = crate::chunk::content_hash("one");
    let new = request("ours", vec![chunk("c1", "one", &hash)]);
    let answer = embed_chunks(&own.service.models, &ledger, new).await.unwrap();
    assert_eq!((answer.embeddings.len(), answer.skipped.len()), (1, 0));
    // The hash is that of another text, which keeps a vector of its own.
    let hash = crate::chunk::content_hash("two");
    let wrong = request("ours", vec![chunk("c2", "not that at all", &hash)]);
    let answer = embed_chunks(&own.service.models, &ledger, wrong).await.unwrap();
    assert_eq!((answer.embeddings.len(), answer.skipped.len()), (1, 0));
    let vectors = embed(&far, &["one", "two"]).await;
    assert_ne!(vectors[1], answer.embeddings[0].vector);
    assert_ne!(vectors[1], vectors[0]);
}

#[tokio::test]
async fn a_request_to_a_service_is_bounded_in_bytes() {
    let (service, url) = OtherService::start("v1").await;
    let own = parts(Models::default());
    let texts: Vec<String> = (0..6).map(|n| n.to_string().repeat(400_000)).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_eq!(embed(&embedder(&url, &own, "v1"), &texts).await.len(), 6);
    assert_eq!(service.requests.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn nothing_is_kept_of_questions() {
    let (service, url) = OtherService::start("v1").await;
    let own = parts(Models::default());
    let embedder = embedder(&url, &own, "v1");
    let ask = async |text: &str| {
        let inputs = vec![EmbedInput::Text(text.to_owned())];
        let embeddings = embedder.embed(inputs, Role::Query).await.unwrap();
        embeddings[0].vector.clone()
    };
    let first = ask("when does the dome open?").await;
    assert_eq!(ask("when does the dome open?").await, first);
    assert_eq!(service.sent().len(), 2);
    assert_eq!(own.store.counts(KIND).await.unwrap().total, 0);
    // A passage of the same text is embedded, and kept, and then answers the question too.
    assert_eq!(embed(&embedder, &["when does the dome open?"]).await[0], first);
    assert_eq!(service.sent().len(), 1);
    assert_eq!(ask("when does the dome open?").await, first);
    assert_eq!(service.sent(), []);
}

#[tokio::test]
async fn names_without_measure_are_refused() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let ledger = ledger(&parts);
    let long = "n".repeat(513);
    let ask = async |request| {
        let asked = embed_chunks(&parts.service.models, &ledger, request).await;
        asked.map_or_else(|error| error.to_string(), |_| "embedded".to_owned())
    };
    let good = || chunk("c", "text", "h");
    assert_eq!(
        ask(request(&long, vec![good()])).await,
        "knowledgebase_id has 513 bytes; it may have 512"
    );
    assert_eq!(
        ask(request("kb", vec![good(), chunk(&long, "text", "h")])).await,
        "chunk_id has 513 bytes; it may have 512 (chunk at index 1)"
    );
    assert_eq!(
        ask(request("kb", vec![chunk("c", "text", &long)])).await,
        "content_hash has 513 bytes; it may have 512 (chunk at index 0)"
    );
    let longest = "n".repeat(512);
    let just_so = request(&longest, vec![chunk(&longest, "text", &longest)]);
    assert_eq!(ask(just_so).await, "embedded");
}

fn model(id: &str, version: &str) -> ModelIdentity {
    ModelIdentity {
        id: id.into(),
        version: version.into(),
        dimensions: 2,
    }
}

#[test]
fn entries_survive_their_encoding_and_damage_is_noticed() {
    let entry = LedgerEntry {
        embedding_id: "emb_ä".into(),
        vector: vec![1.5, -0.25],
    };
    let bytes = encode(&entry);
    assert_eq!(decode(&bytes), Some(entry));
    for cut in 0..bytes.len() {
        assert_ne!(decode(&bytes[..cut]).map(|e| e.vector.len()), Some(2), "{cut}");
    }
}

#[test]
fn every_part_of_the_identity_makes_another_key() {
    let keys = [
        LedgerKey::new(LedgerScope::KnowledgeBase("k"), "h", &model("m", "1")),
        LedgerKey::new(LedgerScope::KnowledgeBase("k2"), "h", &model("m", "1")),
        LedgerKey::new(LedgerScope::KnowledgeBase("k"), "h2", &model("m", "1")),
        LedgerKey::new(LedgerScope::KnowledgeBase("k"), "h", &model("m2", "1")),
        LedgerKey::new(LedgerScope::KnowledgeBase("k"), "h", &model("m", "2")),
        LedgerKey::new(LedgerScope::KnowledgeBase("kh"), "", &model("m", "1")),
        LedgerKey::new(LedgerScope::Ingestion, "h", &model("m", "1")),
        LedgerKey::new(LedgerScope::Service("k"), "h", &model("m", "1")),
    ];
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
}
