//! 32 concurrent writers and readers: writes are atomic, and visible to their writer at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Value, json};

use super::rounds;
use crate::support::{Server, plain, vector};

const WRITERS: usize = 32;
const READERS: usize = 32;
const BATCH: usize = 5;

fn batch(writer: usize, number: u32) -> Vec<Value> {
    (0..BATCH)
        .map(|n| {
            let metadata = json!({"writer": writer, "batch": format!("w{writer}-{number}")});
            json!({"id": format!("w{writer}-{number}-{n}"), "text": format!("word of writer {writer}"), "metadata": metadata, "embedding": vector(writer * 10 + n)})
        })
        .collect()
}

#[test]
fn thirty_two_writers_and_thirty_two_readers() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let server = Arc::new(plain().await);
        server.create("c").await;
        let batches = rounds(12, 4);
        let done = Arc::new(AtomicBool::new(false));
        let looks = Arc::new(AtomicU64::new(0));
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                tokio::spawn(read(
                    Arc::clone(&server),
                    reader,
                    batches,
                    Arc::clone(&done),
                    Arc::clone(&looks),
                ))
            })
            .collect();
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| tokio::spawn(write(Arc::clone(&server), writer, batches)))
            .collect();
        for writer in writers {
            writer.await.expect("a writer saw what it wrote");
        }
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.await.expect("a reader saw whole writes only");
        }
        assert!(looks.load(Ordering::Relaxed) >= READERS as u64);

        // Each writer deleted its first batch and replaced its second.
        let expected = WRITERS * (batches as usize - 1) * BATCH;
        let check = async |server: &Server| {
            assert_eq!(server.get("/collections/c").await.ok()["count"], expected);
            let replaced = server.find("c", json!({"replaced": true})).await.ok();
            assert_eq!(replaced["total"], WRITERS * BATCH);
            let search = json!({"query": "word", "mode": "keyword", "top_k": 1000, "where": {"writer": 7}});
            let found = server.post("/collections/c/query", search).await.ok();
            assert_eq!(
                found["results"].as_array().unwrap().len(),
                (batches as usize - 1) * BATCH
            );
        };
        check(&server).await;
        let server = Arc::into_inner(server)
            .expect("nobody else has it")
            .restarted()
            .await;
        check(&server).await;
    });
}

async fn write(server: Arc<Server>, writer: usize, batches: u32) {
    for number in 0..batches {
        server.add("c", batch(writer, number)).await;
        let seen = server
            .find("c", json!({"batch": format!("w{writer}-{number}")}))
            .await
            .ok();
        assert_eq!(seen["total"], BATCH, "a writer sees its own write at once");
    }
    let deleted = server
        .delete_with(
            "/collections/c/documents",
            json!({"where": {"batch": format!("w{writer}-0")}}),
        )
        .await
        .ok();
    assert_eq!(deleted["count"], BATCH);
    let replacement: Vec<Value> = batch(writer, 1)
        .into_iter()
        .map(|mut document| {
            document["metadata"]["replaced"] = json!(true);
            document
        })
        .collect();
    server.add("c", replacement).await;
}

async fn read(
    server: Arc<Server>,
    reader: usize,
    batches: u32,
    done: Arc<AtomicBool>,
    looks: Arc<AtomicU64>,
) {
    let mut number = 0;
    while !done.load(Ordering::Relaxed) {
        number = (number + 1) % batches;
        let filter = json!({"batch": format!("w{reader}-{number}")});
        let page = server.find("c", filter.clone()).await.ok();
        let total = page["total"].as_u64().unwrap() as usize;
        assert!(total == 0 || total == BATCH, "half a batch: {total}");
        assert_eq!(page["documents"].as_array().unwrap().len(), total);
        let search = json!({"query_embedding": vector(3), "top_k": 10, "where": filter});
        let found = server.post("/collections/c/query", search).await.ok();
        let found = found["results"].as_array().unwrap().len();
        assert!(found == 0 || found == BATCH, "half a batch found: {found}");
        let count = server.get("/collections/c").await.ok()["count"].as_u64().unwrap() as usize;
        assert_eq!(count % BATCH, 0, "half a batch counted");
        looks.fetch_add(1, Ordering::Relaxed);
    }
}
