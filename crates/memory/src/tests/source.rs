use ragstone_core::records::{Expect, Millis, RecordChange, Records};

use super::support::*;
use crate::{EmbeddingState, MemoryEntry, MemoryKind, PageRequest};

#[tokio::test]
async fn req_emb_005_without_a_callback_stores_work_and_nothing_is_due() {
    let home = Home::new();
    let memory = home.plain().await;
    memory.save(id("k"), knowledge("tea is at four")).await.unwrap();
    memory
        .save(None, observation("s1", "the user likes tea"))
        .await
        .unwrap();
    let status = memory.status().await.unwrap();
    assert!(!status.enabled);
    assert_eq!((status.queued, status.embedded, status.failed), (0, 0, 0));
    let entry = memory.entry(MemoryKind::Knowledge, "k").await.unwrap().unwrap();
    assert_eq!(entry.entry.content(), "tea is at four");
    assert_eq!(entry.embedding, EmbeddingState::None);
    assert!(memory.delete(MemoryKind::Knowledge, "k").await.unwrap());
    assert!(memory.entry(MemoryKind::Knowledge, "k").await.unwrap().is_none());
    assert!(!memory.delete(MemoryKind::Knowledge, "k").await.unwrap());
}

#[tokio::test]
async fn req_emb_005_every_store_emits_the_embed_callback_on_save() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, quick());
    let learning = MemoryEntry::Learning {
        trigger: "t".into(),
        fix: "f".into(),
        category: None,
    };
    let reflection = MemoryEntry::Reflection {
        session_key: "s".into(),
        content: "r".into(),
    };
    for entry in [knowledge("k"), observation("s", "o"), reflection, learning] {
        memory.save(None, entry).await.unwrap();
    }
    until_status(&memory, |status| status.embedded == 4 && status.queued == 0).await;
    let mut texts = embedder.texts();
    texts.sort();
    assert_eq!(texts, ["Trigger: t\nFix: f", "k", "o", "r"]);
    for kind in MemoryKind::ALL {
        assert_eq!(home.vectors(kind).await.len(), 1, "{kind:?}");
    }
    buffer.stop(std::time::Duration::from_secs(10)).await;
}

#[tokio::test]
async fn lists_come_in_pages_and_by_session() {
    let home = Home::new();
    let memory = home.plain().await;
    let mut ids = Vec::new();
    for n in 0..5 {
        let session = if n % 2 == 0 { "even" } else { "odd" };
        let saved = memory
            .save(None, observation(session, &format!("o{n}")))
            .await
            .unwrap();
        ids.push(saved.into_string());
        // Ids of one millisecond are in no order.
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
    let page = |session: Option<&str>, after: Option<String>| PageRequest {
        session_key: session.map(str::to_owned),
        after,
        limit: 2,
    };
    let first = memory
        .entries(MemoryKind::Observation, page(None, None))
        .await
        .unwrap();
    assert_eq!(
        first.entries.iter().map(|e| e.id.clone()).collect::<Vec<_>>(),
        ids[..2]
    );
    let second = memory
        .entries(MemoryKind::Observation, page(None, first.next))
        .await
        .unwrap();
    assert_eq!(second.entries[0].id, ids[2]);
    let of_odd = memory
        .entries(MemoryKind::Observation, page(Some("odd"), None))
        .await
        .unwrap();
    assert_eq!(
        (of_odd.entries.len(), of_odd.next),
        (2, None),
        "the last page, and full"
    );
}

#[tokio::test]
async fn updating_a_text_replaces_its_vector_and_deleting_removes_it() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("k"), knowledge("first")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    memory.save(id("k"), knowledge("second")).await.unwrap();
    until_status(&memory, |status| status.queued == 0).await;
    assert_eq!(embedder.texts(), ["first", "second"]);
    assert_eq!(home.vectors(MemoryKind::Knowledge).await, ["k"]);
    memory.delete(MemoryKind::Knowledge, "k").await.unwrap();
    assert!(home.vectors(MemoryKind::Knowledge).await.is_empty());
    assert_eq!(memory.status().await.unwrap().embedded, 0);
    buffer.stop(std::time::Duration::from_secs(10)).await;
}

#[tokio::test]
async fn what_was_saved_without_embedding_is_embedded_once_it_is_on() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("before"), knowledge("before")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    buffer.stop(std::time::Duration::from_secs(10)).await;

    let plain = home.plain().await;
    plain.save(id("meanwhile"), knowledge("meanwhile")).await.unwrap();
    assert_eq!(plain.status().await.unwrap().queued, 0);

    let (memory, buffer) = home.embedding(&embedder, quick());
    until_status(&memory, |status| status.embedded == 2 && status.queued == 0).await;
    assert_eq!(embedder.texts(), ["before", "meanwhile"]);
    buffer.stop(std::time::Duration::from_secs(10)).await;
}

#[tokio::test]
async fn a_change_of_model_embeds_everything_again() {
    let home = Home::new();
    let (memory, buffer) = home.embedding(&StubEmbedder::new(), quick());
    for n in 0..20 {
        memory.save(None, knowledge(&format!("k{n}"))).await.unwrap();
    }
    until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
    buffer.stop(std::time::Duration::from_secs(10)).await;

    let other = StubEmbedder::of_version("stub-2");
    let (memory, buffer) = home.embedding(&other, quick());
    other.called(1).await;
    until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
    assert_eq!(other.texts().len(), 20);
    buffer.stop(std::time::Duration::from_secs(10)).await;

    // The same model again has nothing to do.
    let same = StubEmbedder::of_version("stub-2");
    let (memory, buffer) = home.embedding(&same, quick());
    buffer.stop(std::time::Duration::from_secs(10)).await;
    assert_eq!(
        (same.calls().len(), memory.status().await.unwrap().embedded),
        (0, 20)
    );
}

/// The record that a process holds while it replaces the vectors of another model.
fn turn(run_at: Millis) -> RecordChange {
    RecordChange::Put {
        kind: "memory.turn".to_owned(),
        key: String::new(),
        group: String::new(),
        value: Vec::new(),
        run_at: Some(run_at),
        expect: Expect::Anything,
    }
}

#[tokio::test]
async fn vectors_that_the_present_model_cannot_search_do_not_count_as_embedded() {
    for other in [StubEmbedder::of_version("stub-2"), StubEmbedder::wider()] {
        let home = Home::new();
        let (memory, buffer) = home.embedding(&StubEmbedder::new(), quick());
        for n in 0..20 {
            memory
                .save(id(&n.to_string()), knowledge(&format!("k{n}")))
                .await
                .unwrap();
        }
        until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
        buffer.stop(std::time::Duration::from_secs(10)).await;

        // Another process has the turn, so the old vectors stay for now.
        home.store.apply(vec![turn(Millis::MAX)]).await.unwrap();
        let (memory, buffer) = home.embedding(&other, quick());
        let status = memory.status().await.unwrap();
        assert_eq!((status.embedded, status.queued, status.failed), (0, 20, 0));
        home.store.apply(vec![turn(0)]).await.unwrap();
        until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
        assert_eq!(other.texts().len(), 20);
        let entry = memory.entry(MemoryKind::Knowledge, "7").await.unwrap().unwrap();
        assert_eq!(entry.embedding, EmbeddingState::Embedded);
        buffer.stop(std::time::Duration::from_secs(10)).await;
    }
}

#[tokio::test]
async fn an_entry_that_another_model_embedded_is_queued() {
    let home = Home::new();
    let (memory, buffer) = home.embedding(&StubEmbedder::new(), quick());
    memory.save(id("k"), knowledge("text")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    buffer.stop(std::time::Duration::from_secs(10)).await;
    home.store.apply(vec![turn(Millis::MAX)]).await.unwrap();
    let (memory, buffer) = home.embedding(&StubEmbedder::of_version("stub-2"), quick());
    let entry = memory.entry(MemoryKind::Knowledge, "k").await.unwrap().unwrap();
    assert_eq!(entry.embedding, EmbeddingState::Queued);
    buffer.stop(std::time::Duration::ZERO).await;
}
