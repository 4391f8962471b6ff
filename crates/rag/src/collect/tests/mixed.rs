//! Collections of services that rank by words, beside those of services that do not.

use async_trait::async_trait;
use ragstone_core::conversation::QueryVariant;
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::provider::{Health, Reranked};
use ragstone_core::storage::{DocumentPage, MetadataUpdate, Page, Selection};
use ragstone_core::{Collection, Filter};
use serde_json::Value;

use super::*;

/// A backend like this process, but for words.
struct ByMeaning(LocalProvider);

#[async_trait]
impl RagProvider for ByMeaning {
    fn capabilities(&self) -> &'static [Capability] {
        &[Capability::Collections, Capability::Search]
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError> {
        self.0.collection(name).await
    }

    async fn search(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        assert_eq!(query.options.get("mode"), None, "this backend knows one mode");
        self.0.search(name, query).await
    }

    async fn health(&self) -> Health {
        unreachable!("it is only searched")
    }

    async fn create_collection(&self, _: &CollectionName, _: Metadata) -> Result<Metadata, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn collections(&self) -> Result<Vec<Collection>, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn update_metadata(
        &self,
        _: &CollectionName,
        _: Metadata,
        _: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn delete_collection(&self, _: &CollectionName) -> Result<(), ProviderError> {
        unreachable!("it is only searched")
    }

    async fn add_documents(&self, _: &CollectionName, _: Vec<NewDocument>) -> Result<Added, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn documents(
        &self,
        _: &CollectionName,
        _: &Filter,
        _: Page,
    ) -> Result<DocumentPage, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn delete_documents(&self, _: &CollectionName, _: Selection) -> Result<u64, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn empty(&self, _: &CollectionName) -> Result<u64, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn metadata_values(&self, _: &CollectionName, _: &str) -> Result<Vec<Value>, ProviderError> {
        unreachable!("it is only searched")
    }

    async fn rerank(&self, _: &str, _: Vec<Metadata>, _: Option<usize>) -> Reranked {
        unreachable!("it is only searched")
    }
}

fn by_meaning(parts: &Parts, name: &str) -> Target {
    let mut target = target(parts, "dense", name);
    target.service.backend = Arc::new(ByMeaning(LocalProvider::new(parts.service.clone())));
    target
}

const SHARED: &str = "the garden gate is painted green every spring";
const FRUIT: [&str; 5] = [
    "apples ripen late in a cold autumn",
    "a pear tree needs a warm wall",
    "cherries are picked before the birds come",
    "plums are dried for the winter",
    "quinces are hard until they are cooked",
];
const TOOLS: [&str; 5] = [
    "a spade is sharpened with a file",
    "the rake hangs behind the shed",
    "a wheelbarrow needs air in its tyre",
    "shears are oiled after the hedge is cut",
    "the hose is emptied before the frost",
];

/// One document, the same in both collections, among others.
async fn two_collections() -> Parts {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    for (name, others) in [("a", FRUIT), ("b", TOOLS)] {
        let mut texts = others.to_vec();
        texts.insert(2, SHARED);
        parts
            .collection(name, json!({"embedding_model": "words"}), &texts)
            .await;
    }
    parts
}

fn one_wording(text: &str) -> Vec<QueryVariant> {
    by_topic(text, None, None).queries
}

/// As a conversation asks: the topic so far, and the message alone.
fn two_wordings(text: &str) -> Vec<QueryVariant> {
    let wording = |text: &str, weight, alone| QueryVariant {
        text: text.to_owned(),
        keywords: text.to_owned(),
        weight,
        alone,
    };
    vec![
        wording(&format!("a wall in the garden {text}"), 0.6, false),
        wording(text, 0.4, true),
    ]
}

async fn texts(parts: &Parts, queries: Vec<QueryVariant>, mode: ModeChoice, other: Target) -> Vec<String> {
    let request = Request {
        plan: Plan {
            queries,
            ..by_topic("unused", None, None)
        },
        mode,
        ..request(parts, "unused", vec![target(parts, LOCAL, "a"), other])
    };
    let hits = collect(&parts.service.models, &request).await.hits;
    hits.into_iter().map(|hit| hit.document.text).collect()
}

#[tokio::test]
async fn a_document_stands_as_high_wherever_it_is() {
    let parts = two_collections().await;
    let question = "when is the garden gate painted";
    for queries in [one_wording(question), two_wordings(question)] {
        for other in [target(&parts, "far", "b"), by_meaning(&parts, "b")] {
            for mode in [ModeChoice::Best, ModeChoice::Given(Mode::Hybrid)] {
                let service = other.service.name.clone();
                let found = texts(&parts, queries.clone(), mode, other.clone()).await;
                assert_eq!(found[..2], [SHARED, SHARED], "{service}, {mode:?}: {found:?}");
            }
        }
    }
    let by_word = ModeChoice::Given(Mode::Keyword);
    let found = texts(&parts, one_wording(question), by_word, by_meaning(&parts, "b")).await;
    assert_eq!(found[..2], [SHARED, SHARED], "{found:?}");
}

/// What has the words of the question is not buried because its service does not look at words.
#[tokio::test]
async fn what_is_elsewhere_is_found_before_worse_ones_here() {
    let parts = two_collections().await;
    let question = "how is a spade sharpened";
    for queries in [one_wording(question), two_wordings(question)] {
        for other in [target(&parts, "far", "b"), by_meaning(&parts, "b")] {
            let found = texts(&parts, queries.clone(), ModeChoice::Best, other).await;
            assert_eq!(found[0], TOOLS[0], "{found:?}");
        }
    }
}

#[tokio::test]
async fn words_count_wherever_the_service_ranks_by_them() {
    let parts = two_collections().await;
    for (target, mode) in [
        (target(&parts, LOCAL, "a"), Mode::Hybrid),
        (target(&parts, "far", "b"), Mode::Hybrid),
        (by_meaning(&parts, "b"), Mode::Dense),
    ] {
        assert_eq!(
            ModeChoice::Best.of(&target.service),
            mode,
            "{}",
            target.service.name
        );
    }
}
