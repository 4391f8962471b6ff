//! What only the Postgres store promises.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use ragstone_core::siblings::{Expand, SIBLING_BYTES};
use ragstone_core::storage::{SiblingsRequest, Storage, StorageError, StorageQuery};
use ragstone_core::{CollectionName, Filter, Metadata};
use ragstone_store::{
    Error, PostgresOptions, PostgresStore, PostgresThresholds, PostgresUrl, inspect_postgres,
};
use serde_json::json;

use crate::common::*;

/// Small enough for a test to reach.
const THRESHOLDS: PostgresThresholds = PostgresThresholds {
    index_from: 1000,
    exact_up_to: 100,
    settle: Duration::from_millis(100),
};

async fn open_eager(url: &str) -> PostgresStore {
    let options = PostgresOptions {
        readers: 4,
        writers: 2,
        thresholds: THRESHOLDS,
    };
    PostgresStore::open(&PostgresUrl::parse(url).unwrap(), options)
        .await
        .unwrap()
}

/// The only number that a statement answers.
async fn number(url: &str, sql: &str) -> i64 {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.query_one(sql, &[]).await.unwrap().get(0)
}

async fn execute(url: &str, sql: &str) {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(sql).await.unwrap();
}

/// Waits for something that certainly happens.
async fn until_number(url: &str, sql: &str, expected: i64) {
    for _ in 0..1200 {
        if number(url, sql).await == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{sql} is not {expected}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_that_start_at_once_one_makes_the_tables() {
    let url = new_database().await;
    let stores = join_all((0..6).map(|_| open_postgres(&url))).await;
    assert_eq!(number(&url, "SELECT count(*) FROM ragstone.migrations").await, 1);
    // What one has written, every other sees at once.
    let docs = name("docs");
    stores[0].create_collection(&docs, Metadata::new()).await.unwrap();
    for (number, store) in stores.iter().enumerate() {
        let document = stored(&format!("d{number}"), "text", json!({}), &[1.0, 0.0]);
        store.upsert(&docs, batch(vec![document])).await.unwrap();
        for other in &stores {
            assert_eq!(other.collection(&docs).await.unwrap().count, number as u64 + 1);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_of_a_newer_program_is_left_alone() {
    let url = new_database().await;
    open_postgres(&url).await.close();
    execute(&url, "INSERT INTO ragstone.migrations (version) VALUES (99)").await;
    let parsed = PostgresUrl::parse(&url).unwrap();
    let refused = PostgresStore::open(&parsed, PostgresOptions::default()).await;
    assert!(matches!(refused, Err(Error::NewerSchema { found: 99, .. })));
    assert_eq!(inspect_postgres(&parsed).await.unwrap().schema, 99);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_reached_is_said_without_the_password() {
    let url = new_database().await;
    let wrong = url.replace("postgres:postgres@", "postgres:hunter2@");
    let error = PostgresStore::open(&PostgresUrl::parse(&wrong).unwrap(), PostgresOptions::default())
        .await
        .err()
        .unwrap();
    let message = format!("{error} {error:?}");
    assert!(message.contains("password authentication failed"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");

    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = nobody.local_addr().unwrap().port();
    drop(nobody);
    let away = format!("postgres://ann:hunter2@127.0.0.1:{port}/rag");
    let error = PostgresStore::open(&PostgresUrl::parse(&away).unwrap(), PostgresOptions::default())
        .await
        .err()
        .unwrap();
    let message = format!("{error} {error:?}");
    assert!(message.contains("cannot be reached"), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
    assert!(matches!(
        StorageError::from(error),
        StorageError::Unavailable { .. }
    ));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_break_are_replaced() {
    let url = new_database().await;
    let store = open_postgres(&url).await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    for _ in 0..3 {
        execute(
            &url,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
             WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        .await;
        // At most the calls that had a broken connection already are told to come back.
        let mut answers = 0;
        while store.collection(&docs).await.is_err() {
            answers += 1;
            assert!(answers < 20, "the store does not recover");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn emptying_lets_go_of_the_table() {
    let url = new_database().await;
    let store = open_postgres(&url).await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    for _ in 0..3 {
        let documents = (0..5).map(|n| stored(&format!("d{n}"), "text", json!({}), &[1.0, n as f32]));
        store.upsert(&docs, batch(documents.collect())).await.unwrap();
        store.empty(&docs).await.unwrap();
    }
    let tables = "SELECT count(*) FROM pg_class
                  WHERE relnamespace = 'ragstone'::regnamespace AND relname LIKE 'documents\\_%' AND relkind = 'r'";
    until_number(&url, tables, 0).await;
    until_number(&url, "SELECT count(*) FROM ragstone.discarded", 0).await;
}

/// With one connection, the first search prepares the statements of all later ones.
async fn open_with_one_reader(url: &str) -> PostgresStore {
    let options = PostgresOptions {
        readers: 1,
        writers: 1,
        thresholds: THRESHOLDS,
    };
    let url = PostgresUrl::parse(url).unwrap();
    PostgresStore::open(&url, options).await.unwrap()
}

/// Round trips of `Storage::collection` and one search. Preparing a statement costs one more, and
/// maintenance may build an index at any time, after which searches use another statement; so the
/// fewest of a few attempts count.
async fn round_trips(store: &PostgresStore, docs: &CollectionName, query: &StorageQuery) -> u64 {
    let mut fewest = u64::MAX;
    for _ in 0..4 {
        let before = store.round_trips();
        store.collection(docs).await.unwrap();
        store.search(docs, query.clone()).await.unwrap();
        fewest = fewest.min(store.round_trips() - before);
    }
    fewest
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_search_is_one_round_trip() {
    let url = new_database().await;
    let store = open_with_one_reader(&url).await;
    let mut noise = Noise(5);
    for (collection, count) in [("small", 20), ("large", 2500)] {
        let docs = name(collection);
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        let documents = (0..count).map(|n| {
            let fields = json!({"n": n, "half": n % 2, "part": format!("p{}", n / 10)});
            stored(
                &format!("d{n}"),
                &format!("text number{n}"),
                fields,
                &noise.vector(8),
            )
        });
        store.upsert(&docs, batch(documents.collect())).await.unwrap();
        let vector = Some(noise.vector(8));
        let text = Some("text number7".to_owned());
        let shapes = [(vector.clone(), None), (None, text.clone()), (vector, text)];
        let filters = [
            json!({}),
            json!({"half": 1}),
            json!({"n": {"$lt": 9}}),
            json!({"n": -1}),
        ];
        let mut queries = Vec::new();
        for ((vector, text), filter) in shapes
            .into_iter()
            .flat_map(|shape| filters.iter().map(move |filter| (shape.clone(), filter)))
        {
            let query = StorageQuery {
                vector,
                text,
                filter: Filter::parse(filter).unwrap(),
                limit: 5,
                ..StorageQuery::default()
            };
            if filter.as_object().unwrap().is_empty() {
                store.search(&docs, query.clone()).await.unwrap();
            }
            assert_eq!(
                round_trips(&store, &docs, &query).await,
                2,
                "{collection} {query:?}"
            );
            let limited = StorageQuery {
                max_distance: query.vector.is_some().then_some(0.9),
                ..query.clone()
            };
            store.search(&docs, limited.clone()).await.unwrap();
            assert_eq!(
                round_trips(&store, &docs, &limited).await,
                2,
                "{collection} {limited:?}"
            );
            queries.push(query);
        }
        let mut together = Vec::new();
        let mut fewest = u64::MAX;
        for _ in 0..4 {
            let before = store.round_trips();
            together = store.search_many(&docs, queries.clone()).await.unwrap();
            fewest = fewest.min(store.round_trips() - before);
        }
        assert_eq!(fewest, 1);
        for (query, together) in queries.into_iter().zip(together) {
            let alone = store.search(&docs, query).await.unwrap();
            assert_eq!(alone.hits, together.hits);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn siblings_of_many_hits_are_read_together() {
    let url = new_database().await;
    let store = open_with_one_reader(&url).await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let documents = (0..3000).map(|n| {
        // Sections of ten, and one of 1,500.
        let section = if n % 2 == 0 { n / 20 } else { -1 };
        stored(
            &format!("d{n}"),
            "text",
            json!({"section": section}),
            &[1.0, n as f32],
        )
    });
    store.upsert(&docs, batch(documents.collect())).await.unwrap();
    let query = StorageQuery {
        vector: Some(vec![1.0, 500.0]),
        limit: 16,
        siblings: Some(SiblingsRequest {
            expand: Expand {
                field: "section".into(),
                max_chars: None,
            },
            max_bytes: SIBLING_BYTES,
        }),
        ..StorageQuery::default()
    };
    let mut found = store.search(&docs, query.clone()).await.unwrap();
    let mut fewest = u64::MAX;
    for _ in 0..4 {
        let before = store.round_trips();
        found = store.search(&docs, query.clone()).await.unwrap();
        fewest = fewest.min(store.round_trips() - before);
    }
    // The search, both kinds of sections, and the documents.
    assert_eq!(fewest, 4);
    for hit in found.hits {
        let siblings = hit.siblings.unwrap();
        let expected = if hit.document.metadata["section"] == -1 {
            100
        } else {
            10
        };
        assert_eq!(siblings.len(), expected, "{:?}", hit.document.id);
        assert!(siblings.iter().any(|sibling| sibling.id == hit.document.id));
    }
}

/// A search sends along what it will likely need, by what the last one saw; here that is wrong each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collection_that_another_process_replaced_is_searched_as_it_is() {
    let url = new_database().await;
    let (here, there) = (open_eager(&url).await, open_eager(&url).await);
    let docs = name("docs");
    let search = async |width: usize, text: Option<&str>| {
        let mut vector = vec![0.5; width];
        vector[0] = 1.0;
        let request = StorageQuery {
            vector: Some(vector),
            text: text.map(str::to_owned),
            limit: 3,
            ..StorageQuery::default()
        };
        let outcome = here.search(&docs, request).await?;
        let found = outcome.hits.iter().map(|hit| hit.document.id.as_str());
        Ok::<_, StorageError>(found.collect::<Vec<_>>().join(" "))
    };
    there.create_collection(&docs, Metadata::new()).await.unwrap();
    assert_eq!(search(2, None).await.unwrap(), "");
    for round in 0..3 {
        for (width, at) in [(2, "two"), (3, "three")] {
            let mut vector = vec![0.0; width];
            vector[0] = 1.0;
            let id = format!("{at}-{round}");
            let document = stored(&id, "some text", json!({}), &vector);
            there.upsert(&docs, batch(vec![document])).await.unwrap();
            assert_eq!(search(width, None).await.unwrap(), id);
            assert_eq!(search(width, Some("text")).await.unwrap(), id);
            let refused = search(5, None).await;
            assert!(
                matches!(refused, Err(StorageError::DimensionMismatch { expected, .. }) if expected == width)
            );
            match round {
                // The table goes, with the collection or without it.
                0 => {
                    there.empty(&docs).await.unwrap();
                    assert_eq!(search(width, None).await.unwrap(), "");
                }
                _ => {
                    there.delete_collection(&docs).await.unwrap();
                    if round == 1 {
                        let gone = search(width, None).await;
                        assert!(matches!(gone, Err(StorageError::CollectionNotFound(_))));
                    }
                    there.create_collection(&docs, Metadata::new()).await.unwrap();
                }
            }
        }
    }
}

/// The nearest documents, by comparing all of them.
fn nearest(
    vectors: &[Vec<f32>],
    query: &[f32],
    limit: usize,
    passes: impl Fn(usize) -> bool,
) -> BTreeSet<String> {
    let cosine = |a: &[f32], b: &[f32]| {
        let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    };
    let mut scored: Vec<(f32, usize)> = vectors
        .iter()
        .enumerate()
        .filter(|(n, _)| passes(*n))
        .map(|(n, vector)| (cosine(vector, query), n))
        .collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.iter().take(limit).map(|(_, n)| format!("d{n}")).collect()
}

async fn found(
    store: &PostgresStore,
    docs: &CollectionName,
    query: &[f32],
    limit: usize,
    filter: &Filter,
) -> Vec<String> {
    let request = StorageQuery {
        vector: Some(query.to_vec()),
        filter: filter.clone(),
        limit,
        ..StorageQuery::default()
    };
    let hits = store.search(docs, request).await.unwrap().hits;
    let distances: Vec<f32> = hits.iter().map(|hit| hit.distance.unwrap()).collect();
    assert!(distances.is_sorted(), "{distances:?}");
    hits.into_iter()
        .map(|hit| hit.document.id.into_string())
        .collect()
}

/// It replaces the index that earlier versions made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_collection_gets_an_index_that_keeps_its_recall_under_filters() {
    for (documents, dimensions) in [(4000, 24), (1200, 2050)] {
        let url = new_database().await;
        // Two, so that they have to agree on who builds.
        let stores = [open_eager(&url).await, open_eager(&url).await];
        let store = &stores[0];
        let docs = name("docs");
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        let mut noise = Noise(3);
        let vectors: Vec<Vec<f32>> = (0..documents).map(|_| noise.vector(dimensions)).collect();
        let stored: Vec<_> = vectors
            .iter()
            .enumerate()
            .map(|(n, vector)| stored(&format!("d{n}"), "text", json!({"n": n % 100}), vector))
            .collect();
        let (first, others) = stored.split_at(500);
        store.upsert(&docs, batch(first.to_vec())).await.unwrap();
        let relation = number(
            &url,
            "SELECT relation FROM ragstone.collections WHERE name = 'docs'",
        )
        .await;
        let earlier = format!(
            "CREATE INDEX nearest_{relation} ON ragstone.documents_{relation}
             USING hnsw ((embedding::halfvec({dimensions})) halfvec_l2_ops)"
        );
        execute(&url, &earlier).await;
        let writes = others
            .chunks(500)
            .map(|part| store.upsert(&docs, batch(part.to_vec())));
        try_join_all(writes).await.unwrap();
        let indexes = |name: &str| {
            format!(
                "SELECT count(*) FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
                 WHERE relname LIKE '{name}\\_%' AND indisvalid"
            )
        };
        until_number(&url, &indexes("near"), 1).await;
        until_number(&url, &indexes("nearest"), 0).await;

        for (limit, percent) in [(10, 100), (10, 50), (10, 10), (10, 1), (100, 100), (100, 50)] {
            let filter = Filter::parse(&json!({"n": {"$lt": percent}})).unwrap();
            let mut right = 0;
            const QUERIES: usize = 20;
            for _ in 0..QUERIES {
                let query = noise.vector(dimensions);
                let expected = nearest(&vectors, &query, limit, |n| n % 100 < percent);
                let hits = found(store, &docs, &query, limit, &filter).await;
                assert_eq!(hits.len(), limit);
                right += hits.iter().filter(|id| expected.contains(*id)).count();
            }
            let recall = right as f64 / (limit * QUERIES) as f64;
            assert!(
                recall >= 0.99,
                "{recall} of the nearest {limit} of {percent} % at {dimensions} dimensions"
            );
        }
        // Whoever deletes and empties does not wait for anything that goes on behind the scenes.
        assert_eq!(store.empty(&docs).await.unwrap(), documents as u64);
    }
}
