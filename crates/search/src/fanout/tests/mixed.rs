//! Collections of services that rank by words, beside those of services that do not.

use super::*;

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
    let alone = QueryVariant {
        alone: true,
        ..wording(text, 0.4)
    };
    vec![wording(&format!("a wall in the garden {text}"), 0.6), alone]
}

async fn texts(parts: &Parts, queries: Vec<QueryVariant>, mode: ModeChoice, other: Target) -> Vec<String> {
    let mut query = query(parts, "unused", vec![target(parts, LOCAL, "a"), other]);
    query.wordings = queries;
    query.mode = mode;
    let hits = search(&query).await.hits;
    hits.into_iter().map(|hit| hit.hit.document.text).collect()
}

#[tokio::test]
async fn a_document_stands_as_high_wherever_it_is() {
    let parts = two_collections().await;
    let question = "when is the garden gate painted";
    for queries in [one_wording(question), two_wordings(question)] {
        for other in [target(&parts, "far", "b"), by_meaning(&parts, "b")] {
            for mode in [ModeChoice::Best, ModeChoice::Given(SearchMode::Hybrid)] {
                let service = other.service.name.clone();
                let found = texts(&parts, queries.clone(), mode, other.clone()).await;
                assert_eq!(found[..2], [SHARED, SHARED], "{service}, {mode:?}: {found:?}");
            }
        }
    }
    let by_word = ModeChoice::Given(SearchMode::Keyword);
    let found = texts(&parts, one_wording(question), by_word, by_meaning(&parts, "b")).await;
    assert_eq!(found[..2], [SHARED, SHARED], "{found:?}");
}

/// A hit with the words of the question is not buried because its service ranks by vectors only.
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
        (target(&parts, LOCAL, "a"), SearchMode::Hybrid),
        (target(&parts, "far", "b"), SearchMode::Hybrid),
        (by_meaning(&parts, "b"), SearchMode::Dense),
    ] {
        assert_eq!(
            ModeChoice::Best.of(&target.service),
            mode,
            "{}",
            target.service.name
        );
    }
}
