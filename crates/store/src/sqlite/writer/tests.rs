//! The queue in front of the writer, with the writer held still.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ragstone_core::CollectionName;
use ragstone_core::Metadata;
use ragstone_core::storage::{Storage, StorageError};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::{SqliteStore, StoreOptions};

/// Occupies the writer; it goes on when the sender is dropped.
async fn hold_writer(store: &Arc<SqliteStore>) -> (Sender<()>, JoinHandle<Result<()>>) {
    let (release, released): (Sender<()>, Receiver<()>) = channel();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let busy = store.clone();
    let held = tokio::spawn(async move {
        busy.write(0, move |_| {
            let _ = started.send(());
            let _ = released.recv();
            Ok(())
        })
        .await
    });
    has_started.await.unwrap();
    (release, held)
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
    let (release, held) = hold_writer(&store).await;
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
    held.await.unwrap().unwrap();
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
    let (release, held) = hold_writer(&store).await;
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
    held.await.unwrap().unwrap();
    waiting.await.unwrap().unwrap();
    // What was refused does not count as waiting.
    store.write(900, |_| Ok(())).await.unwrap();
}

#[tokio::test]
async fn closing_finishes_what_was_accepted_and_refuses_the_rest() {
    let directory = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(directory.path(), StoreOptions::default()).unwrap());
    let (release, held) = hold_writer(&store).await;
    let accepted: Vec<_> = (0..5).map(|number| create(&store, number)).collect();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    drop(release);
    store.close().await.unwrap();
    held.await.unwrap().unwrap();
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
