mod mixed;

use ragstone_core::provider::RagProvider;
use serde_json::json;

use super::*;
use crate::gateway::{LOCAL, LocalProvider};
use crate::test_parts::{LengthReranker, Parts, WordEmbedder, parts};

fn target(parts: &Parts, service: &str, name: &str) -> Target {
    Target {
        service: NamedService {
            name: service.to_owned(),
            provider: if service == LOCAL {
                LOCAL
            } else {
                "chromadb-wrapper"
            }
            .to_owned(),
            backend: Arc::new(LocalProvider::new(parts.service.clone())),
        },
        name: CollectionName::parse(name).unwrap(),
    }
}

fn request(parts: &Parts, message: &str, targets: Vec<Target>) -> Request {
    Request {
        plan: by_topic(message, None, None),
        targets,
        top_k: 5,
        mode: ModeChoice::Given(Mode::Dense),
        rerank: false,
        reranker: Arc::new(LocalProvider::new(parts.service.clone())) as Arc<dyn RagProvider>,
        expand: None,
    }
}

async fn collect(models: &Models, request: &Request) -> Collected {
    super::collect(models, request).await.unwrap()
}

fn found(collected: &Collected) -> Vec<String> {
    collected
        .hits
        .iter()
        .map(|hit| format!("{}/{}/{}", hit.service, hit.collection, hit.document.id))
        .collect()
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
    let targets = ["a", "b", "c", "d", "e"]
        .map(|name| target(&parts, LOCAL, name))
        .to_vec();
    let collected = collect(&parts.service.models, &request(&parts, "apple", targets)).await;
    assert!(collected.warnings.is_empty(), "{:?}", collected.warnings);
    assert_eq!(
        words.calls() - words_before,
        2,
        "once for each of the two connections"
    );
    assert_eq!(other.calls() - other_before, 1);
    assert_eq!(collected.embedding_cache_hits, 2);
}

#[tokio::test]
async fn what_embeds_itself_is_sent_the_text() {
    let words = WordEmbedder::new("words");
    let parts = parts(Models::new(vec![words.clone()], None));
    for name in ["a", "b"] {
        parts
            .collection(name, json!({"embedding_model": "words"}), &["red apple"])
            .await;
    }
    let before = words.calls();
    let targets = vec![target(&parts, "far", "a"), target(&parts, "far", "b")];
    let collected = collect(&parts.service.models, &request(&parts, "apple", targets)).await;
    assert_eq!(collected.embedding_cache_hits, 0);
    assert_eq!(words.calls() - before, 2, "each search embeds for itself");
    assert_eq!(collected.hits.len(), 2);
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
    let mut request = request(&parts, "red apple", targets);
    request.top_k = 2;
    let collected = collect(&parts.service.models, &request).await;
    assert_eq!(found(&collected), ["far/b/0", "local/a/0"]);
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
    let targets = vec![
        target(&parts, LOCAL, "missing"),
        target(&parts, LOCAL, "a"),
        target(&parts, LOCAL, "b"),
    ];
    let collected = collect(&parts.service.models, &request(&parts, "apple", targets)).await;
    assert_eq!(found(&collected), ["local/a/0"]);
    assert_eq!(
        collected.warnings,
        [
            "local/missing: Collection 'missing' not found",
            "local/b: Embedding model 'gone' not loaded. Available models: words",
        ]
    );
    let nothing = vec![target(&parts, LOCAL, "missing"), target(&parts, LOCAL, "b")];
    let error = super::collect(&parts.service.models, &request(&parts, "apple", nothing))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, ProviderError::CollectionNotFound(name) if name.as_str() == "missing"),
        "where all fail, as the first: {error}"
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
        let targets = names.iter().map(|name| target(&parts, LOCAL, name)).collect();
        let collected = collect(&parts.service.models, &request(&parts, "red apple", targets)).await;
        (
            collected.grade.name(),
            collected
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
    let request = Request {
        rerank: true,
        top_k: 2,
        ..request(&parts, "apple", targets)
    };
    let collected = collect(&parts.service.models, &request).await;
    assert!(collected.reranked);
    assert_eq!(found(&collected), ["local/a/1", "far/b/0"]);
    assert_eq!(collected.hits[0].extra["original_rank"], 3);
}

/// Texts of one service never reach another: only where all hits are from one is it asked to rerank.
#[tokio::test]
async fn without_a_model_here_a_service_reranks_its_own() {
    let here = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let there = parts(Models::new(
        vec![WordEmbedder::new("words")],
        Some(Arc::new(LengthReranker)),
    ));
    let metadata = json!({"embedding_model": "words"});
    here.collection("a", metadata.clone(), &["apple"]).await;
    there
        .collection("b", metadata, &["apple", "something longer"])
        .await;
    let both = async |targets: Vec<Target>| {
        let request = Request {
            rerank: true,
            ..request(&here, "apple", targets)
        };
        collect(&here.service.models, &request).await
    };
    let own = both(vec![target(&there, "far", "b")]).await;
    assert!(own.reranked && own.warnings.is_empty(), "{:?}", own.warnings);
    assert_eq!(found(&own), ["far/b/1", "far/b/0"]);
    let mixed = both(vec![target(&here, LOCAL, "a"), target(&there, "far", "b")]).await;
    assert!(!mixed.reranked);
    assert_eq!(mixed.hits.len(), 3);
    assert!(
        mixed.warnings[0].contains("Cross-encoder not loaded"),
        "{:?}",
        mixed.warnings
    );
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
    let request = Request {
        top_k: 1,
        expand: Some(Expand {
            field: "section".to_owned(),
            max_chars: None,
        }),
        ..request(&parts, "stone", vec![target(&parts, LOCAL, "a")])
    };
    let collected = collect(&parts.service.models, &request).await;
    let siblings = collected.hits[0].extra["siblings"].as_array().unwrap();
    let texts: Vec<&str> = siblings
        .iter()
        .map(|sibling| sibling["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["apple", "stone", "wall"]);
}

/// One of the wordings is right: what is best by one of them beats what is second by both.
#[tokio::test]
async fn several_wordings_are_mixed_by_their_weight() {
    use ragstone_core::conversation::QueryVariant;
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection(
            "a",
            json!({"embedding_model": "words"}),
            &["apple", "stone", "apple stone"],
        )
        .await;
    let wording = |text: &str, weight: f64| QueryVariant {
        text: text.to_owned(),
        keywords: text.to_owned(),
        weight,
        alone: false,
    };
    let order = async |apple: f64, stone: f64| {
        let request = Request {
            plan: Plan {
                queries: vec![wording("apple", apple), wording("stone", stone)],
                ..by_topic("apple", None, None)
            },
            mode: ModeChoice::Best,
            ..request(&parts, "apple", vec![target(&parts, LOCAL, "a")])
        };
        found(&collect(&parts.service.models, &request).await)
    };
    assert_eq!(order(0.5, 0.5).await[2], "local/a/2");
    assert_eq!(order(0.95, 0.05).await[0], "local/a/0");
    assert_eq!(order(0.05, 0.95).await[0], "local/a/1");
}

/// What is said of a hit is said of the wording that is told as searched for, whichever found it.
#[tokio::test]
async fn distances_and_grades_are_those_to_the_reported_wording() {
    use ragstone_core::conversation::QueryVariant;
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection("a", json!({"embedding_model": "words"}), &["apple", "stone"])
        .await;
    let wording = |text: &str, weight: f64| QueryVariant {
        text: text.to_owned(),
        keywords: text.to_owned(),
        weight,
        alone: false,
    };
    let plain = collect(
        &parts.service.models,
        &request(&parts, "wall", vec![target(&parts, LOCAL, "a")]),
    )
    .await;
    let asked = Request {
        plan: Plan {
            queries: vec![wording("apple", 0.9), wording("wall", 0.1)],
            reported: 1,
            ..by_topic("wall", None, None)
        },
        mode: ModeChoice::Best,
        ..request(&parts, "wall", vec![target(&parts, LOCAL, "a")])
    };
    assert_eq!(asked.plan.query_text(), "wall");
    let collected = collect(&parts.service.models, &asked).await;
    assert_eq!(
        found(&collected)[0],
        "local/a/0",
        "the ranking is of all wordings"
    );
    for hit in &collected.hits {
        let alone = plain
            .hits
            .iter()
            .find(|alone| alone.document.id == hit.document.id);
        let alone = alone.unwrap();
        assert_eq!((hit.distance, hit.score), (alone.distance, alone.score));
        assert_eq!(hit.grade, Grade::None);
    }
    assert_eq!(collected.grade, Grade::None);
}

/// The reported wording has so many nearer ones that it does not find the other's best by itself.
#[tokio::test]
async fn a_hit_of_another_wording_is_measured_from_the_reported_one() {
    use ragstone_core::conversation::QueryVariant;
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    let mut texts = vec!["stone wall".to_owned()];
    texts.extend((0..DEPTH_AT_MOST + 50).map(|n| format!("apple number {n}")));
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let metadata = json!({"embedding_model": "words", "match_threshold": 1.9});
    parts.collection("a", metadata, &texts).await;
    let wording = |text: &str, weight: f64| QueryVariant {
        text: text.to_owned(),
        keywords: text.to_owned(),
        weight,
        alone: false,
    };
    for (service, mode) in [(LOCAL, ModeChoice::Best), ("far", ModeChoice::Given(Mode::Dense))] {
        let targets = vec![target(&parts, service, "a")];
        let asked = Request {
            plan: Plan {
                queries: vec![wording("stone wall", 0.9), wording("apple number", 0.1)],
                reported: 1,
                ..by_topic("apple number", None, None)
            },
            mode,
            ..request(&parts, "apple number", targets.clone())
        };
        let collected = collect(&parts.service.models, &asked).await;
        assert_eq!(collected.hits[0].document.text, "stone wall");
        let all = Request {
            top_k: texts.len(),
            ..request(&parts, "apple number", targets)
        };
        let all = collect(&parts.service.models, &all).await.hits;
        let alone = all.iter().find(|hit| hit.document.text == "stone wall").unwrap();
        assert!(alone.distance.is_some());
        let measured = &collected.hits[0];
        assert_eq!(
            (measured.distance, measured.score, measured.grade),
            (alone.distance, alone.score, alone.grade)
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
    let mut asked = request(
        &parts,
        "red apple",
        ["strict", "loose"]
            .map(|name| target(&parts, LOCAL, name))
            .to_vec(),
    );
    assert_eq!(collect(&parts.service.models, &asked).await.grade, Grade::Match);
    asked.top_k = 1;
    assert_eq!(collect(&parts.service.models, &asked).await.grade, Grade::None);
}

#[tokio::test]
async fn what_does_not_rank_by_words_is_searched_by_meaning_with_a_warning() {
    use ragstone_providers::http::AddressRule;
    use ragstone_providers::rag::{ConnectContext, Registry};
    let parts = parts(Models::new(vec![WordEmbedder::new("words")], None));
    parts
        .collection("a", json!({"embedding_model": "words"}), &["apple"])
        .await;
    let config = json!({"provider": "chromadb", "url": "http://127.0.0.1:9", "retry": {"maxAttempts": 1}});
    let context = ConnectContext {
        service: "chroma",
        embedders: Arc::default(),
        addresses: AddressRule::Configured,
        environment: &|_| None,
    };
    let chroma = Target {
        service: NamedService {
            name: "chroma".to_owned(),
            provider: "chromadb".to_owned(),
            backend: Registry::built_in()
                .connect(&serde_json::from_value(config).unwrap(), context)
                .unwrap(),
        },
        name: CollectionName::parse("c").unwrap(),
    };
    let hybrid = ModeChoice::Given(Mode::Hybrid);
    assert_eq!(hybrid.of(&chroma.service), Mode::Dense);
    assert_eq!(hybrid.of(&target(&parts, "far", "a").service), Mode::Hybrid);
    let asked = Request {
        mode: hybrid,
        ..request(&parts, "apple", vec![target(&parts, LOCAL, "a"), chroma])
    };
    let warnings = collect(&parts.service.models, &asked).await.warnings;
    assert!(
        warnings
            .iter()
            .any(|warning| warning.starts_with("chroma/c: searched by meaning only")),
        "{warnings:?}"
    );
}
