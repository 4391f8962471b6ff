//! Searches by vector, by word and by both, and reranking.

use ragstone_core::backend::Backend;
use ragstone_core::document::NewDocument;
use ragstone_core::search::{QueryVector, SearchHit, SearchMode, SearchQuery};
use ragstone_core::siblings::Expand;
use ragstone_core::{Document, DocumentId, Filter};
use serde_json::{Value, json};

use super::{dense, document, fresh, name, ok, refused, vector, with_vector};

fn cosine_distance(a: &[f32], b: &[f32]) -> f32 {
    let dot = |x: &[f32], y: &[f32]| {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum::<f64>()
    };
    (1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()) as f32
}

pub(super) async fn searches_are_exact_under_any_filter(backend: &dyn Backend) {
    let name = fresh(backend, "search", json!({"match_threshold": 0.4})).await;
    let empty = ok(
        backend.search(&name, dense(vector(0), 3)).await,
        "searching nothing",
    );
    assert!(empty.hits.is_empty());
    let documents: Vec<(Document, Vec<f32>)> = (0..300)
        .map(|i| {
            let metadata = match i % 100 {
                0 => json!({"rare": [i / 100, "list"], "half": i % 2}),
                _ => json!({"half": i % 2, "tenth": i % 10}),
            };
            (
                document(&format!("s{i}"), &format!("text {i}"), metadata),
                vector(i),
            )
        })
        .collect();
    let added = documents
        .iter()
        .map(|(d, v)| with_vector(d.clone(), v.clone()))
        .collect();
    ok(backend.add_documents(&name, added).await, "adding");

    let queried = vector(1000);
    for (filter, top_k) in [
        (json!({}), 5),
        (json!({}), 1000),
        (json!({"half": 1}), 10),
        (json!({"tenth": {"$gte": 8}}), 7),
        (json!({"rare": "list"}), 5),
        (json!({"rare": {"$exists": true}}), 2),
        (json!({"rare": 2}), 3),
        (json!({"half": {"$ne": 0}}), 20),
        (json!({"half": 7}), 5),
    ] {
        let filter = Filter::parse(&filter).unwrap_or_else(|e| panic!("{e}"));
        let mut expected: Vec<(f32, &str)> = documents
            .iter()
            .filter(|(d, _)| filter.matches(&d.metadata))
            .map(|(d, v)| (cosine_distance(&queried, v), d.id.as_str()))
            .collect();
        expected.sort_by(|a, b| a.0.total_cmp(&b.0));
        expected.truncate(top_k);
        let query = SearchQuery {
            filter: filter.clone(),
            ..dense(queried.clone(), top_k)
        };
        let answer = ok(backend.search(&name, query).await, "searching");
        assert_eq!(
            ids(&answer.hits),
            expected.iter().map(|e| e.1).collect::<Vec<_>>(),
            "{filter:?}"
        );
        for (hit, (distance, _)) in answer.hits.iter().zip(&expected) {
            let given = hit.distance.unwrap_or(f32::NAN);
            assert!((given - distance).abs() < 1e-4, "{given} for {distance}");
            assert!(hit.ranks.dense.is_some(), "{hit:?}");
        }
        let ranks = answer.hits.iter().filter_map(|hit| Some(hit.ranks.dense?.rank));
        assert!(ranks.eq(1..=expected.len()), "{filter:?}");
        assert_eq!(answer.collection_metadata["match_threshold"], 0.4);
    }

    let near = SearchQuery {
        max_distance: Some(0.5),
        ..dense(queried.clone(), 1000)
    };
    let hits = ok(backend.search(&name, near).await, "searching nearby").hits;
    let expected = documents
        .iter()
        .filter(|(_, v)| cosine_distance(&queried, v) <= 0.5)
        .count();
    assert_eq!(hits.len(), expected);

    let few: Vec<DocumentId> = ["s17", "s3", "gone", "s250", "s251"]
        .into_iter()
        .filter_map(|id| DocumentId::parse(id.to_owned()).ok())
        .collect();
    let mut expected: Vec<(f32, &str)> = documents
        .iter()
        .filter(|(d, _)| few.contains(&d.id) && d.metadata["half"] == 1)
        .map(|(d, v)| (cosine_distance(&queried, v), d.id.as_str()))
        .collect();
    expected.sort_by(|a, b| a.0.total_cmp(&b.0));
    let among = SearchQuery {
        ids: Some(few),
        filter: Filter::parse(&json!({"half": 1})).unwrap_or_else(|e| panic!("{e}")),
        ..dense(queried.clone(), 10)
    };
    let hits = ok(backend.search(&name, among).await, "searching among a few").hits;
    assert_eq!(ids(&hits), expected.iter().map(|e| e.1).collect::<Vec<_>>());

    let siblings = async |field: &str, max_chars, filter: Value| {
        let query = SearchQuery {
            expand: Some(Expand {
                field: field.to_owned(),
                max_chars,
            }),
            filter: Filter::parse(&filter).unwrap_or_else(|e| panic!("{e}")),
            ..dense(queried.clone(), 1)
        };
        let mut hits = ok(backend.search(&name, query).await, "expanding").hits;
        let siblings = hits.pop().and_then(|hit| hit.siblings)?;
        let ids = siblings.iter().map(|sibling| sibling.id.as_str().to_owned());
        Some(ids.collect::<Vec<_>>())
    };
    let all = siblings("tenth", None, json!({"tenth": 3}))
        .await
        .unwrap_or_default();
    assert_eq!(all.len(), 30, "{all:?}");
    assert_eq!(all[..2], ["s3", "s13"], "in document order");
    let within_budget = siblings("tenth", Some(0), json!({"tenth": 3})).await;
    assert_eq!(within_budget.map(|kept| kept.len()), Some(1), "the hit alone");
    assert_eq!(siblings("no_such_field", None, json!({})).await, None);
    ok(backend.delete_collection(&name).await, "deleting");
}

fn ids(hits: &[SearchHit]) -> Vec<&str> {
    hits.iter().map(|hit| hit.document.id.as_str()).collect()
}

pub(super) async fn several_collections_and_queries_are_searched_at_once(backend: &dyn Backend) {
    let mut names = Vec::new();
    for collection in 0..3 {
        let name = fresh(
            backend,
            &format!("many-{collection}"),
            json!({"number": collection}),
        )
        .await;
        let documents = (0..5).map(|i| {
            let plain = document(&format!("c{collection}-{i}"), "t", json!({}));
            with_vector(plain, vector(10 * collection + i))
        });
        ok(backend.add_documents(&name, documents.collect()).await, "adding");
        names.push(name);
    }
    names.insert(1, name("never-created"));
    let queries = [dense(vector(3), 2), dense(vector(22), 4)];
    let responses = backend.search_many(&names, &queries).await;
    assert_eq!(responses.len(), names.len());
    for (name, responses) in names.iter().zip(responses) {
        if name.as_str().ends_with("never-created") {
            refused(responses, 404, "searching none");
            continue;
        }
        let responses = ok(responses, "searching many");
        assert_eq!(responses.len(), queries.len());
        for (query, response) in queries.iter().zip(responses) {
            let alone = ok(backend.search(name, query.clone()).await, "searching alone");
            assert_eq!(ids(&response.hits), ids(&alone.hits), "{name}");
            assert_eq!(response.hits.len(), query.top_k);
            assert_eq!(response.collection_metadata, alone.collection_metadata);
            assert!(response.collection_metadata.contains_key("number"));
        }
    }
    names.remove(1);
    for name in names {
        ok(backend.delete_collection(&name).await, "deleting");
    }
}

pub(super) async fn vectors_of_any_length_keep_their_direction(backend: &dyn Backend) {
    let name = fresh(backend, "lengths", json!({})).await;
    let scales = [1.0, 1e-30, 1e30, 1e-18, 1e18];
    let documents = scales.iter().enumerate().map(|(i, scale)| {
        let scaled = vector(i).into_iter().map(|x| x * scale).collect();
        with_vector(document(&i.to_string(), "t", json!({})), scaled)
    });
    ok(
        backend.add_documents(&name, documents.collect()).await,
        "adding vectors of all lengths",
    );
    let queried = vector(1000);
    let hits = ok(
        backend.search(&name, dense(queried.clone(), scales.len())).await,
        "searching among all lengths",
    )
    .hits;
    assert_eq!(hits.len(), scales.len());
    for hit in hits {
        let number: usize = hit.document.id.as_str().parse().unwrap_or(usize::MAX);
        let expected = cosine_distance(&queried, &vector(number));
        let given = hit.distance.unwrap_or(f32::NAN);
        assert!((given - expected).abs() < 1e-4, "{given} for {expected}");
    }
    ok(backend.delete_collection(&name).await, "deleting");
}

pub(super) async fn words_are_ranked(backend: &dyn Backend) {
    let name = fresh(backend, "words", json!({})).await;
    let texts = [
        "the harbour at night",
        "a lighthouse keeper",
        "lighthouse and harbour",
        "rain",
    ];
    let documents = texts.iter().enumerate().map(|(i, text)| {
        let plain = document(&format!("w{i}"), text, json!({"even": i % 2 == 0}));
        with_vector(plain, vector(i))
    });
    ok(backend.add_documents(&name, documents.collect()).await, "adding");
    let keyword = |words: &str| SearchQuery {
        text: Some(words.to_owned()),
        mode: SearchMode::Keyword,
        ..SearchQuery::default()
    };
    let both = ok(
        backend.search(&name, keyword("lighthouse harbour")).await,
        "ranking words",
    );
    assert_eq!(ids(&both.hits)[0], "w2", "it has both words");
    assert_eq!(both.hits.len(), 3);
    for (place, hit) in both.hits.iter().enumerate() {
        assert_eq!(hit.distance, None, "no vector was compared");
        assert_eq!(hit.ranks.keyword.map(|rank| rank.rank), Some(place + 1));
    }
    let filtered = SearchQuery {
        filter: Filter::parse(&json!({"even": false})).unwrap_or_else(|e| panic!("{e}")),
        ..keyword("lighthouse harbour")
    };
    let filtered = ok(backend.search(&name, filtered).await, "ranking words of a few");
    assert_eq!(ids(&filtered.hits), ["w1"]);
    let hybrid = SearchQuery {
        mode: SearchMode::Hybrid,
        vector: Some(QueryVector::from_client(vector(3))),
        ..keyword("lighthouse harbour")
    };
    let hybrid = ok(backend.search(&name, hybrid).await, "ranking by both");
    assert_eq!(hybrid.hits.len(), 4, "every document has a distance");
    let ranks = hybrid.hits.iter().filter_map(|hit| Some(hit.ranks.fused?.rank));
    assert!(ranks.eq(1..=4), "{hybrid:?}");
    let rain = hybrid.hits.iter().find(|hit| hit.document.text == "rain");
    let rain = rain.unwrap_or_else(|| panic!("it is nearest: {hybrid:?}"));
    assert_eq!(rain.ranks.dense.map(|rank| rank.rank), Some(1));
    assert_eq!(rain.ranks.keyword, None, "it has none of the words");
    ok(backend.delete_collection(&name).await, "deleting");
}

pub(super) async fn reranking_orders_texts_or_fails(backend: &dyn Backend, is_offered: bool) {
    let texts = ["one", "another text", "a third text of some length"];
    let ranked = backend
        .rerank("a question", texts.map(str::to_owned).to_vec(), 2)
        .await;
    if !is_offered {
        assert!(ranked.is_err(), "{ranked:?}");
        return;
    }
    let ranked = ok(ranked, "reranking");
    assert_eq!(ranked.len(), 2, "{ranked:?}");
    assert!(ranked[0].score >= ranked[1].score, "{ranked:?}");
    assert!(
        ranked[0].index != ranked[1].index && ranked.iter().all(|text| text.index < texts.len()),
        "{ranked:?}"
    );
    let none = ok(
        backend.rerank("a question", Vec::new(), 2).await,
        "reranking none",
    );
    assert!(none.is_empty());
}

pub(super) async fn texts_are_embedded_by_the_collections_model(backend: &dyn Backend, model: &str) {
    let name = fresh(backend, "embedded", json!({"embedding_model": model})).await;
    let texts = [
        "The cat sleeps on the mat.",
        "Rust has no garbage collector.",
        "Rain is expected tomorrow.",
    ];
    let documents = texts
        .iter()
        .enumerate()
        .map(|(i, text)| NewDocument {
            document: document(&format!("t{i}"), text, json!({"i": i})),
            embedding: None,
        })
        .collect();
    ok(backend.add_documents(&name, documents).await, "adding texts");
    for (i, text) in texts.iter().enumerate() {
        let query = SearchQuery {
            text: Some((*text).to_owned()),
            top_k: 1,
            ..SearchQuery::default()
        };
        let hits = ok(backend.search(&name, query).await, "searching by text").hits;
        assert_eq!(hits[0].document.id.as_str(), format!("t{i}"));
    }
    ok(backend.delete_collection(&name).await, "deleting");
}
