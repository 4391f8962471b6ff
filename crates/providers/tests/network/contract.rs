//! The client of the embedding service contract checks what it gets.

use ragstone_core::Metadata;
use ragstone_core::call::CallError;
use ragstone_providers::embedding::{ContractAnswer, ContractChunk, ContractClient, ContractRequest};
use serde_json::{Value, json};

use crate::common::server::{Reply, TestServer};
use crate::common::{client, quick};

fn request(chunks: &[&str]) -> ContractRequest {
    ContractRequest {
        knowledgebase_id: "kb".into(),
        chunks: chunks
            .iter()
            .map(|id| ContractChunk {
                chunk_id: (*id).to_owned(),
                content: format!("content of {id}"),
                content_hash: format!("hash-{id}"),
                metadata: Metadata::new(),
            })
            .collect(),
        model_id: Some("m".into()),
    }
}

fn embedding(id: &str) -> Value {
    json!({"embedding_id": format!("e-{id}"), "chunk_id": id, "knowledgebase_id": "kb",
        "content_hash": format!("hash-{id}"), "model_id": "m", "model_version": "1",
        "vector_dimension": 2, "vector": [1.0, 2.0]})
}

async fn ask(answer: Value, chunks: &[&str]) -> (Result<ContractAnswer, CallError>, usize) {
    let server = TestServer::start(move |_, _| Reply::json(answer.clone())).await;
    let client = ContractClient::new(client(&server.url, quick()));
    let outcome = client.embed_chunks(&request(chunks)).await;
    (outcome, server.seen().len())
}

#[tokio::test]
async fn returned_list_includes_one_embedding_per_non_skipped_input_chunk() {
    let answer = json!({"embeddings": [embedding("a"), embedding("c")],
        "skipped": [{"chunk_id": "b", "embedding_id": "e-old"}]});
    let (outcome, _) = ask(answer, &["a", "b", "c"]).await;
    let answer = outcome.unwrap();
    assert_eq!((answer.embeddings.len(), answer.skipped.len()), (2, 1));
}

/// The contract knows no list of what was skipped; a service without one leaves such chunks out.
#[tokio::test]
async fn what_a_service_without_such_a_list_leaves_out_is_skipped() {
    let (outcome, _) = ask(json!({"embeddings": [embedding("a")]}), &["a", "b"]).await;
    let answer = outcome.unwrap();
    assert_eq!(
        (answer.embeddings.len(), answer.skipped),
        (1, vec!["b".to_owned()])
    );
}

#[tokio::test]
async fn empty_chunk_list_returns_an_empty_embedding_list() {
    let (outcome, calls) = ask(json!({}), &[]).await;
    assert!(outcome.unwrap().embeddings.is_empty());
    assert_eq!(calls, 0);
}

#[tokio::test]
async fn an_answer_that_breaks_the_contract_is_refused() {
    let changed = |field: &str, value: Value| {
        let mut changed = embedding("a");
        changed[field] = value;
        json!({"embeddings": [changed]})
    };
    for (answer, word) in [
        (json!({"embeddings": [], "skipped": []}), "missing"),
        (json!({"embeddings": [embedding("a"), embedding("a")]}), "twice"),
        (
            json!({"embeddings": [embedding("a"), embedding("z")]}),
            "not sent",
        ),
        (changed("knowledgebase_id", json!("other")), "knowledgebase_id"),
        (changed("content_hash", json!("other")), "content_hash"),
        (changed("model_id", json!("other")), "model_id"),
        (changed("model_version", json!("")), "model_version"),
        (changed("vector_dimension", json!(3)), "2 numbers where 3"),
        (changed("vector", json!([1e300, 1.0])), "out of range"),
        (
            json!({"embeddings": [embedding("a")], "skipped": [{"chunk_id": "a", "embedding_id": "e"}]}),
            "twice",
        ),
    ] {
        let (outcome, _) = ask(answer, &["a"]).await;
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(word), "{word}: {error}");
    }
}
