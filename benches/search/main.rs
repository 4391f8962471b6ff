//! The store in process: insert rate, load time, memory, and the time and recall of searches.
//!
//! `cargo bench -p ragstone-store --bench search -- [--documents N] [--vectors FILE] [--keep DIR] [--open] [--bulk]`
//!
//! `--bulk` measures large writes instead of searches: how long each takes, and how long a small write
//! to another collection waits at most meanwhile.
//!
//! `FILE` holds little-endian floats, 384 per vector; without it vectors are random, in clusters.

#![allow(clippy::print_stdout, clippy::unwrap_used)]

mod data;

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use data::{DIMENSIONS, Noise, Source, batch, word};
use ragstone_core::storage::{Page, Selection, Storage, StorageQuery};
use ragstone_core::{CollectionName, Filter, Metadata};
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::json;

/// As in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

struct Arguments {
    documents: usize,
    vectors: Option<String>,
    keep: Option<String>,
    /// Measure nothing but opening what an earlier run kept.
    open: bool,
    bulk: bool,
}

fn arguments() -> Arguments {
    let given: Vec<String> = std::env::args().collect();
    let after = |flag: &str| {
        given
            .iter()
            .position(|a| a == flag)
            .and_then(|at| given.get(at + 1).cloned())
    };
    Arguments {
        documents: after("--documents").map_or(20_000, |n| n.parse().unwrap()),
        vectors: after("--vectors"),
        keep: after("--keep"),
        open: given.iter().any(|a| a == "--open"),
        bulk: given.iter().any(|a| a == "--bulk"),
    }
}

#[tokio::main]
async fn main() {
    let arguments = arguments();
    let temporary = tempfile::tempdir().unwrap();
    let directory = arguments
        .keep
        .clone()
        .map_or(temporary.path().to_owned(), Into::into);
    if arguments.open {
        open(&directory);
        return;
    }
    let n = arguments.documents;
    let mut source = match &arguments.vectors {
        Some(path) => Source::file(path).unwrap(),
        None => Source::clusters(),
    };
    let collection = CollectionName::parse("bench").unwrap();
    // Queries are drawn like documents, and are not among them.
    let mut vectors: Vec<Vec<f32>> = (0..n + 200).map(|number| source.vector(number)).collect();
    let queries = vectors.split_off(n);
    drop(source);

    let store = SqliteStore::open(&directory, StoreOptions::default()).unwrap();
    if store
        .create_collection(&collection, Metadata::new())
        .await
        .is_ok()
    {
        insert(&store, &collection, &vectors).await;
    }
    let start = Instant::now();
    store.flush().await.unwrap();
    println!(
        "flush {:?}, {} MB on disk",
        start.elapsed(),
        store.health().await.unwrap().storage_bytes >> 20
    );
    if arguments.bulk {
        bulk(Arc::new(store), &collection, &vectors).await;
        return;
    }
    store.close().await.unwrap();
    drop(store);

    let store = open(&directory);
    let filters = [
        ("everything", json!({})),
        ("50 %", json!({"half": 0})),
        ("10 %", json!({"tenth": 3})),
        ("1 %", json!({"hundredth": "value-42"})),
        ("0.02 %", json!({"rare": "source-00042"})),
    ];
    for (label, filter) in &filters {
        dense(&store, &collection, label, filter, &vectors, &queries).await;
    }
    words(&store, &collection, &queries).await;
    pages(&store, &collection).await;
    at_once(&store, &collection, &queries).await;
    if arguments.keep.is_some() {
        return;
    }
    let (start, used) = (Instant::now(), processor_time());
    let count = store.empty(&collection).await.unwrap();
    println!(
        "emptied {count} in {:?} (processor {:?})",
        start.elapsed(),
        processor_time() - used
    );
    let start = Instant::now();
    store.flush().await.unwrap();
    println!(
        "flush {:?}, {} MB on disk",
        start.elapsed(),
        store.health().await.unwrap().storage_bytes >> 20
    );
}

async fn bulk(store: Arc<SqliteStore>, collection: &CollectionName, vectors: &[Vec<f32>]) {
    let other = CollectionName::parse("other").unwrap();
    store.create_collection(&other, Metadata::new()).await.unwrap();
    let small = batch(0, 1, &vectors[..1]);
    let run = async |name: &str, write: Pin<Box<dyn Future<Output = u64> + Send>>| {
        let writing = tokio::spawn(write);
        let (start, mut waits) = (Instant::now(), Vec::new());
        let mut spent = None;
        // Goes on until deleted documents are removed, as far as that can be seen from here.
        while spent.is_none() || start.elapsed() < 4 * spent.unwrap_or_default() + Duration::from_secs(2) {
            let sent = Instant::now();
            store.upsert(&other, small.clone()).await.unwrap();
            waits.push(sent.elapsed());
            tokio::time::sleep(Duration::from_millis(2)).await;
            if writing.is_finished() && spent.is_none() {
                spent = Some(start.elapsed());
            }
        }
        let count = writing.await.unwrap();
        let flushed = Instant::now();
        store.flush().await.unwrap();
        println!(
            "{name} {count} in {:.3?}; a small write waited {} max {:.1?}; flush {:.3?}, {} MB",
            spent.unwrap_or_default(),
            summary(waits.clone()),
            waits.iter().max().unwrap(),
            flushed.elapsed(),
            store.health().await.unwrap().storage_bytes >> 20
        );
    };
    let replaced = vectors.len() / 10;
    run("replaced", {
        let (store, collection) = (store.clone(), collection.clone());
        let documents = batch(0, replaced, &vectors[..replaced]).documents;
        Box::pin(async move {
            for part in documents.chunks(1000) {
                let (documents, model) = (part.to_vec(), None);
                let batch = ragstone_core::storage::DocumentBatch { documents, model };
                store.upsert(&collection, batch).await.unwrap();
            }
            documents.len() as u64
        })
    })
    .await;
    for selection in [
        Selection::Matching(Filter::parse(&json!({"half": 0})).unwrap()),
        Selection::Ids(
            (0..vectors.len() / 2)
                .map(|n| ragstone_core::DocumentId::parse(format!("document-{n}")).unwrap())
                .collect(),
        ),
    ] {
        let (store, collection) = (store.clone(), collection.clone());
        let delete = async move { store.delete_documents(&collection, selection).await.unwrap() };
        run("deleted", Box::pin(delete)).await;
    }
    let (emptied, collection) = (store.clone(), collection.clone());
    run(
        "emptied",
        Box::pin(async move { emptied.empty(&collection).await.unwrap() }),
    )
    .await;
}

fn open(directory: &std::path::Path) -> SqliteStore {
    let before = resident();
    let (start, used) = (Instant::now(), processor_time());
    let store = SqliteStore::open(directory, StoreOptions::default()).unwrap();
    println!(
        "open {:?} (processor {:?}), resident +{} MB",
        start.elapsed(),
        processor_time() - used,
        resident().saturating_sub(before) >> 20
    );
    store
}

async fn insert(store: &SqliteStore, collection: &CollectionName, vectors: &[Vec<f32>]) {
    const BATCH: usize = 500;
    let (mut spent, mut used) = (Duration::ZERO, Duration::ZERO);
    for (number, part) in vectors.chunks(BATCH).enumerate() {
        let documents = batch(number * BATCH, number * BATCH + part.len(), part);
        let (start, used_before) = (Instant::now(), processor_time());
        store.upsert(collection, documents).await.unwrap();
        spent += start.elapsed();
        used += processor_time() - used_before;
    }
    println!(
        "insert {:.0}/s in batches of {BATCH} (processor {:?} each)",
        vectors.len() as f64 / spent.as_secs_f64(),
        used / vectors.len() as u32
    );
    let start = Instant::now();
    const SINGLE: usize = 200;
    for n in 0..SINGLE {
        let documents = batch(n, n + 1, &vectors[n..n + 1]);
        store.upsert(collection, documents).await.unwrap();
    }
    println!("replace one by one {:?} each", start.elapsed() / SINGLE as u32);
}

async fn dense(
    store: &SqliteStore,
    collection: &CollectionName,
    label: &str,
    filter: &serde_json::Value,
    vectors: &[Vec<f32>],
    queries: &[Vec<f32>],
) {
    let filter = Filter::parse(filter).unwrap();
    let matching: Vec<usize> = (0..vectors.len())
        .filter(|n| filter.matches(&data::fields(*n)))
        .collect();
    let mut times = Vec::new();
    let (mut right, mut wanted) = (0, 0);
    let mut used = Duration::ZERO;
    let checked = if vectors.len() > 300_000 { 50 } else { 200 };
    for (number, query) in queries.iter().enumerate() {
        let request = StorageQuery {
            vector: Some(query.clone()),
            filter: filter.clone(),
            limit: 10,
            ..StorageQuery::default()
        };
        let (start, used_before) = (Instant::now(), processor_time());
        let outcome = store.search(collection, request).await.unwrap();
        times.push(start.elapsed());
        used += processor_time() - used_before;
        if number < checked {
            let expected = brute_force(vectors, &matching, query);
            wanted += expected.len();
            right += outcome
                .hits
                .iter()
                .filter(|hit| expected.contains(hit.document.id.as_str()))
                .count();
        }
    }
    let recall = right as f64 / f64::from(wanted as u32).max(1.0);
    println!(
        "dense {label:>10}: {} processor {:.3?} recall@10 {recall:.4} of {}",
        summary(times),
        used / queries.len() as u32,
        matching.len()
    );
}

fn brute_force(vectors: &[Vec<f32>], matching: &[usize], query: &[f32]) -> HashSet<String> {
    let mut scored: Vec<(f32, usize)> = matching
        .iter()
        .map(|n| {
            let similarity: f32 = vectors[*n]
                .as_chunks::<8>()
                .0
                .iter()
                .zip(query.as_chunks::<8>().0)
                .fold([0.0f32; 8], |mut sums, (a, b)| {
                    (0..8).for_each(|lane| sums[lane] += a[lane] * b[lane]);
                    sums
                })
                .iter()
                .sum();
            (similarity, *n)
        })
        .collect();
    scored.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    scored
        .iter()
        .take(10)
        .map(|(_, n)| format!("document-{n}"))
        .collect()
}

async fn words(store: &SqliteStore, collection: &CollectionName, queries: &[Vec<f32>]) {
    for hybrid in [false, true] {
        let mut noise = Noise(9);
        let mut times = Vec::new();
        for query in queries {
            let text = [20, 300, 3000, 10_000, 30_000]
                .map(|bound| word(noise.below(bound)))
                .join(" ");
            let request = StorageQuery {
                vector: hybrid.then(|| query.clone()),
                text: Some(text),
                limit: 10,
                ..StorageQuery::default()
            };
            let start = Instant::now();
            store.search(collection, request).await.unwrap();
            times.push(start.elapsed());
        }
        println!(
            "{}: {}",
            if hybrid { "hybrid" } else { "keyword" },
            summary(times)
        );
    }
}

async fn pages(store: &SqliteStore, collection: &CollectionName) {
    let filters = [
        ("equality", json!({"hundredth": "value-42"})),
        (
            "$in",
            json!({"rare": {"$in": ["source-00001", "source-00002", "source-00003"]}}),
        ),
        ("$or", json!({"$or": [{"half": 1}, {"tenth": 3}]})),
        ("$and", json!({"$and": [{"half": 1}, {"tenth": 3}]})),
        ("$ne", json!({"tenth": {"$ne": 3}})),
        ("range", json!({"rare": {"$gte": "source-01000"}})),
    ];
    for (label, filter) in filters {
        let filter = Filter::parse(&filter).unwrap();
        let mut times = Vec::new();
        let mut total = 0;
        for _ in 0..100 {
            let start = Instant::now();
            let page = Page {
                limit: 100,
                offset: 0,
            };
            total = store.documents(collection, &filter, page).await.unwrap().total;
            times.push(start.elapsed());
        }
        println!("page of 100, {label:>8}: {} of {total}", summary(times));
    }
    let mut times = Vec::new();
    let mut values = 0;
    for _ in 0..100 {
        let start = Instant::now();
        values = store.metadata_values(collection, "rare").await.unwrap().len();
        times.push(start.elapsed());
    }
    println!("metadata values: {} of {values}", summary(times));
}

async fn at_once(store: &SqliteStore, collection: &CollectionName, queries: &[Vec<f32>]) {
    const CLIENTS: usize = 8;
    const EACH: usize = 100;
    let start = Instant::now();
    let clients = (0..CLIENTS).map(|client| async move {
        for number in 0..EACH {
            let request = StorageQuery {
                vector: Some(queries[(client * EACH + number) % queries.len()].clone()),
                limit: 10,
                ..StorageQuery::default()
            };
            store.search(collection, request).await.unwrap();
        }
    });
    futures::future::join_all(clients).await;
    println!(
        "{CLIENTS} at once: {:.0} searches/s",
        (CLIENTS * EACH) as f64 / start.elapsed().as_secs_f64()
    );
}

fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    format!("p50 {:.3?} p95 {:.3?}", at(0.5), at(0.95))
}

/// Processor time this process has used, where the system tells it: unlike the time on the clock it
/// hardly depends on what else the machine is doing.
fn processor_time() -> Duration {
    const TICKS_PER_SECOND: u64 = 100;
    let ticks = std::fs::read_to_string("/proc/self/stat").ok().and_then(|text| {
        let after_name = text.rsplit_once(')')?.1;
        let mut fields = after_name.split_whitespace().skip(11);
        Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
    });
    Duration::from_millis(ticks.unwrap_or(0) * 1000 / TICKS_PER_SECOND)
}

/// Resident memory of this process in bytes, where the system tells it.
fn resident() -> u64 {
    std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok())
        .map_or(0, |pages| pages * 4096)
}

const _: () = assert!(DIMENSIONS.is_multiple_of(8));
