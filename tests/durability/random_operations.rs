//! Random operations and restarts, compared with a reference implementation at every step.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde_json::{Value, json};

use super::model::{ModelCollection, ModelDocument, ModelStore, assert_indexes_agree, stored};
use super::rounds;
use crate::support::{Server, Setup};

const NAMES: [&str; 3] = ["alpha", "beta", "gamma"];

#[derive(Debug, Clone)]
enum Operation {
    Create {
        name: usize,
        metadata: u8,
    },
    DropCollection {
        name: usize,
    },
    Add {
        name: usize,
        documents: Vec<ModelDocument>,
    },
    /// The second document is bad, so none may be stored.
    AddWithOneBad {
        name: usize,
        document: ModelDocument,
    },
    DeleteIds {
        name: usize,
        ids: Vec<u8>,
    },
    DeleteGroup {
        name: usize,
        group: u8,
    },
    Empty {
        name: usize,
    },
    MergeMetadata {
        name: usize,
        key: u8,
        value: u8,
    },
    ReplaceMetadata {
        name: usize,
        value: u8,
    },
    /// Restarts the server.
    Restart,
    /// Kills and restarts the server.
    Kill,
}

fn document() -> impl Strategy<Value = ModelDocument> {
    (0..24u8, 0..1000u16, 0..4u8, any::<[i8; 3]>()).prop_map(|(id, number, group, vector)| ModelDocument {
        id: format!("d{id}"),
        text: format!("word n{number}"),
        metadata: if group == 3 {
            json!({})
        } else {
            json!({"group": group, "number": number, "tags": [group, "t"]})
        },
        vector: [
            f32::from(vector[0]),
            f32::from(vector[1]),
            1.0 + f32::from(vector[2]).abs(),
        ],
    })
}

fn documents() -> impl Strategy<Value = Vec<ModelDocument>> {
    prop::collection::vec(document(), 1..8).prop_map(|mut documents| {
        let mut seen = std::collections::HashSet::new();
        documents.retain(|document| seen.insert(document.id.clone()));
        documents
    })
}

fn operation() -> impl Strategy<Value = Operation> {
    let name = || 0..NAMES.len();
    prop_oneof![
        4 => (name(), any::<u8>()).prop_map(|(name, metadata)| Operation::Create { name, metadata }),
        1 => name().prop_map(|name| Operation::DropCollection { name }),
        10 => (name(), documents()).prop_map(|(name, documents)| Operation::Add { name, documents }),
        1 => (name(), document()).prop_map(|(name, document)| Operation::AddWithOneBad { name, document }),
        3 => (name(), prop::collection::vec(0..24u8, 0..6)).prop_map(|(name, ids)| Operation::DeleteIds { name, ids }),
        2 => (name(), 0..4u8).prop_map(|(name, group)| Operation::DeleteGroup { name, group }),
        1 => name().prop_map(|name| Operation::Empty { name }),
        1 => (name(), 0..3u8, any::<u8>()).prop_map(|(name, key, value)| Operation::MergeMetadata { name, key, value }),
        1 => (name(), any::<u8>()).prop_map(|(name, value)| Operation::ReplaceMetadata { name, value }),
        1 => Just(Operation::Restart),
        1 => Just(Operation::Kill),
    ]
}

#[test]
fn the_store_answers_like_a_simple_one() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let config = Config {
        cases: rounds(24, 3),
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    // A fixed seed gives the same cases in every run.
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let operations = prop::collection::vec(operation(), 10..40);
    let outcome = runner.run(&operations, |operations| {
        runtime.block_on(play(&operations));
        Ok(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

async fn play(operations: &[Operation]) {
    let mut server = Setup::without_models().start().await;
    let mut model = ModelStore::new();
    for operation in operations {
        server = apply(server, &mut model, operation).await;
    }
    server = server.restarted().await;
    assert_same(&server, &model).await;
}

async fn apply(server: Server, model: &mut ModelStore, operation: &Operation) -> Server {
    let path = |name: usize, rest: &str| format!("/collections/{}{rest}", NAMES[name]);
    match operation {
        Operation::Restart => {
            let server = server.restarted().await;
            assert_same(&server, model).await;
            return server;
        }
        Operation::Kill => {
            let server = server.kill().start().await;
            assert_same(&server, model).await;
            return server;
        }
        Operation::Create { name, metadata } => {
            let metadata = json!({"made": metadata});
            let answer = server
                .post(
                    "/collections",
                    json!({"name": NAMES[*name], "metadata": metadata}),
                )
                .await;
            if model.contains_key(NAMES[*name]) {
                answer.refused(409);
            } else {
                answer.ok();
                model.insert(NAMES[*name].to_owned(), ModelCollection::new(metadata));
            }
        }
        Operation::DropCollection { name } => {
            let answer = server.delete(&path(*name, "")).await;
            match model.remove(NAMES[*name]) {
                Some(_) => drop(answer.ok()),
                None => drop(answer.refused(404)),
            }
        }
        Operation::Add { name, documents } => {
            let body = json!({"documents": documents.iter().map(ModelDocument::to_add).collect::<Vec<_>>()});
            let answer = server.post(&path(*name, "/documents"), body).await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => {
                    assert_eq!(answer.ok()["count"], documents.len());
                    documents
                        .iter()
                        .for_each(|document| collection.upsert(document.clone()));
                }
                None => drop(answer.refused(404)),
            }
        }
        Operation::AddWithOneBad { name, document } => {
            let body = json!({"documents": [document.to_add(), {"id": "bad"}]});
            server.post(&path(*name, "/documents"), body).await.refused(400);
        }
        Operation::DeleteIds { name, ids } => {
            let ids: Vec<String> = ids.iter().map(|id| format!("d{id}")).collect();
            let answer = server.delete_with(&path(*name, "/documents"), json!(ids)).await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => {
                    let count = collection.delete(|document| ids.contains(&document.id));
                    assert_eq!(answer.ok()["count"], count);
                }
                None => drop(answer.refused(404)),
            }
        }
        Operation::DeleteGroup { name, group } => {
            let answer = server
                .delete_with(&path(*name, "/documents"), json!({"where": {"group": group}}))
                .await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => {
                    let count = collection.delete(|document| document.metadata["group"] == *group);
                    assert_eq!(answer.ok()["count"], count);
                }
                None => drop(answer.refused(404)),
            }
        }
        Operation::Empty { name } => {
            let answer = server.delete(&path(*name, "/documents/all")).await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => assert_eq!(answer.ok()["count_deleted"], collection.delete(|_| true)),
                None => drop(answer.refused(404)),
            }
        }
        Operation::MergeMetadata { name, key, value } => {
            let update = json!({format!("k{key}"): value});
            let answer = server
                .put(&path(*name, "/metadata?merge=true"), json!({"metadata": update}))
                .await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => {
                    collection.metadata[format!("k{key}")] = json!(value);
                    assert_eq!(answer.ok()["metadata"], collection.metadata);
                }
                None => drop(answer.refused(404)),
            }
        }
        Operation::ReplaceMetadata { name, value } => {
            let answer = server
                .put(&path(*name, "/metadata"), json!({"metadata": {"only": value}}))
                .await;
            match model.get_mut(NAMES[*name]) {
                Some(collection) => {
                    collection.metadata = json!({"only": value});
                    assert_eq!(answer.ok()["metadata"], collection.metadata);
                }
                None => drop(answer.refused(404)),
            }
        }
    }
    assert_listing(&server, model).await;
    server
}

async fn assert_listing(server: &Server, model: &ModelStore) {
    let expected: Vec<Value> = model
        .iter()
        .map(|(name, collection)| json!({"name": name, "count": collection.documents.len(), "metadata": collection.metadata}))
        .collect();
    assert_eq!(
        server.get("/collections").await.ok()["collections"],
        json!(expected)
    );
}

/// Compares the results of all read operations.
async fn assert_same(server: &Server, model: &ModelStore) {
    assert_listing(server, model).await;
    for (name, collection) in model {
        let documents = stored(server, name).await;
        assert_eq!(documents, collection.as_json(), "{name}");
        assert_indexes_agree(server, name, &documents).await;
        for document in &collection.documents {
            // Its vector finds it, or another document with a vector of the same direction.
            let body = json!({"query_embedding": document.vector, "top_k": 1, "where": {"number": document.metadata["number"]}});
            if document.metadata["number"].is_null() {
                continue;
            }
            let answer = server
                .post(&format!("/collections/{name}/query"), body)
                .await
                .ok();
            assert!(
                answer["results"][0]["distance"]
                    .as_f64()
                    .is_some_and(|distance| distance < 1e-5),
                "{answer}"
            );
        }
    }
}
