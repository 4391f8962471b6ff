//! Jobs against a real store, with workers that come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::filter::Filter;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, ModelInfo, Role};
use ragstone_core::records::{RecordChange, Records};
use ragstone_core::storage::Page;
use serde_json::json;

use super::*;
use crate::ReadOptions;
use crate::ledger::Ledger;
use ragstone_core::models::Models;
use ragstone_search::testing::{Parts, WordEmbedder, parts};

async fn setup() -> (Parts, Jobs) {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    create(&parts, "c", "words").await;
    let jobs = jobs(&parts);
    (parts, jobs)
}

async fn create(parts: &Parts, name: &str, model: &str) {
    let metadata = json!({"embedding_model": model}).as_object().unwrap().clone();
    let name = CollectionName::parse(name).unwrap();
    let created = parts.service.store.create_collection(&name, metadata).await;
    created.unwrap();
}

fn jobs(parts: &Parts) -> Jobs {
    jobs_up_to(parts, 1000)
}

fn jobs_up_to(parts: &Parts, max_open: u64) -> Jobs {
    let ingestion = Ingestion {
        service: parts.service.clone(),
        records: parts.store.clone(),
        ledger: Ledger::new(parts.store.clone()),
        read: ReadOptions::default(),
        attempts: 1,
    };
    Jobs::new(ingestion, max_open)
}

/// Away until it is told to be there.
struct AwayEmbedder {
    there: AtomicBool,
    model: Arc<WordEmbedder>,
}

#[async_trait]
impl Embedder for AwayEmbedder {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        if self.there.load(Ordering::Relaxed) {
            return self.model.embed(inputs, role).await;
        }
        Err(ModelError::Unavailable("nobody answers".to_owned()))
    }
}

fn new_job(items: Vec<(&str, Vec<u8>)>) -> NewJob {
    let items = items.into_iter().map(|(source, bytes)| NewItem {
        source: source.to_owned(),
        kind: FileKind::of_path(std::path::Path::new(source)),
        bytes,
        partial: None,
        options: InputOptions::default(),
    });
    NewJob {
        collection: CollectionName::parse("c").unwrap(),
        chunk_tokens: None,
        items: items.collect(),
    }
}

async fn finished(jobs: &Jobs, id: &str) -> Job {
    for _ in 0..2000 {
        let job = jobs.get(id).await.unwrap().unwrap();
        if job.state.is_final() {
            return job;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the job does not end");
}

async fn count(parts: &Parts) -> u64 {
    let name = CollectionName::parse("c").unwrap();
    let page = Page { limit: 0, offset: 0 };
    parts
        .service
        .store
        .documents(&name, &Filter::everything(), page)
        .await
        .unwrap()
        .total
}

/// How many records hold what jobs were given, besides the lists of it.
async fn payload(parts: &Parts) -> u64 {
    parts.store.counts(stored::PART_KIND).await.unwrap().total
}

async fn lists(parts: &Parts) -> u64 {
    parts.store.counts(stored::ITEMS_KIND).await.unwrap().total
}

async fn raw(parts: &Parts, kind: &str, id: &str) -> Record {
    let found = parts.store.get(kind, &[id.to_owned()]).await.unwrap();
    found.into_iter().next().unwrap()
}

#[tokio::test]
async fn a_job_is_refused_while_too_many_are_not_finished() {
    let (parts, _) = setup().await;
    let jobs = jobs_up_to(&parts, 2);
    let submit = || jobs.submit(new_job(vec![("a.txt", b"text".to_vec())]));
    let first = submit().await.unwrap();
    let second = submit().await.unwrap();
    let refused = submit().await.unwrap_err();
    assert!(
        matches!(refused, JobError::TooManyJobs { open: 2, bytes: 8 }),
        "{refused}"
    );
    assert_eq!(
        (lists(&parts).await, payload(&parts).await),
        (2, 2),
        "nothing is stored"
    );
    jobs.cancel(&first.id).await.unwrap();
    let third = submit().await.unwrap();
    assert!(submit().await.is_err());
    let worker = jobs.worker().start();
    for job in [second, third] {
        assert_eq!(finished(&jobs, &job.id).await.state, JobState::Done);
    }
    worker.stop().await;
    submit().await.unwrap();
}

#[tokio::test]
async fn a_job_is_refused_while_unfinished_ones_hold_too_many_bytes() {
    let (parts, mut jobs) = setup().await;
    jobs.max_open_bytes = 1000;
    let submit = async |bytes: usize| jobs.submit(new_job(vec![("a.txt", vec![b'x'; bytes])])).await;
    let large = submit(5000).await.unwrap();
    let refused = submit(1).await.unwrap_err();
    assert!(
        matches!(refused, JobError::TooManyJobs { open: 1, bytes: 5000 }),
        "{refused}"
    );
    jobs.cancel(&large.id).await.unwrap();
    submit(400).await.unwrap();
    submit(600).await.unwrap();
    assert!(submit(1).await.is_err());
    assert_eq!(parts.store.counts(stored::SIZE_KIND).await.unwrap().total, 2);
}

#[tokio::test]
async fn jobs_are_listed_in_pages_newest_first() {
    let (parts, jobs) = setup().await;
    create(&parts, "d", "words").await;
    let mut ids = Vec::new();
    for n in 0..7 {
        let new = NewJob {
            collection: CollectionName::parse(if n == 3 { "d" } else { "c" }).unwrap(),
            ..new_job(vec![("a.txt", b"text".to_vec())])
        };
        ids.push(jobs.submit(new).await.unwrap().id);
        // Ids of one millisecond are in no order.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    jobs.cancel(&ids[1]).await.unwrap();
    jobs.cancel(&ids[5]).await.unwrap();
    ids.reverse();
    let pages = async |collection: Option<&CollectionName>| {
        let (mut pages, mut before) = (Vec::new(), None);
        loop {
            let page = jobs.page(collection, before.as_deref(), 3).await.unwrap();
            pages.push(page.jobs.into_iter().map(|job| job.id).collect::<Vec<_>>());
            before = page.next;
            if before.is_none() {
                return pages;
            }
        }
    };
    let all = pages(None).await;
    assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
    assert_eq!(all.concat(), ids);
    let c = CollectionName::parse("c").unwrap();
    ids.remove(3);
    assert_eq!(pages(Some(&c)).await.concat(), ids);
}

/// The first claim of a job after its worker died, as the next process makes it.
async fn crash(parts: &Parts, id: &str) {
    let record = raw(parts, KIND, id).await;
    let due = RecordChange::Put {
        kind: KIND.to_owned(),
        key: id.to_owned(),
        group: record.group,
        value: record.value,
        run_at: Some(now()),
        expect: Expect::Anything,
    };
    parts.store.apply(vec![due]).await.unwrap();
}

/// Never answers for a text with this word, so that its worker can die meanwhile.
struct DeadlyEmbedder {
    model: Arc<WordEmbedder>,
    reached: Notify,
}

#[async_trait]
impl Embedder for DeadlyEmbedder {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        let is_deadly =
            |input: &EmbedInput| matches!(input, EmbedInput::Text(text) if text.contains("deadly"));
        if inputs.iter().any(is_deadly) {
            self.reached.notify_one();
            std::future::pending::<()>().await;
        }
        self.model.embed(inputs, role).await
    }
}

#[tokio::test]
async fn a_job_whose_document_kills_the_process_is_given_up_and_others_are_done() {
    let deadly = Arc::new(DeadlyEmbedder {
        model: WordEmbedder::new("words"),
        reached: Notify::new(),
    });
    let parts = parts(Models::new(vec![Arc::clone(&deadly) as _], None));
    create(&parts, "c", "words").await;
    let jobs = jobs(&parts);
    let documents = ["harmless", "deadly", "also harmless"];
    let names: Vec<String> = documents.iter().map(|text| format!("{text}.txt")).collect();
    let items = names.iter().zip(documents);
    let items = items.map(|(name, text)| (name.as_str(), text.as_bytes().to_vec()));
    let job = jobs.submit(new_job(items.collect())).await.unwrap();
    let mut crashes = 0;
    while !jobs.get(&job.id).await.unwrap().unwrap().state.is_final() {
        let worker = jobs.worker().start();
        tokio::select! {
            () = deadly.reached.notified() => crashes += 1,
            _ = finished(&jobs, &job.id) => {}
        }
        // The worker dies without releasing its job.
        drop(worker);
        crash(&parts, &job.id).await;
        assert!(crashes < 10, "the job is never given up");
    }
    let failed = jobs.get(&job.id).await.unwrap().unwrap();
    assert_eq!((failed.state, crashes), (JobState::Failed, 4), "{failed:?}");
    let error = failed.error.unwrap();
    assert!(error.contains("'deadly.txt'"), "{error}");
    assert_eq!(failed.report.documents.added, 1, "those before it are stored");
    assert_eq!((payload(&parts).await, lists(&parts).await), (0, 0));
}

#[tokio::test]
async fn a_server_that_stops_properly_counts_no_crash() {
    let deadly = Arc::new(DeadlyEmbedder {
        model: WordEmbedder::new("words"),
        reached: Notify::new(),
    });
    let parts = parts(Models::new(vec![Arc::clone(&deadly) as _], None));
    create(&parts, "c", "words").await;
    let jobs = jobs(&parts);
    let item = vec![("a.txt", b"deadly".to_vec())];
    let job = jobs.submit(new_job(item)).await.unwrap();
    for _ in 0..5 {
        let worker = jobs.worker().start();
        deadly.reached.notified().await;
        worker.stop().await;
    }
    let waiting = jobs.get(&job.id).await.unwrap().unwrap();
    assert_eq!(waiting.state, JobState::Queued);
}

#[tokio::test]
async fn the_job_of_a_dead_process_can_be_claimed_within_thirty_seconds() {
    let (_parts, jobs) = setup().await;
    let job = jobs
        .submit(new_job(vec![("a.txt", b"text".to_vec())]))
        .await
        .unwrap();
    let claimed_at = async |now| worker::claim(&jobs, now).await.unwrap().map(|record| record.key);
    let died = now();
    assert_eq!(claimed_at(died).await.as_ref(), Some(&job.id));
    assert_eq!(claimed_at(died + 1000).await, None, "it may be alive");
    // The other process may have polled just before the lease ran out.
    let last_poll = died + 30_000 - ragstone_lease::millis(worker::POLL_INTERVAL);
    assert_eq!(claimed_at(last_poll).await, Some(job.id));
}

/// It is written after every group of documents, and every few seconds.
#[tokio::test]
async fn the_record_of_a_job_is_small_however_many_documents_it_was_given() {
    let (parts, jobs) = setup().await;
    let names: Vec<String> = (0..300).map(|n| format!("{n}{}.txt", "x".repeat(900))).collect();
    let items = names.iter().map(|name| (name.as_str(), b"text".to_vec()));
    let job = jobs.submit(new_job(items.collect())).await.unwrap();
    assert!(raw(&parts, KIND, &job.id).await.value.len() < 1000);
    assert_eq!((job.items, job.bytes), (300, 1200));
    let worker = jobs.worker().start();
    let done = finished(&jobs, &job.id).await;
    assert_eq!(done.report.documents.added, 300);
    assert!(raw(&parts, KIND, &job.id).await.value.len() < 1000);
    worker.stop().await;
    assert_eq!((payload(&parts).await, lists(&parts).await), (0, 0));
}

#[tokio::test]
async fn a_job_that_an_older_version_took_is_done() {
    let (parts, jobs) = setup().await;
    let one = vec![("a.txt", b"one".to_vec()), ("b.txt", b"two".to_vec())];
    let job = jobs.submit(new_job(one)).await.unwrap();
    // Its items stood in the record itself, and there was no count of them.
    let record = raw(&parts, KIND, &job.id).await;
    let list = raw(&parts, stored::ITEMS_KIND, &job.id).await;
    let mut value: serde_json::Value = serde_json::from_slice(&record.value).unwrap();
    let fields = value.as_object_mut().unwrap();
    fields.remove("item_count").unwrap();
    fields.remove("bytes").unwrap();
    fields.insert("items".into(), serde_json::from_slice(&list.value).unwrap());
    let older = RecordChange::Put {
        kind: KIND.to_owned(),
        key: job.id.clone(),
        group: record.group,
        value: serde_json::to_vec(&value).unwrap(),
        run_at: record.run_at,
        expect: Expect::Anything,
    };
    let no_list = RecordChange::Delete {
        kind: stored::ITEMS_KIND.to_owned(),
        key: job.id.clone(),
        expect: Expect::Anything,
    };
    parts.store.apply(vec![older, no_list]).await.unwrap();
    let waiting = jobs.get(&job.id).await.unwrap().unwrap();
    assert_eq!((waiting.items, waiting.bytes), (2, 6));
    let worker = jobs.worker().start();
    let done = finished(&jobs, &job.id).await;
    assert_eq!((done.state, done.report.documents.added), (JobState::Done, 2));
    worker.stop().await;
    assert_eq!(payload(&parts).await, 0);
}

#[tokio::test]
async fn a_job_whose_documents_are_gone_fails_and_says_so() {
    let (parts, jobs) = setup().await;
    let one = vec![("a.txt", b"one".to_vec())];
    let job = jobs.submit(new_job(one)).await.unwrap();
    let gone = RecordChange::Delete {
        kind: stored::ITEMS_KIND.to_owned(),
        key: job.id.clone(),
        expect: Expect::Anything,
    };
    parts.store.apply(vec![gone]).await.unwrap();
    let worker = jobs.worker().start();
    let failed = finished(&jobs, &job.id).await;
    let said = Some("its documents are no longer there");
    assert_eq!((failed.state, failed.error.as_deref()), (JobState::Failed, said));
    worker.stop().await;
}

#[tokio::test]
async fn a_job_is_done_and_its_documents_are_dropped_afterwards() {
    let (parts, jobs) = setup().await;
    let large = "many words and more of them ".repeat(100_000).into_bytes();
    let job = jobs
        .submit(new_job(vec![
            ("a.md", b"# A\n\none".to_vec()),
            ("b.txt", large),
            ("c.txt", vec![0, 0]),
        ]))
        .await
        .unwrap();
    assert_eq!(job.state, JobState::Queued);
    assert_eq!(payload(&parts).await, 5);
    let worker = jobs.worker().start();
    let done = finished(&jobs, &job.id).await;
    assert_eq!(done.state, JobState::Done);
    assert_eq!(
        (done.report.documents.added, done.report.documents.failed),
        (2, 1)
    );
    assert_eq!(done.report.errors[0].source, "c.txt");
    assert_eq!(payload(&parts).await, 0);
    assert!(count(&parts).await > 1);
    assert_eq!(jobs.list(None).await.unwrap().len(), 1);
    assert_eq!(
        jobs.list(Some(&CollectionName::parse("other").unwrap()))
            .await
            .unwrap()
            .len(),
        0
    );
    worker.stop().await;
}

#[tokio::test]
async fn a_job_goes_on_after_its_worker_was_stopped() {
    let (parts, first) = setup().await;
    let names: Vec<String> = (0..500).map(|n| format!("{n}.txt")).collect();
    let items = names
        .iter()
        .map(|name| (name.as_str(), format!("text of {name}").into_bytes()))
        .collect();
    let job = first.submit(new_job(items)).await.unwrap();
    let worker = first.worker().start();
    while first.get(&job.id).await.unwrap().unwrap().report.documents.added == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    worker.stop().await;
    let stopped = first.get(&job.id).await.unwrap().unwrap();
    let second = jobs(&parts);
    let worker = second.worker().start();
    let done = finished(&second, &job.id).await;
    assert_eq!(done.state, JobState::Done);
    assert!(done.report.documents.added + done.report.documents.unchanged >= 500);
    assert!(stopped.report.documents_done() <= done.report.documents_done());
    assert_eq!((count(&parts).await, payload(&parts).await), (500, 0));
    worker.stop().await;
}

#[tokio::test]
async fn two_workers_never_do_one_job_twice() {
    let (parts, one) = setup().await;
    let other = jobs(&parts);
    let mut ids = Vec::new();
    for n in 0..20 {
        let name = format!("{n}.txt");
        ids.push(
            one.submit(new_job(vec![(&name, format!("number {n}").into_bytes())]))
                .await
                .unwrap()
                .id,
        );
    }
    let workers = [one.worker().start(), other.worker().start()];
    for id in &ids {
        let job = finished(&one, id).await;
        assert_eq!(
            (
                job.state,
                job.report.documents.added,
                job.report.documents.unchanged
            ),
            (JobState::Done, 1, 0)
        );
    }
    assert_eq!(count(&parts).await, 20);
    for worker in workers {
        worker.stop().await;
    }
}

/// A worker that died holds its job until the lease is over; what came later must not overtake it.
#[tokio::test]
async fn jobs_of_a_collection_are_done_in_their_order_and_others_do_not_wait() {
    let (parts, jobs) = setup().await;
    create(&parts, "d", "words").await;
    let with = |text: &str| new_job(vec![("a.txt", text.as_bytes().to_vec())]);
    let old = jobs.submit(with("the old text")).await.unwrap();
    let lease = now() + 1500;
    let taken = parts.store.claim(KIND, 1, now(), lease).await.unwrap();
    assert_eq!(taken[0].key, old.id);
    let new = jobs.submit(with("the new text")).await.unwrap();
    let newest = jobs.submit(with("the newest text")).await.unwrap();
    let elsewhere = NewJob {
        collection: CollectionName::parse("d").unwrap(),
        ..with("other")
    };
    let elsewhere = jobs.submit(elsewhere).await.unwrap();
    let worker = jobs.worker().start();
    assert_eq!(finished(&jobs, &elsewhere.id).await.state, JobState::Done);
    assert_eq!(jobs.get(&old.id).await.unwrap().unwrap().state, JobState::Queued);
    let mut ended = Vec::new();
    for job in [&old, &new, &newest] {
        ended.push(finished(&jobs, &job.id).await.finished);
    }
    assert!(ended.is_sorted() && ended[0] >= Some(lease), "{ended:?} {lease}");
    let name = CollectionName::parse("c").unwrap();
    let page = Page { limit: 9, offset: 0 };
    let everything = Filter::everything();
    let there = parts.service.store.documents(&name, &everything, page);
    assert_eq!(there.await.unwrap().documents[0].text, "the newest text");
    let listed = jobs.list(Some(&name)).await.unwrap();
    let ids: Vec<&str> = listed.iter().map(|job| job.id.as_str()).collect();
    assert_eq!(ids, [&newest.id, &new.id, &old.id], "newest first");
    worker.stop().await;
}

#[tokio::test]
async fn a_job_whose_model_is_away_says_so_and_keeps_nobody_waiting() {
    let away = Arc::new(AwayEmbedder {
        there: AtomicBool::new(false),
        model: WordEmbedder::new("far"),
    });
    let models: Vec<Arc<dyn Embedder>> = vec![Arc::clone(&away) as _, WordEmbedder::new("words")];
    let parts = parts(Models::new(models, None));
    create(&parts, "c", "far").await;
    create(&parts, "d", "words").await;
    let jobs = jobs(&parts);
    let one = || vec![("a.txt", b"text".to_vec())];
    let waiting = jobs.submit(new_job(one())).await.unwrap();
    let worker = jobs.worker().start();
    let mut error = None;
    for _ in 0..1000 {
        error = jobs.get(&waiting.id).await.unwrap().unwrap().error;
        if error.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(error.is_some_and(|error| error.contains("nobody answers")));
    let other = NewJob {
        collection: CollectionName::parse("d").unwrap(),
        ..new_job(one())
    };
    let other = jobs.submit(other).await.unwrap();
    assert_eq!(finished(&jobs, &other.id).await.state, JobState::Done);
    assert!(!jobs.get(&waiting.id).await.unwrap().unwrap().state.is_final());
    away.there.store(true, Ordering::Relaxed);
    let done = finished(&jobs, &waiting.id).await;
    assert_eq!((done.state, done.error), (JobState::Done, None));
    worker.stop().await;
}

#[tokio::test]
async fn a_file_of_no_known_type_is_reported_and_does_not_stop_the_rest() {
    let (_parts, jobs) = setup().await;
    let job = jobs
        .submit(new_job(vec![
            ("a.png", vec![1, 2, 3]),
            ("a.txt", b"text".to_vec()),
        ]))
        .await
        .unwrap();
    let worker = jobs.worker().start();
    let done = finished(&jobs, &job.id).await;
    assert_eq!(
        (done.report.documents.added, done.report.documents.failed),
        (1, 1)
    );
    assert_eq!(done.report.bytes, done.bytes);
    assert_eq!(done.report.errors[0].source, "a.png");
    worker.stop().await;
}

#[tokio::test]
async fn a_cancelled_job_stays_cancelled() {
    let (parts, jobs) = setup().await;
    let job = jobs
        .submit(new_job(vec![("a.txt", b"one".to_vec())]))
        .await
        .unwrap();
    let cancelled = jobs.cancel(&job.id).await.unwrap().unwrap();
    assert_eq!(cancelled.state, JobState::Cancelled);
    let worker = jobs.worker().start();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(
        jobs.get(&job.id).await.unwrap().unwrap().state,
        JobState::Cancelled
    );
    assert_eq!((count(&parts).await, payload(&parts).await), (0, 0));
    assert_eq!(
        jobs.cancel(&job.id).await.unwrap().unwrap().state,
        JobState::Cancelled
    );
    assert!(jobs.cancel("none").await.unwrap().is_none());
    worker.stop().await;
}

#[tokio::test]
async fn a_job_whose_collection_is_deleted_fails_and_says_so() {
    let (parts, jobs) = setup().await;
    let job = jobs
        .submit(new_job(vec![("a.txt", b"one".to_vec())]))
        .await
        .unwrap();
    parts
        .service
        .store
        .delete_collection(&CollectionName::parse("c").unwrap())
        .await
        .unwrap();
    let worker = jobs.worker().start();
    let failed = finished(&jobs, &job.id).await;
    assert_eq!(
        (failed.state, failed.error.as_deref()),
        (JobState::Failed, Some("Collection 'c' not found"))
    );
    worker.stop().await;
}

#[tokio::test]
async fn what_cannot_be_a_job_is_refused() {
    let (_parts, jobs) = setup().await;
    let refused = async |new| jobs.submit(new).await.unwrap_err().to_string();
    assert_eq!(
        refused(new_job(vec![])).await,
        "Documents are required: send at least one"
    );
    assert_eq!(
        refused(new_job(vec![(" ", vec![])])).await,
        "Document at index 0: a name is required"
    );
    let twice = new_job(vec![("a.txt", vec![]), ("a.txt", vec![])]);
    assert_eq!(
        refused(twice).await,
        "Document at index 1: its name is that of an earlier document"
    );
    let mut part = new_job(vec![("a.txt", vec![])]);
    part.items[0].partial = Some(Earlier::default());
    assert_eq!(
        refused(part).await,
        "Document at index 0: only JSONL and CSV can come in parts"
    );
    assert_eq!(Arc::strong_count(&jobs.shared), 1);
}
