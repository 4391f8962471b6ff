//! Runs at the same time, and collections that reuse a name.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::CollectionName;
use ragstone_core::model::{
    EmbedInput, Embedder, Embedding, ModelError, ModelInfo, RemoteFailure, RemoteFault, Role,
};
use tokio::sync::mpsc;

use super::WordModel;
use super::run::{Bench, counts, text};
use crate::embed::embed;
use crate::{IngestTarget, Progress};
use ragstone_core::models::Models;

/// Takes its time, so that others come to need the same.
struct SlowModel(Arc<WordModel>);

#[async_trait]
impl Embedder for SlowModel {
    fn info(&self) -> &ModelInfo {
        self.0.info()
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        tokio::time::sleep(Duration::from_millis(200)).await;
        self.0.embed(inputs, role).await
    }
}

#[tokio::test]
async fn two_runs_at_once_have_the_same_content_embedded_once() {
    let mut bench = Bench::new().await;
    let slow = Arc::new(SlowModel(bench.model.clone()));
    bench.parts.service.models = Arc::new(Models::new(vec![slow], None));
    bench.create("d").await;
    let ingestion = bench.ingestion();
    let run = async |collection: &str, order: fn(usize) -> usize| {
        let target = IngestTarget {
            collection: CollectionName::parse(collection).unwrap(),
            chunk_tokens: Some(20),
        };
        let prepared = ingestion.check(&target).await.unwrap();
        let (sender, receiver) = mpsc::channel(2000);
        for n in 0..1000 {
            let n = order(n);
            let file = text(&format!("{n}.txt"), &format!("text number {n}"));
            sender.send(file).await.unwrap();
        }
        drop(sender);
        let progress = Arc::new(Progress::default());
        ingestion
            .run(prepared, receiver, Arc::clone(&progress))
            .await
            .unwrap();
        counts(&progress.snapshot())
    };
    // One from the beginning and one from the end: each meets what the other has with the model.
    let done = tokio::join!(run("c", |n| n), run("d", |n| 999 - n));
    assert_eq!(done, ((1000, 0, 0, 0, 0), (1000, 0, 0, 0, 0)));
    assert_eq!(bench.model.embedded(), 1000);
}

/// Answers with another version than is configured, whatever it is asked.
struct OtherModel(AtomicUsize, Arc<WordModel>);

#[async_trait]
impl Embedder for OtherModel {
    fn info(&self) -> &ModelInfo {
        self.1.info()
    }

    async fn embed(&self, _: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(ModelError::Remote(RemoteFailure {
            provider: "theirs".into(),
            fault: RemoteFault::OtherModel,
            reason: "version 'v2'".into(),
        }))
    }
}

#[tokio::test]
async fn texts_are_not_blamed_for_another_version_of_the_model() {
    let model = OtherModel(AtomicUsize::new(0), WordModel::new("1"));
    let texts = (0..5).map(|n| n.to_string()).collect();
    assert!(embed(&model, texts, 3).await.is_err());
    assert_eq!(model.0.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn the_sources_of_a_deleted_collection_are_forgotten() {
    let bench = Bench::new().await;
    bench
        .ingest("c", vec![text("a.md", "one"), text("b.md", "")])
        .await;
    let name = CollectionName::parse("c").unwrap();
    bench.parts.service.store.delete_collection(&name).await.unwrap();
    bench.ingestion().forget_collection(&name).await.unwrap();
    bench.create("c").await;
    assert_eq!(bench.ingestion().sources(&name).await.unwrap(), []);
    let report = bench
        .ingest("c", vec![text("a.md", "one"), text("b.md", "")])
        .await;
    assert_eq!(counts(&report), (2, 0, 0, 0, 0));
}
