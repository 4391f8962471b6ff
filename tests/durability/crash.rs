//! Kills the server at random moments: acknowledged writes survive, and the write in flight is stored
//! completely or not at all.

use std::time::Duration;

use fastrand::Rng;
use serde_json::{Value, json};

use super::model::{ModelCollection, ModelDocument, assert_indexes_agree, stored};
use super::rounds;
use crate::support::{Server, Setup};

/// Each writer has its own collection, so that it knows the exact content.
const WRITERS: usize = 4;

/// The state a writer expects: after all acknowledged writes, and after the write in flight.
#[derive(Clone)]
struct Known {
    collection: String,
    acknowledged: ModelCollection,
    in_flight: Option<ModelCollection>,
}

#[test]
fn nothing_acknowledged_is_lost_when_the_server_is_killed() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut random = Rng::with_seed(0x5eed);
        let mut server = Setup::without_models().start().await;
        let mut writers = Vec::new();
        for n in 0..WRITERS {
            let collection = format!("writer{n}");
            server.create(&collection).await;
            writers.push(Known {
                collection,
                acknowledged: ModelCollection::default(),
                in_flight: None,
            });
        }
        let (mut caught, rounds) = (0, rounds(60, 6));
        for round in 0..rounds {
            (server, writers) = work_and_kill(server, writers, &mut random).await;
            caught += writers.iter().filter(|writer| writer.in_flight.is_some()).count();
            for writer in &mut writers {
                settle(&server, writer, round).await;
            }
            check_integrity(&server);
        }
        // Otherwise no kill hit a write.
        assert!(
            caught as u32 >= rounds,
            "only {caught} writes were in flight in {rounds} kills"
        );
    });
}

/// Lets the writers run for a while, kills the server and restarts it.
async fn work_and_kill(server: Server, writers: Vec<Known>, random: &mut Rng) -> (Server, Vec<Known>) {
    let base = server.url("");
    let tasks: Vec<_> = writers
        .into_iter()
        .map(|writer| {
            tokio::spawn(write_until_cut_off(
                base.clone(),
                writer,
                Rng::with_seed(random.u64(..)),
            ))
        })
        .collect();
    tokio::time::sleep(Duration::from_micros(random.u64(500..60_000))).await;
    let setup = server.kill();
    let mut writers = Vec::new();
    for task in tasks {
        writers.push(task.await.expect("a writer ends when it is cut off"));
    }
    (setup.start().await, writers)
}

/// Writes until a request fails.
async fn write_until_cut_off(base: String, mut known: Known, mut random: Rng) -> Known {
    let client = reqwest::Client::builder()
        .no_proxy()
        .build()
        .expect("an HTTP client");
    loop {
        let (next, request) = next_write(&client, &base, &known, &mut random);
        known.in_flight = Some(next);
        match request.send().await {
            Ok(response) if response.status().is_success() => {
                // The status line acknowledges the write, even if the body is lost.
                known.acknowledged = known.in_flight.take().expect("just set");
            }
            Ok(response) => panic!("a write was refused: {}", response.status()),
            Err(_) => return known,
        }
    }
}

fn next_write(
    client: &reqwest::Client,
    base: &str,
    known: &Known,
    random: &mut Rng,
) -> (ModelCollection, reqwest::RequestBuilder) {
    let mut next = known.acknowledged.clone();
    let path = format!("{base}/collections/{}/documents", known.collection);
    match random.u32(..100) {
        0..70 => {
            let first = random.u32(..400);
            let documents: Vec<ModelDocument> = (0..random.u32(1..40))
                .map(|n| document(first + n, random))
                .collect();
            let body = json!({"documents": documents.iter().map(ModelDocument::to_add).collect::<Vec<_>>()});
            documents.into_iter().for_each(|document| next.upsert(document));
            (next, client.post(path).json(&body))
        }
        70..85 => {
            let first = random.u32(..400);
            let ids: Vec<String> = (first..first + 20).map(|n| format!("d{n}")).collect();
            next.delete(|document| ids.contains(&document.id));
            (next, client.delete(path).json(&ids))
        }
        85..92 => {
            let group = random.u32(..5);
            next.delete(|document| document.metadata["group"] == group);
            (
                next,
                client.delete(path).json(&json!({"where": {"group": group}})),
            )
        }
        _ => {
            next.delete(|_| true);
            (next, client.delete(format!("{path}/all")))
        }
    }
}

fn document(n: u32, random: &mut Rng) -> ModelDocument {
    ModelDocument {
        id: format!("d{n}"),
        text: format!("word {} {}", random.u32(..), "filler ".repeat(random.usize(..40))),
        metadata: json!({"group": random.u32(..5), "stamp": random.u32(..)}),
        vector: [random.f32() - 0.5, random.f32() - 0.5, 0.1 + random.f32()],
    }
}

/// Determines whether the write in flight was stored.
async fn settle(server: &Server, writer: &mut Known, round: u32) {
    let documents: Vec<Value> = stored(server, &writer.collection).await;
    let after = writer.in_flight.take();
    if documents != writer.acknowledged.as_json() {
        let after = after.filter(|after| documents == after.as_json()).unwrap_or_else(|| {
            panic!(
                "round {round}, {}: neither what was acknowledged ({} documents) nor the write in flight, but {}",
                writer.collection,
                writer.acknowledged.documents.len(),
                documents.len()
            )
        });
        writer.acknowledged = after;
    }
    let count = server
        .get(&format!("/collections/{}", writer.collection))
        .await
        .ok()["count"]
        .clone();
    assert_eq!(count, documents.len());
    if documents.len() <= 1000 {
        assert_indexes_agree(server, &writer.collection, &documents).await;
    }
}

/// Runs the integrity check of SQLite.
fn check_integrity(server: &Server) {
    let data = server.setup().data_dir();
    let database = std::fs::read_dir(&data)
        .expect("the data directory")
        .flatten()
        .map(|entry| entry.path())
        .find(|path| {
            path.extension()
                .is_some_and(|extension| extension == "db" || extension == "sqlite")
        })
        .expect("a database in the data directory");
    let connection =
        rusqlite::Connection::open_with_flags(database, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)
            .expect("the database opens");
    let report: String = connection
        .query_row("PRAGMA integrity_check", [], |row| row.get(0))
        .expect("the check runs");
    assert_eq!(report, "ok");
}
