mod mixed;

use std::sync::Arc;

use ragstone_core::models::Models;
use ragstone_core::siblings::Expand;
use serde_json::json;

use super::*;
use crate::gateway::LOCAL;
use crate::plan::by_topic;
use crate::testing::{LengthReranker, Parts, WordEmbedder, parts};
use crate::{QueryVectors, StorageBackend};

/// A service whose collections are those of these parts; one with another name than `local` has a
/// cache of its own.
fn target(parts: &Parts, service: &str, name: &str) -> Target {
    Target {
        service: NamedBackend {
            name: service.to_owned(),
            provider: service.to_owned(),
            backend: Arc::new(parts.backend()),
        },
        name: CollectionName::parse(name).unwrap(),
    }
}

/// The collections of these parts in one service.
fn targets(parts: &Parts, names: &[&str]) -> Vec<Target> {
    let service = NamedBackend::local(parts.backend());
    names
        .iter()
        .map(|name| Target {
            service: service.clone(),
            name: CollectionName::parse(*name).unwrap(),
        })
        .collect()
}

fn query(parts: &Parts, message: &str, targets: Vec<Target>) -> FanoutQuery {
    let plan = by_topic(message, None, None);
    let mode = ModeChoice::Given(SearchMode::Dense);
    FanoutQuery::for_plan(&plan, targets, 5, mode, NamedBackend::local(parts.backend()))
}

fn found(query: &FanoutQuery, response: &FanoutResponse) -> Vec<String> {
    let name = |hit: &FanoutHit| {
        let Target { service, name } = &query.targets[hit.target];
        format!("{}/{name}/{}", service.name, hit.hit.document.id)
    };
    response.hits.iter().map(name).collect()
}

fn wording(text: &str, weight: f64) -> QueryVariant {
    QueryVariant {
        text: text.to_owned(),
        keywords: text.to_owned(),
        weight,
        alone: false,
    }
}

/// Collections that share connection and model share the query's vector.
#[tokio::test]
async fn embedding_cache_efficiency() {
    let words = WordEmbedder::new("words");
    let other = WordEmbedder::new("other");
    let parts = parts(Models::new(vec![words.clone(), other.clone()], None));
    for (name, metadata) in [
        ("a", json!({"embedding_model": "words"})),
        ("b", json!({"embedding_model": "words"})),
        ("c", json!({"embedding_model": "words"})),
        ("d", json!({"embedding_model": "other"})),
        (
            "e",
            json!({"embedding_model": "words", "embedding_provider": "elsewhere"}),
        ),
    ] {
        parts
            .collection(name, metadata, &["red apple", "green pear"])
            .await;
    }
    let (words_before, other_before) = (words.calls(), other.calls());
    let query = query(&parts, "apple", targets(&parts, &["a", "b", "c", "d", "e"]));
    let response = search(&query).await;
    assert!(response.warnings.is_empty(), "{:?}", response.warnings);
    assert_eq!(response.hits.len(), 5);
    assert_eq!(
        words.calls() - words_before,
        1,
        "the model is one, whatever connection names it"
    );
    assert_eq!(other.calls() - other_before, 1);
}

/// A text that is searched for again and measured again is embedded once.
#[tokio::test]
async fn nothing_is_embedded_twice() {
    let words = WordEmbedder::new("words");
    let parts = parts(Models::new(vec![words.clone()], None));
    let metadata = json!({"embedding_model": "words"});
    parts.collection("a", metadata, &["apple", "stone"]).await;
    let before = words.calls();
    let mut query = query(&parts, "apple", targets(&parts, &["a"]));
    query.wordings = vec![wording("apple", 0.5), wording("wall", 0.5)];
    query.reported = 1;
    query.mode = ModeChoice::Best;
    search(&query).await;
    search(&query).await;
    assert_eq!(words.calls() - before, 2, "two wordings");
}

#[tokio::test]
async fn hits_of_all_collections_are_merged_by_distance() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let metadata = json!({"embedding_model": "words"});
    parts
        .collection("a", metadata.clone(), &["red apple tree garden", "stone wall"])
        .await;
    parts.collection("b", metadata, &["red apple", "blue sky"]).await;
    let targets = vec![target(&parts, LOCAL, "a"), target(&parts, "far", "b")];
    let mut query = query(&parts, "red apple", targets);
    query.options.top_k = 2;
    let response = search(&query).await;
    assert_eq!(found(&query, &response), ["far/b/0", "local/a/0"]);
}

#[tokio::test]
async fn a_collection_that_fails_is_a_warning() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection("a", json!({"embedding_model": "words"}), &["red apple"])
        .await;
    parts
        .collection("b", json!({"embedding_model": "gone"}), &[])
        .await;
    let all = query(&parts, "apple", targets(&parts, &["missing", "a", "b"]));
    let response = search(&all).await;
    assert_eq!(found(&all, &response), ["local/a/0"]);
    assert!(!response.failed());
    let failures: Vec<String> = response
        .failures
        .iter()
        .map(|(target, error)| format!("{target}: {error}"))
        .collect();
    assert_eq!(
        failures,
        [
            "0: Collection 'missing' not found",
            "2: Embedding model 'gone' not loaded. Available models: words",
        ]
    );
    let none = query(&parts, "apple", targets(&parts, &["missing", "b"]));
    let response = search(&none).await;
    assert!(response.failed());
    assert!(
        matches!(&response.failures[0].1, BackendError::CollectionNotFound(name) if name.as_str() == "missing"),
        "{:?}",
        response.failures
    );
}

#[tokio::test]
async fn each_collection_has_thresholds_of_its_own() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let text = ["red apple tree garden"];
    for (name, matching, partial) in [("strict", 0.0, 0.001), ("middle", 0.0, 1.0), ("loose", 1.0, 1.0)] {
        let metadata =
            json!({"embedding_model": "words", "match_threshold": matching, "partial_threshold": partial});
        parts.collection(name, metadata, &text).await;
    }
    let grade = async |names: &[&str]| {
        let response = search(&query(&parts, "red apple", targets(&parts, names))).await;
        (
            response.grade().name(),
            response
                .hits
                .iter()
                .map(|hit| hit.grade.name())
                .collect::<Vec<_>>(),
        )
    };
    assert_eq!(grade(&["strict"]).await, ("none", vec!["none"]));
    assert_eq!(grade(&["middle"]).await, ("partial", vec!["partial"]));
    assert_eq!(
        grade(&["strict", "loose"]).await,
        ("match", vec!["none", "match"])
    );
}

#[tokio::test]
async fn reranking_orders_what_all_collections_gave() {
    let parts = parts(Models::new(
        vec![WordEmbedder::new("words")],
        Some(Arc::new(LengthReranker)),
    ));
    let metadata = json!({"embedding_model": "words"});
    parts
        .collection(
            "a",
            metadata.clone(),
            &["apple", "a very long text about something else"],
        )
        .await;
    parts.collection("b", metadata, &["apple pie"]).await;
    let targets = vec![target(&parts, LOCAL, "a"), target(&parts, "far", "b")];
    let mut query = query(&parts, "apple", targets);
    query.options.rerank = true;
    query.options.top_k = 2;
    let response = search(&query).await;
    assert!(response.reranked);
    assert_eq!(found(&query, &response), ["local/a/1", "far/b/0"]);
    assert_eq!(response.hits[0].hit.rerank.unwrap().original_rank, 3);
}

/// Texts of one service never reach another: each service reranks its own hits.
#[tokio::test]
async fn without_a_model_here_every_service_reranks_its_own() {
    let words = || vec![WordEmbedder::new("words") as Arc<dyn ragstone_core::model::Embedder>];
    let here = parts(Models::new(words(), None));
    let with_reranker = || parts(Models::new(words(), Some(Arc::new(LengthReranker))));
    let (one, two) = (with_reranker(), with_reranker());
    let metadata = json!({"embedding_model": "words"});
    here.collection("a", metadata.clone(), &["apple"]).await;
    one.collection("b", metadata.clone(), &["apple", "something longer"])
        .await;
    two.collection("c", metadata, &["apple pie", "an apple that is much longer", "x"])
        .await;
    let reranked = async |targets: Vec<Target>| {
        let mut query = query(&here, "apple", targets);
        query.options.rerank = true;
        query.options.top_k = 10;
        let response = search(&query).await;
        (found(&query, &response), response)
    };
    let (names, own) = reranked(vec![target(&one, "one", "b")]).await;
    assert!(own.reranked && own.warnings.is_empty(), "{:?}", own.warnings);
    assert_eq!(names, ["one/b/1", "one/b/0"]);
    let (names, mixed) = reranked(vec![
        target(&here, LOCAL, "a"),
        target(&one, "one", "b"),
        target(&two, "two", "c"),
    ])
    .await;
    assert!(mixed.reranked);
    let of = |service: &str| {
        names
            .iter()
            .filter(|name| name.starts_with(service))
            .collect::<Vec<_>>()
    };
    assert_eq!(of("one"), ["one/b/1", "one/b/0"], "{names:?}");
    assert_eq!(of("two"), ["two/c/1", "two/c/0", "two/c/2"], "{names:?}");
    let first: Vec<_> = names[..3]
        .iter()
        .map(|name| name.split('/').next().unwrap())
        .collect();
    assert_eq!(
        first.iter().collect::<std::collections::HashSet<_>>().len(),
        3,
        "the best of every service comes first: {names:?}"
    );
    for hit in &mixed.hits {
        assert_eq!(hit.hit.rerank.is_some(), hit.target != 0);
    }
    let warnings: Vec<&str> = mixed.warnings.iter().map(|w| w.message.as_str()).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("'local'") && warnings[0].contains("Cross-encoder not loaded"));
    let (_, alone) = reranked(vec![target(&here, LOCAL, "a")]).await;
    assert!(!alone.reranked);
    assert!(
        alone.warnings[0].message.contains("Cross-encoder not loaded"),
        "{:?}",
        alone.warnings
    );
}

/// A cross-encoder sees as many hits of a fan-out as `/query` would give it.
#[tokio::test]
async fn reranking_is_as_deep_as_that_of_one_collection() {
    let reranker = Arc::new(LengthReranker);
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], Some(reranker)));
    let texts: Vec<String> = (0..300).map(|n| format!("apple {}", "x".repeat(n))).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    parts
        .collection("a", json!({"embedding_model": "words"}), &texts)
        .await;
    let mut query = query(&parts, "apple", targets(&parts, &["a"]));
    query.mode = ModeChoice::Best;
    query.options.rerank = true;
    query.options.top_k = 3;
    let response = search(&query).await;
    let deepest = response
        .hits
        .iter()
        .map(|hit| hit.hit.rerank.unwrap().original_rank)
        .max();
    assert!(deepest.unwrap() <= rerank_depth(3), "{deepest:?}");
    assert_eq!(response.hits.len(), 3);
}

#[tokio::test]
async fn siblings_come_from_the_hits_own_collection() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection(
            "a",
            json!({"embedding_model": "words"}),
            &["apple", "stone", "wall"],
        )
        .await;
    let mut query = query(&parts, "stone", targets(&parts, &["a"]));
    query.options.top_k = 1;
    query.options.expand = Some(Expand {
        field: "section".to_owned(),
        max_chars: None,
    });
    let response = search(&query).await;
    let siblings = response.hits[0].hit.siblings.as_ref().unwrap();
    let texts: Vec<&str> = siblings.iter().map(|sibling| sibling.text.as_str()).collect();
    assert_eq!(texts, ["apple", "stone", "wall"]);
}

/// One of the wordings is right: what is best by one of them beats what is second by both.
#[tokio::test]
async fn several_wordings_are_mixed_by_their_weight() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection(
            "a",
            json!({"embedding_model": "words"}),
            &["apple", "stone", "apple stone"],
        )
        .await;
    let order = async |apple: f64, stone: f64| {
        let mut query = query(&parts, "apple", targets(&parts, &["a"]));
        query.wordings = vec![wording("apple", apple), wording("stone", stone)];
        query.mode = ModeChoice::Best;
        found(&query, &search(&query).await)
    };
    assert_eq!(order(0.5, 0.5).await[2], "local/a/2");
    assert_eq!(order(0.95, 0.05).await[0], "local/a/0");
    assert_eq!(order(0.05, 0.95).await[0], "local/a/1");
}

/// Distances and grades refer to the reported wording, whichever wording found the hit.
#[tokio::test]
async fn distances_and_grades_are_those_to_the_reported_wording() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection("a", json!({"embedding_model": "words"}), &["apple", "stone"])
        .await;
    let plain = search(&query(&parts, "wall", targets(&parts, &["a"]))).await;
    let mut query = query(&parts, "wall", targets(&parts, &["a"]));
    query.wordings = vec![wording("apple", 0.9), wording("wall", 0.1)];
    query.reported = 1;
    query.mode = ModeChoice::Best;
    let response = search(&query).await;
    assert_eq!(
        found(&query, &response)[0],
        "local/a/0",
        "the ranking is of all wordings"
    );
    for hit in &response.hits {
        let alone = plain
            .hits
            .iter()
            .find(|alone| alone.hit.document.id == hit.hit.document.id);
        assert_eq!(hit.hit.distance, alone.unwrap().hit.distance);
        assert_eq!(hit.grade, Grade::None);
    }
    assert_eq!(response.grade(), Grade::None);
}

/// The reported wording has so many nearer ones that it does not find the other's best by itself.
#[tokio::test]
async fn a_hit_of_another_wording_is_measured_from_the_reported_one() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let mut texts = vec!["stone wall".to_owned()];
    texts.extend((0..FUSION_AT_MOST + 50).map(|n| format!("apple number {n}")));
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let metadata = json!({"embedding_model": "words", "match_threshold": 1.9});
    parts.collection("a", metadata, &texts).await;
    for (service, mode) in [
        (LOCAL, ModeChoice::Best),
        ("far", ModeChoice::Given(SearchMode::Dense)),
    ] {
        let targets = vec![target(&parts, service, "a")];
        let mut asked = query(&parts, "apple number", targets.clone());
        asked.wordings = vec![wording("stone wall", 0.9), wording("apple number", 0.1)];
        asked.reported = 1;
        asked.mode = mode;
        let response = search(&asked).await;
        let measured = &response.hits[0];
        assert_eq!(measured.hit.document.text, "stone wall");
        let mut all = query(&parts, "apple number", targets);
        all.options.top_k = texts.len();
        let all = search(&all).await.hits;
        let alone = all
            .iter()
            .find(|hit| hit.hit.document.text == "stone wall")
            .unwrap();
        assert!(alone.hit.distance.is_some());
        assert_eq!(
            (measured.hit.distance, measured.grade),
            (alone.hit.distance, alone.grade)
        );
        assert_eq!(measured.grade, Grade::Match, "by the threshold of its collection");
    }
}

/// The verdict is on what is given out.
#[tokio::test]
async fn the_result_is_that_of_the_best_hit_returned() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let strict = json!({"embedding_model": "words", "match_threshold": 0.0, "partial_threshold": 0.0});
    let loose = json!({"embedding_model": "words", "match_threshold": 2.0});
    parts.collection("strict", strict, &["red apple tree"]).await;
    parts.collection("loose", loose, &["stone wall"]).await;
    let mut asked = query(&parts, "red apple", targets(&parts, &["strict", "loose"]));
    assert_eq!(search(&asked).await.grade(), Grade::Match);
    asked.options.top_k = 1;
    assert_eq!(search(&asked).await.grade(), Grade::None);
}

/// A service like this process, but without keyword search.
fn by_meaning(parts: &Parts, name: &str) -> Target {
    let mut target = target(parts, "dense", name);
    let backend = StorageBackend::of_service(parts.service.clone(), QueryVectors::default());
    target.service.backend = Arc::new(backend);
    target
}

#[tokio::test]
async fn a_service_without_keyword_search_is_searched_by_meaning_with_a_warning() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let metadata = json!({"embedding_model": "words"});
    parts.collection("a", metadata, &["apple"]).await;
    let dense = by_meaning(&parts, "a");
    let hybrid = ModeChoice::Given(SearchMode::Hybrid);
    assert_eq!(hybrid.of(&dense.service), SearchMode::Dense);
    assert_eq!(hybrid.of(&target(&parts, "far", "a").service), SearchMode::Hybrid);
    let mut query = query(&parts, "apple", vec![target(&parts, LOCAL, "a"), dense]);
    query.mode = hybrid;
    let response = search(&query).await;
    assert_eq!(response.hits.len(), 2);
    let [warning] = &response.warnings[..] else {
        panic!("one warning: {:?}", response.warnings)
    };
    assert_eq!(warning.target, Some(1));
    assert!(
        warning.message.starts_with("searched by meaning only"),
        "{warning:?}"
    );
}

/// `top_k` of each collection instead of all together.
#[tokio::test]
async fn a_limit_may_count_for_each_collection() {
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let metadata = json!({"embedding_model": "words"});
    parts
        .collection("a", metadata.clone(), &["apple", "apple pie", "apple tree"])
        .await;
    parts.collection("b", metadata, &["stone", "wall"]).await;
    let mut query = query(&parts, "apple", targets(&parts, &["a", "b"]));
    query.options.top_k = 2;
    assert_eq!(found(&query, &search(&query).await), ["local/a/0", "local/a/1"]);
    query.limit = Limit::EachCollection;
    let names = found(&query, &search(&query).await);
    let of = |collection: &str| names.iter().filter(|name| name.contains(collection)).count();
    assert_eq!((of("/a/"), of("/b/")), (2, 2), "{names:?}");
}
