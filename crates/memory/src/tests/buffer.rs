use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ragstone_core::backoff::Backoff;
use ragstone_core::model::{CallLimits, ModelError, RemoteFailure, RemoteFault};
use ragstone_core::records::{Expect, RecordChange, Records};

use super::support::*;
use crate::{Buffer, BufferOptions, EmbeddingState, Memory, MemoryKind, Ownership};
use ragstone_lease::{ClaimRequest, Leases, millis, now};

const SOON: Duration = Duration::from_secs(30);

#[tokio::test]
async fn req_emb_004_given_the_buffer_is_started_an_enqueued_request_is_processed_in_the_background() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let (memory, buffer) = home.embedding(&embedder, quick());
    // The save returns although the embedder does not.
    memory.save(id("k"), knowledge("text")).await.unwrap();
    embedder.called(1).await;
    assert_eq!(memory.status().await.unwrap().queued, 1);
    embedder.let_through(1);
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    let entry = memory.entry(MemoryKind::Knowledge, "k").await.unwrap().unwrap();
    assert_eq!(entry.embedding, EmbeddingState::Embedded);
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_004_requests_are_sent_in_one_batch_when_the_size_threshold_is_reached() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let options = BufferOptions {
        batch_window: Duration::from_secs(3600),
        poll_interval: Duration::from_secs(3600),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, options);
    // The look that the worker takes when it starts may find some of the first ones.
    let mut before = 0;
    for embedded in [8, 16] {
        before = embedder.calls().len();
        for n in 0..8 {
            memory.save(None, knowledge(&format!("k{n}"))).await.unwrap();
        }
        until_status(&memory, |status| {
            status.embedded == embedded && status.queued == 0
        })
        .await;
    }
    assert_eq!(embedder.calls().len(), before + 1, "{:?}", embedder.calls());
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_004_requests_are_sent_in_one_batch_when_the_batch_timeout_is_reached() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let options = BufferOptions {
        batch: 1000,
        batch_window: Duration::from_millis(300),
        poll_interval: Duration::from_secs(3600),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, options);
    // Once this is embedded, the look that the worker takes when it starts is over.
    memory.save(None, knowledge("first")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    let before = embedder.calls().len();
    let saves = (0..5).map(|n| memory.save(None, observation("s", &format!("o{n}"))));
    futures::future::join_all(saves).await;
    until_status(&memory, |status| status.embedded == 6 && status.queued == 0).await;
    assert_eq!(embedder.calls().len(), before + 1, "{:?}", embedder.calls());
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn req_emb_004_when_the_buffer_is_stopped_remaining_items_are_drained_before_exit() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let options = BufferOptions {
        batch_window: Duration::from_secs(3600),
        batch: 32,
        poll_interval: Duration::from_secs(3600),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, options);
    for n in 0..31 {
        memory.save(None, knowledge(&format!("k{n}"))).await.unwrap();
    }
    buffer.stop(SOON).await;
    let status = memory.status().await.unwrap();
    assert_eq!((status.embedded, status.queued), (31, 0));
}

#[tokio::test]
async fn a_stop_ends_at_its_deadline_and_loses_nothing() {
    let home = Home::new();
    let hanging = StubEmbedder::gated();
    let options = BufferOptions {
        lease: Duration::from_millis(50),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&hanging, options.clone());
    memory.save(id("k"), knowledge("text")).await.unwrap();
    hanging.called(1).await;
    buffer.stop(Duration::from_millis(1)).await;
    assert_eq!(memory.status().await.unwrap().queued, 1);
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, options);
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn the_only_worker_of_a_store_takes_over_from_a_dead_one_at_once() {
    let home = Home::new();
    let hanging = StubEmbedder::gated();
    let options = BufferOptions {
        lease: Duration::from_secs(3600),
        ownership: Ownership::Exclusive,
        ..quick()
    };
    let (memory, buffer) = home.embedding(&hanging, options.clone());
    for n in 0..20 {
        memory.save(None, knowledge(&format!("k{n}"))).await.unwrap();
    }
    hanging.called(1).await;
    buffer.stop(Duration::from_millis(1)).await;
    let embedder = StubEmbedder::new();
    let (memory, buffer) = home.embedding(&embedder, options);
    until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
    assert_eq!(embedder.texts().len(), 20, "each is embedded once");
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn an_entry_saved_again_while_it_is_embedded_stays_due() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("k"), knowledge("old")).await.unwrap();
    embedder.called(1).await;
    memory.save(id("k"), knowledge("new")).await.unwrap();
    embedder.let_through(10);
    until_status(&memory, |status| status.queued == 0).await;
    assert_eq!(embedder.texts(), ["old", "new"]);
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn an_entry_deleted_while_it_is_embedded_gets_no_vector() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("k"), knowledge("old")).await.unwrap();
    embedder.called(1).await;
    memory.delete(MemoryKind::Knowledge, "k").await.unwrap();
    embedder.let_through(10);
    buffer.stop(SOON).await;
    assert!(home.vectors(MemoryKind::Knowledge).await.is_empty());
}

fn down() -> Reply {
    Reply::Fail(ModelError::Unavailable("the provider is down".into()))
}

fn broken() -> Reply {
    Reply::Fail(ModelError::Failed("the model is broken".into()))
}

fn refused() -> Reply {
    Reply::Fail(ModelError::Remote(RemoteFailure {
        provider: "p".into(),
        fault: RemoteFault::Refused { status: 400 },
        reason: "because".into(),
    }))
}

#[tokio::test]
async fn an_outage_uses_up_no_attempts_and_is_over_once_a_call_succeeds() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let outage = BufferOptions::default().backoff.max_attempts + quick().backoff.max_attempts + 5;
    embedder.reply((0..outage).map(|_| down()));
    let (memory, buffer) = home.embedding(&embedder, quick());
    for n in 0..20 {
        memory.save(None, knowledge(&format!("k{n}"))).await.unwrap();
    }
    until_status(&memory, |status| status.embedded == 20 && status.queued == 0).await;
    assert_eq!(memory.status().await.unwrap().failed, 0);
    buffer.stop(SOON).await;
}

/// Long texts go out in many calls; those that fail take nothing from those that do not.
#[tokio::test]
async fn where_some_calls_fail_what_others_embedded_is_not_sent_again() {
    for ownership in [Ownership::Exclusive, Ownership::Shared] {
        let home = Home::new();
        let plain = home.plain().await;
        for n in 0..100 {
            let text = format!("{n} {}", "long ".repeat(200));
            plain.save(None, knowledge(&text)).await.unwrap();
        }
        let embedder = StubEmbedder::limited(CallLimits {
            texts: 64,
            bytes: 3100,
        });
        // Every fourth call fails, again and again.
        let script = (0..200).map(|n| if n % 4 == 3 { down() } else { Reply::Answer });
        embedder.reply(script);
        let options = BufferOptions {
            batch: 64,
            ownership,
            ..quick()
        };
        let (memory, buffer) = home.embedding(&embedder, options);
        until_status(&memory, |status| status.embedded == 100 && status.queued == 0).await;
        buffer.stop(SOON).await;
        let calls = embedder.calls();
        assert!(calls.iter().all(|texts| texts.concat().len() <= 3100));
        // The replies are dealt out in the order of the calls, of which two rounds may make some at
        // the same time; so what is counted are texts, not which of them.
        let failed = calls.len() / 4;
        let sent: usize = calls.iter().map(Vec::len).sum();
        assert!(sent <= 100 + 3 * failed, "{sent} texts in {} calls", calls.len());
    }
}

#[tokio::test]
async fn the_next_round_takes_what_a_round_had_no_time_for() {
    for ownership in [Ownership::Exclusive, Ownership::Shared] {
        let home = Home::new();
        let plain = home.plain().await;
        for n in 0..9 {
            plain.save(None, knowledge(&format!("k{n}"))).await.unwrap();
        }
        let embedder = StubEmbedder::limited(CallLimits {
            texts: 1,
            ..CallLimits::NONE
        });
        embedder.hold_back();
        let options = BufferOptions {
            parallel: 1,
            ownership,
            lease: Duration::from_secs(3600),
            ..quick()
        };
        let (memory, buffer) = home.embedding(&embedder, options);
        // The first calls of the rounds come back when it is too late to begin others.
        embedder.called(2).await;
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(2000)).await;
        tokio::time::resume();
        embedder.let_through(1000);
        buffer.stop(SOON).await;
        assert_eq!(memory.status().await.unwrap().embedded, 9);
        assert_eq!(embedder.texts().len(), 9, "each is embedded once");
    }
}

#[tokio::test]
async fn the_reason_why_nothing_is_embedded_is_told_until_something_is() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply((0..3).map(|_| down()));
    let (memory, buffer) = home.embedding(&embedder, quick());
    assert_eq!(memory.status().await.unwrap().last_error, None);
    memory.save(None, knowledge("text")).await.unwrap();
    until_status(&memory, |status| {
        status.last_error.as_deref() == Some("the provider is down")
    })
    .await;
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    buffer.stop(SOON).await;
    assert_eq!(memory.status().await.unwrap().last_error, None);
}

#[tokio::test]
async fn a_store_that_is_away_uses_up_no_attempts_either() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    let outage = (quick().backoff.max_attempts + 5) as usize;
    let store = Arc::new(WatchedStore {
        inner: home.store.clone(),
        meeting: None,
        broken: None,
        away: outage.into(),
    });
    let buffer = Buffer::start(home.records(), store.clone(), embedder.clone(), quick());
    let memory = Memory::with_embedding(home.records(), store, buffer.clone());
    memory.save(None, knowledge("text")).await.unwrap();
    until_status(&memory, |status| {
        assert_eq!(status.failed, 0);
        status.embedded == 1 && status.queued == 0
    })
    .await;
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_provider_that_refuses_everything_is_not_blamed_on_the_texts() {
    let home = Home::new();
    let plain = home.plain().await;
    for n in 0..4 {
        plain.save(None, knowledge(&format!("k{n}"))).await.unwrap();
    }
    let embedder = StubEmbedder::new();
    embedder.reply([refused(), refused()]);
    let (memory, buffer) = home.embedding(&embedder, quick());
    until_status(&memory, |status| {
        assert_eq!(status.failed, 0);
        status.embedded == 4 && status.queued == 0
    })
    .await;
    let calls = embedder.calls();
    assert_eq!(
        (calls[0].len(), calls[1].as_slice()),
        (4, &["ragstone".to_owned()][..])
    );
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_text_that_a_provider_refuses_alone_is_given_up_and_taken_up_at_the_next_start() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply([refused()]);
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("k"), knowledge("text")).await.unwrap();
    until_status(&memory, |status| status.failed == 1 && status.queued == 0).await;
    buffer.stop(SOON).await;
    let (memory, buffer) = home.embedding(&embedder, quick());
    until_status(&memory, |status| status.embedded == 1 && status.failed == 0).await;
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_failed_batch_is_tried_again_after_a_pause() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply([down(), Reply::Fail(ModelError::Failed("wrong width".into()))]);
    let (memory, buffer) = home.embedding(&embedder, quick());
    memory.save(id("k"), knowledge("text")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.queued == 0).await;
    assert_eq!(embedder.calls().len(), 3);
    assert_eq!(memory.status().await.unwrap().failed, 0);
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_store_that_takes_no_more_writes_does_not_have_the_provider_asked_again_and_again() {
    let home = Home::new();
    let embedder = StubEmbedder::gated();
    let unhurried = BufferOptions {
        ownership: Ownership::Exclusive,
        backoff: Backoff {
            first_delay: SOON,
            max_delay: SOON,
            ..quick().backoff
        },
        ..quick()
    };
    let records = Arc::new(FrozenRecords {
        records: home.records(),
        frozen: AtomicBool::new(false),
    });
    let buffer = Buffer::start(records.clone(), home.store.clone(), embedder.clone(), unhurried);
    let memory = Memory::with_embedding(records.clone(), home.store.clone(), buffer.clone());
    memory.save(id("k"), knowledge("text")).await.unwrap();
    embedder.called(1).await;
    records.frozen.store(true, Ordering::Relaxed);
    embedder.let_through(1000);
    // Long enough for many rounds, were there no pause: the entry is still due.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(memory.status().await.unwrap().queued, 1);
    // Rounds overlap: the next one may have begun before the failure was noted.
    assert!(embedder.calls().len() <= 2, "{}", embedder.calls().len());
    buffer.stop(Duration::ZERO).await;
}

#[tokio::test]
async fn an_entry_that_fails_too_often_is_marked_with_its_error_and_tried_again_much_later() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply([broken(), broken(), broken()]);
    let patient = BufferOptions {
        retry_failed_after: SOON * 100,
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, patient);
    memory.save(id("k"), knowledge("text")).await.unwrap();
    until_status(&memory, |status| status.failed == 1 && status.queued == 0).await;
    let entry = memory.entry(MemoryKind::Knowledge, "k").await.unwrap().unwrap();
    assert_eq!(
        entry.embedding,
        EmbeddingState::Failed("the model is broken".into())
    );
    assert_eq!(embedder.calls().len(), 3);
    // Saving it again is a fresh start.
    memory.save(id("k"), knowledge("text, again")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.failed == 0).await;
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn what_was_given_up_is_tried_again_by_itself() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply([broken(), broken(), broken()]);
    let impatient = BufferOptions {
        retry_failed_after: Duration::from_millis(30),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, impatient);
    memory.save(id("k"), knowledge("text")).await.unwrap();
    until_status(&memory, |status| status.embedded == 1 && status.failed == 0).await;
    assert_eq!(embedder.calls().len(), 4);
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn a_text_that_the_model_refuses_does_not_hold_up_the_others() {
    let home = Home::new();
    let embedder = StubEmbedder::new();
    embedder.reply([Reply::Refuse("k3")]);
    let options = BufferOptions {
        batch_window: Duration::from_secs(3600),
        poll_interval: Duration::from_secs(3600),
        ..quick()
    };
    let (memory, buffer) = home.embedding(&embedder, options);
    for n in 0..8 {
        memory
            .save(id(&n.to_string()), knowledge(&format!("k{n}")))
            .await
            .unwrap();
    }
    until_status(&memory, |status| status.embedded == 7 && status.queued == 0).await;
    until_status(&memory, |status| status.failed == 1).await;
    let entry = memory.entry(MemoryKind::Knowledge, "3").await.unwrap().unwrap();
    assert_eq!(
        entry.embedding,
        EmbeddingState::Failed("this text cannot be read".into())
    );
    buffer.stop(SOON).await;
}

#[tokio::test]
async fn the_entries_of_a_dead_process_can_be_claimed_within_thirty_seconds() {
    for options in [BufferOptions::default(), BufferOptions::in_process()] {
        let home = Home::new();
        let plain = home.plain().await;
        plain.save(id("k"), knowledge("text")).await.unwrap();
        let kinds = [MemoryKind::Knowledge.records()];
        home.store.apply(vec![due_now(&home).await]).await.unwrap();
        let leases = Leases::new(Ownership::Shared, options.lease);
        let claimed_at = async |now| {
            let request = ClaimRequest::new(&kinds, 1, now);
            let mut claim = leases.claim(home.store.as_ref(), request).await.unwrap();
            claim.take().concat().len()
        };
        let died = now();
        assert_eq!(claimed_at(died).await, 1);
        assert_eq!(claimed_at(died + 1000).await, 0, "it may be alive");
        // The other process may have polled just before the lease ran out.
        let last_poll = died + 30_000 - millis(options.poll_interval);
        assert_eq!(claimed_at(last_poll).await, 1);
    }
}

async fn due_now(home: &Home) -> RecordChange {
    let kind = MemoryKind::Knowledge.records();
    let found = home.store.get(kind, &["k".to_owned()]).await.unwrap();
    RecordChange::Put {
        kind: kind.to_owned(),
        key: "k".to_owned(),
        group: String::new(),
        value: found[0].value.clone(),
        run_at: Some(now()),
        expect: Expect::Anything,
    }
}
