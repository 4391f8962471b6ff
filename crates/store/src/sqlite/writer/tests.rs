//! The queue in front of the writer while the writer is busy, and the work that writes cost.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ragstone_core::storage::{
    DocumentBatch, Page, Selection, Storage, StorageError, StorageQuery, StoredDocument,
};
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::{SqliteStore, StoreOptions};

/// Occupies the writer; it goes on when the sender is dropped.
async fn hold_writer(store: &Arc<SqliteStore>) -> (Sender<()>, JoinHandle<Result<()>>) {
    let (release, released): (Sender<()>, Receiver<()>) = channel();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let busy = store.clone();
    let occupied = tokio::spawn(async move {
        busy.write(0, move |_| {
            let _ = started.send(());
            let _ = released.recv();
            Ok(())
        })
        .await
    });
    has_started.await.unwrap();
    (release, occupied)
}

fn create(store: &Arc<SqliteStore>, number: usize) -> JoinHandle<Result<(), StorageError>> {
    let store = store.clone();
    tokio::spawn(async move {
        let name = CollectionName::parse(format!("c{number}")).unwrap();
        store.create_collection(&name, Metadata::new()).await.map(|_| ())
    })
}

#[tokio::test]
async fn a_full_queue_is_an_answer_and_what_was_accepted_is_done() {
    const QUEUE: usize = 4;
    let directory = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        queued_writes: QUEUE,
        ..StoreOptions::default()
    };
    let store = Arc::new(SqliteStore::open(directory.path(), options).unwrap());
    let (release, occupied) = hold_writer(&store).await;
    let writes: Vec<_> = (0..3 * QUEUE).map(|number| create(&store, number)).collect();
    // One thread runs all tasks: once this one goes on, each has queued its write or been refused.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        writes.iter().filter(|write| write.is_finished()).count(),
        2 * QUEUE
    );
    drop(release);
    occupied.await.unwrap().unwrap();
    let outcomes = futures::future::join_all(writes).await;
    let refused = outcomes
        .iter()
        .filter(|outcome| matches!(outcome, Ok(Err(StorageError::Unavailable { .. }))))
        .count();
    let done = outcomes
        .iter()
        .filter(|outcome| matches!(outcome, Ok(Ok(()))))
        .count();
    assert_eq!((done, refused), (QUEUE, 2 * QUEUE));
    assert_eq!(store.collections().await.unwrap().len(), QUEUE);
}

#[tokio::test]
async fn the_queue_is_bounded_by_bytes_too() {
    let directory = tempfile::tempdir().unwrap();
    let options = StoreOptions {
        queued_bytes: 1000,
        ..StoreOptions::default()
    };
    let store = Arc::new(SqliteStore::open(directory.path(), options).unwrap());
    // Larger than the bound, but nothing else waits.
    store.write(5000, |_| Ok(())).await.unwrap();
    let (release, occupied) = hold_writer(&store).await;
    let waiting = tokio::spawn({
        let store = store.clone();
        async move { store.write(900, |_| Ok(())).await }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(
        store.write(200, |_| Ok(())).await,
        Err(Error::QueueFull)
    ));
    drop(release);
    occupied.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
    // What was refused does not count as waiting.
    store.write(900, |_| Ok(())).await.unwrap();
}

#[tokio::test]
async fn closing_finishes_what_was_accepted_and_refuses_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(directory.path(), StoreOptions::default()).unwrap());
    let (release, occupied) = hold_writer(&store).await;
    let accepted: Vec<_> = (0..5).map(|number| create(&store, number)).collect();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(release);
    store.close().await.unwrap();
    occupied.await.unwrap().unwrap();
    for write in accepted {
        write.await.unwrap().unwrap();
    }
    let late = create(&store, 9).await.unwrap();
    assert!(matches!(late, Err(StorageError::Unavailable { .. })));
    drop(store);
    let store = SqliteStore::open(directory.path(), StoreOptions::default()).unwrap();
    assert_eq!(store.collections().await.unwrap().len(), 5);
}

#[tokio::test]
async fn a_write_that_panics_is_rolled_back_and_the_writer_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(directory.path(), StoreOptions::default()).unwrap());
    let outcome: Result<()> = store
        .write(10, |transaction| {
            let name = CollectionName::parse("half-made").unwrap();
            transaction.create_collection(name, Metadata::new())?;
            panic!("asked for by a test");
        })
        .await;
    assert!(matches!(outcome, Err(Error::Worker(_))));
    assert_eq!(store.collections().await.unwrap(), []);
    create(&store, 1).await.unwrap().unwrap();
    assert_eq!(store.collections().await.unwrap().len(), 1);
}

/// Pages that the writer has written so far, and rows that its statements have changed.
async fn work(store: &SqliteStore) -> (i64, u64) {
    let counted = store.write(0, |transaction| {
        let (mut pages, mut unused) = (0, 0);
        // SAFETY: the connection is open, and both pointers are valid for the call.
        let status = unsafe {
            rusqlite::ffi::sqlite3_db_status(
                transaction.connection.handle(),
                rusqlite::ffi::SQLITE_DBSTATUS_CACHE_WRITE,
                &raw mut pages,
                &raw mut unused,
                0,
            )
        };
        assert_eq!(status, rusqlite::ffi::SQLITE_OK);
        Ok((i64::from(pages), transaction.connection.total_changes()))
    });
    counted.await.unwrap()
}

fn documents(numbers: impl Iterator<Item = usize>, round: usize) -> DocumentBatch {
    let documents = numbers.map(|n| {
        let mut metadata = Metadata::new();
        metadata.insert("odd".into(), (n % 2 == 1).into());
        StoredDocument {
            document: Document {
                id: DocumentId::parse(format!("d{n}")).unwrap(),
                text: format!("text {n} of round {round}"),
                metadata,
            },
            vector: (0..64)
                .map(|x| ((n * 7 + x * 3 + round) % 11) as f32 + 1.0)
                .collect(),
        }
    });
    DocumentBatch {
        documents: documents.collect(),
        model: None,
    }
}

async fn filled(directory: &std::path::Path, count: usize) -> (SqliteStore, CollectionName) {
    let store = SqliteStore::open(directory, StoreOptions::default()).unwrap();
    let docs = CollectionName::parse("docs").unwrap();
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    for first in (0..count).step_by(1000) {
        let batch = documents(first..count.min(first + 1000), 0);
        store.upsert(&docs, batch).await.unwrap();
    }
    store.flush().await.unwrap();
    (store, docs)
}

/// The work of a large write grows no faster than what it writes. Deleting many documents is itself
/// a short write; removing them from the file takes the rest of the work, in short transactions.
#[tokio::test]
async fn the_work_of_large_writes_is_linear() {
    let odd = || Filter::parse(&serde_json::json!({"odd": true})).unwrap();
    let mut costs: Vec<[(i64, u64); 4]> = Vec::new();
    for count in [8000, 64_000] {
        let directory = tempfile::tempdir().unwrap();
        let (store, docs) = filled(directory.path(), count).await;
        let mut cost = [(0, 0); 4];
        let mut before = work(&store).await;
        let mut spent = async |store: &SqliteStore| {
            store.flush().await.unwrap();
            let now = work(store).await;
            let spent = (now.0 - before.0, now.1 - before.1);
            before = now;
            spent
        };
        for first in (0..count).step_by(1000) {
            store
                .upsert(&docs, documents(first..first + 1000, 1))
                .await
                .unwrap();
        }
        cost[0] = spent(&store).await;
        let deleted = store
            .delete_documents(&docs, Selection::Matching(odd()))
            .await
            .unwrap();
        assert_eq!(deleted, count as u64 / 2);
        cost[1] = spent(&store).await;
        let ids = (0..count / 2).map(|n| DocumentId::parse(format!("d{n}")).unwrap());
        let deleted = store
            .delete_documents(&docs, Selection::Ids(ids.collect()))
            .await
            .unwrap();
        assert_eq!(deleted, count as u64 / 4);
        cost[2] = spent(&store).await;
        assert_eq!(store.empty(&docs).await.unwrap(), count as u64 / 4);
        cost[3] = spent(&store).await;
        costs.push(cost);
    }
    let names = ["replacing", "deleting by filter", "deleting by id", "emptying"];
    for (name, (small, large)) in names.iter().zip(costs[0].iter().zip(&costs[1])) {
        assert!(
            large.0 <= 12 * small.0 && large.1 <= 12 * small.1,
            "{name}: pages and rows {small:?} for n, {large:?} for 8 n"
        );
    }
}

#[tokio::test]
async fn deleting_many_documents_is_a_short_write() {
    let directory = tempfile::tempdir().unwrap();
    let (store, docs) = filled(directory.path(), 8000).await;
    let odd = Filter::parse(&serde_json::json!({"odd": true})).unwrap();
    let (rows, count) = store
        .write(0, move |transaction| {
            let before = transaction.connection.total_changes();
            let count = transaction.delete_documents(&docs, Selection::Matching(odd), 256)?;
            Ok((transaction.connection.total_changes() - before, count))
        })
        .await
        .unwrap();
    assert_eq!(count, 4000);
    assert!(rows <= 4000 / 256 + 1, "{rows} rows were written");
}

/// Slots of the collection in memory, empty ones included.
async fn slots(store: &SqliteStore, docs: &CollectionName) -> usize {
    let docs = docs.clone();
    let slots = store.write(0, move |transaction| {
        let row = transaction.require(&docs)?;
        Ok(transaction.snapshot(row.id)?.slots())
    });
    slots.await.unwrap()
}

#[tokio::test]
async fn slots_are_renumbered_while_writes_go_on() {
    let directory = tempfile::tempdir().unwrap();
    let (store, docs) = filled(directory.path(), 6000).await;
    let id = |n: usize| DocumentId::parse(format!("d{n}")).unwrap();
    let most = (0..5000).map(id).collect();
    let deleted = store.delete_documents(&docs, Selection::Ids(most)).await;
    assert_eq!(deleted.unwrap(), 5000);
    // Whatever is written before, during and after has to be there in the end.
    let mut expected: Vec<(usize, usize)> = (5000..6000).map(|n| (n, 0)).collect();
    let mut rounds = 0;
    while slots(&store, &docs).await > 2500 || rounds < 20 {
        assert!(rounds < 1000, "slots are never renumbered");
        let new = 10_000 + rounds;
        store.upsert(&docs, documents(new..new + 1, 1)).await.unwrap();
        expected.push((new, 1));
        let (replaced, gone) = (500 + rounds % 400, rounds % 7);
        let number = expected[replaced].0;
        store
            .upsert(&docs, documents(number..number + 1, 2))
            .await
            .unwrap();
        expected[replaced].1 = 2;
        let (removed, _) = expected.remove(gone);
        let deleted = store
            .delete_documents(&docs, Selection::Ids(vec![id(removed)]))
            .await;
        assert_eq!(deleted.unwrap(), 1);
        rounds += 1;
    }
    let everything = Page {
        limit: usize::MAX,
        offset: 0,
    };
    store.flush().await.unwrap();
    let reopened = {
        let directory = directory.path().to_owned();
        move || SqliteStore::open(&directory, StoreOptions::default()).unwrap()
    };
    let mut store = store;
    for reopens in [true, false] {
        let page = store
            .documents(&docs, &Filter::everything(), everything)
            .await
            .unwrap();
        let texts = page.documents.iter().map(|document| document.text.clone());
        let wanted = expected
            .iter()
            .map(|(n, round)| format!("text {n} of round {round}"));
        assert_eq!(texts.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        let query = StorageQuery {
            vector: Some(documents(10_003..10_004, 1).documents.remove(0).vector),
            text: Some("10003".into()),
            limit: 1,
            ..StorageQuery::default()
        };
        let found = store.search(&docs, query).await.unwrap().hits;
        assert_eq!(found[0].document.id, id(10_003));
        assert!(found[0].distance.unwrap() < 1e-6);
        let odd = Filter::parse(&serde_json::json!({"odd": true})).unwrap();
        let odd = store.documents(&docs, &odd, everything).await.unwrap().total;
        assert_eq!(odd, expected.iter().filter(|(n, _)| n % 2 == 1).count() as u64);
        if reopens {
            store.close().await.unwrap();
            drop(store);
            store = reopened();
        }
    }
}
