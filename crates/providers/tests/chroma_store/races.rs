//! Readers beside writers: ChromaDB has no transactions, and says so in its own way.

use super::*;

/// Searches until told to stop, and says how often; every answer has whole documents.
async fn keep_searching(
    store: &ChromaStorage,
    docs: &CollectionName,
    request: &StorageQuery,
    done: &AtomicBool,
) -> usize {
    let mut answers = 0;
    while !done.load(Ordering::Relaxed) {
        let outcome = store.search(docs, request.clone()).await;
        let outcome = outcome.unwrap_or_else(|error| panic!("after {answers} answers: {error:?}"));
        for hit in outcome.hits {
            assert!(!hit.document.text.is_empty(), "{hit:?}");
            assert!(!hit.document.metadata.is_empty(), "{hit:?}");
        }
        answers += 1;
    }
    answers
}

fn nearest(width: usize) -> StorageQuery {
    StorageQuery {
        vector: Some(noise(77, width)),
        limit: 5,
        ..StorageQuery::default()
    }
}

/// ChromaDB knows the width of a collection before it has its first documents, and fails meanwhile.
pub(super) async fn a_collection_is_searched_while_it_gets_its_first_documents(server: &ChromaServer) {
    const WIDTH: usize = 384;
    let (reader, writer) = (store(server), store(server));
    let others = name("bystanders");
    writer.create_collection(&others, Metadata::new()).await.unwrap();
    writer.upsert(&others, numbered(0..5, 1, WIDTH)).await.unwrap();
    for round in 0..4 {
        let docs = name(&format!("first{round}"));
        writer.create_collection(&docs, Metadata::new()).await.unwrap();
        let done = AtomicBool::new(false);
        let write = async {
            writer.upsert(&docs, numbered(0..300, 1, WIDTH)).await.unwrap();
            done.store(true, Ordering::Relaxed);
        };
        let request = nearest(WIDTH);
        let (answers, aside, ()) = tokio::join!(
            keep_searching(&reader, &docs, &request, &done),
            keep_searching(&reader, &others, &request, &done),
            write
        );
        assert!(answers > 0 && aside > 0);
        writer.delete_collection(&docs).await.unwrap();
    }
    writer.delete_collection(&others).await.unwrap();
}

/// By meaning and by both, while every second document goes and comes back.
pub(super) async fn what_is_deleted_meanwhile_is_found_whole_or_not_at_all(server: &ChromaServer) {
    const COUNT: usize = 200;
    let (reader, writer, docs) = (store(server), store(server), name("moving"));
    writer.create_collection(&docs, Metadata::new()).await.unwrap();
    writer.upsert(&docs, numbered(0..COUNT, 1, 4)).await.unwrap();
    let done = AtomicBool::new(false);
    let write = async {
        for round in 0..12 {
            let ids = (0..COUNT).step_by(2);
            let ids = ids.map(|n| DocumentId::parse(format!("d{n}")).unwrap());
            let gone = Selection::Ids(ids.collect());
            writer.delete_documents(&docs, gone).await.unwrap();
            writer.upsert(&docs, numbered(0..COUNT, round, 4)).await.unwrap();
        }
        done.store(true, Ordering::Relaxed);
    };
    let hybrid = StorageQuery {
        text: Some("text".into()),
        ..nearest(4)
    };
    let request = nearest(4);
    let (by_meaning, by_both, ()) = tokio::join!(
        keep_searching(&reader, &docs, &request, &done),
        keep_searching(&reader, &docs, &hybrid, &done),
        write
    );
    assert!(by_meaning > 0 && by_both > 0);
    writer.delete_collection(&docs).await.unwrap();
}

/// A collection that is deleted meanwhile is not there, whatever ChromaDB says of it, and others are.
pub(super) async fn collections_come_and_go_beside_readers(server: &ChromaServer) {
    let (reader, writer, docs) = (store(server), store(server), name("fleeting"));
    let stays = name("stays");
    writer.create_collection(&stays, Metadata::new()).await.unwrap();
    let done = AtomicBool::new(false);
    let write = async {
        for round in 0..40 {
            writer.create_collection(&docs, Metadata::new()).await.unwrap();
            writer.upsert(&docs, numbered(0..3, round, 4)).await.unwrap();
            writer.delete_collection(&docs).await.unwrap();
        }
        done.store(true, Ordering::Relaxed);
    };
    let list = async {
        while !done.load(Ordering::Relaxed) {
            let listed = reader.collections().await.unwrap();
            assert!(listed.iter().any(|collection| collection.name == stays));
        }
    };
    let search = async {
        while !done.load(Ordering::Relaxed) {
            for outcome in [
                reader.search(&docs, nearest(4)).await.map(|_| ()),
                reader.collection(&docs).await.map(|_| ()),
                reader.metadata_values(&docs, "round1").await.map(|_| ()),
                reader.documents(&docs, &Filter::default(), ALL).await.map(|_| ()),
            ] {
                assert!(
                    matches!(outcome, Ok(()) | Err(StorageError::CollectionNotFound(_))),
                    "{outcome:?}"
                );
            }
        }
    };
    tokio::join!(list, search, write);
    writer.delete_collection(&stays).await.unwrap();
}
