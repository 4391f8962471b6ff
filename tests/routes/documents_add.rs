//! `POST /collections/{name}/documents`

use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Setup, documents, fixtures, ids, plain};

#[tokio::test]
async fn ids_are_made_where_there_are_none() {
    let server = plain().await;
    server.create("c").await;
    let added = server
        .add(
            "c",
            vec![
                json!({"text": "a", "embedding": [1]}),
                json!({"id": "mine", "text": "b", "embedding": [2]}),
                json!({"id": null, "text": "c", "embedding": [3]}),
            ],
        )
        .await;
    let ids: Vec<&str> = added["ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_str().unwrap())
        .collect();
    assert_eq!((added["count"].as_u64(), ids[1]), (Some(3), "mine"));
    for made in [ids[0], ids[2]] {
        let uuid = made.strip_prefix("doc_").expect("doc_<uuid>");
        assert!(
            uuid.len() == 36 && uuid.bytes().filter(|b| *b == b'-').count() == 4,
            "{made}"
        );
        assert_eq!(
            server.get(&format!("/collections/c/documents/{made}")).await.ok()["id"],
            *made
        );
    }
    assert_ne!(ids[0], ids[2]);
}

/// Whatever is wrong with one document, none of the request is stored.
#[tokio::test]
async fn bad_documents_are_refused_whole_and_by_index() {
    let server = plain().await;
    server.create("c").await;
    server.add("c", documents(2, |_| json!({"kept": true}))).await;
    let before = server.get("/collections/c/documents").await.ok();
    let long_id = "x".repeat(513);
    let cases: Vec<(Value, &str)> = vec![
        (json!({}), "Document at index 1 missing required 'text' field"),
        (
            json!({"text": null}),
            "Document at index 1 missing required 'text' field",
        ),
        (
            json!({"text": ""}),
            "Document at index 1 missing required 'text' field",
        ),
        (
            json!({"text": 7, "embedding": [1, 2, 3, 4]}),
            "Document at index 1: 'text' must be a string",
        ),
        (
            json!({"text": ["a"], "embedding": [1, 2, 3, 4]}),
            "Document at index 1: 'text' must be a string",
        ),
        (
            json!({"id": "", "text": "t", "embedding": [1, 2, 3, 4]}),
            "Document at index 1: ",
        ),
        (
            json!({"id": 7, "text": "t", "embedding": [1, 2, 3, 4]}),
            "Document at index 1: 'id' must be a string",
        ),
        (
            json!({"id": long_id, "text": "t", "embedding": [1, 2, 3, 4]}),
            "Document at index 1: ",
        ),
        (
            json!({"text": "t", "metadata": [], "embedding": [1, 2, 3, 4]}),
            "Document at index 1: 'metadata' must be a JSON object",
        ),
        (
            json!({"text": "t", "metadata": "x", "embedding": [1, 2, 3, 4]}),
            "Document at index 1: 'metadata' must be a JSON object",
        ),
        (json!({"text": "t", "embedding": []}), "Document at index 1: "),
        (
            json!({"text": "t", "embedding": [0, 0, 0, 0]}),
            "Document at index 1: ",
        ),
        (
            json!({"text": "t", "embedding": [1, 2, 3, 1e39]}),
            "Document at index 1: ",
        ),
        (
            json!({"text": "t", "embedding": vec![1; 8193]}),
            "Document at index 1: ",
        ),
        (
            json!({"id": "d7", "text": "t", "embedding": [1, 2, 3, 4]}),
            "Document at index 1 has the same id as the document at index 0",
        ),
        (
            json!({"text": "t", "embedding": [1, 2, 3]}),
            "Embedding dimension mismatch: the document at index 1",
        ),
        (
            json!({"text": "t"}),
            "All documents must include pre-computed embeddings",
        ),
    ];
    for (bad, expected) in cases {
        let good = json!({"id": "d7", "text": "good", "embedding": [1, 2, 3, 4]});
        let body = json!({"documents": [good, bad]});
        let detail = server.post("/collections/c/documents", body).await.refused(400);
        assert!(detail.starts_with(expected), "{expected:?} expected: {detail:?}");
        assert!(detail.len() < 600, "what was sent is not echoed whole: {detail}");
        assert_eq!(
            server.get("/collections/c/documents").await.ok(),
            before,
            "{expected}"
        );
    }
}

#[tokio::test]
async fn bad_lists_are_refused() {
    let server = plain().await;
    server.create("c").await;
    for body in ["{}", r#"{"documents": null}"#, r#"{"documents": []}"#] {
        let detail = server
            .send_text(Method::POST, "/collections/c/documents", body)
            .await
            .refused(400);
        assert_eq!(detail, "Documents array is required", "{body}");
    }
    for body in [
        r#"{"documents": {}}"#,
        r#"{"documents": "x"}"#,
        r#"{"documents": ["x"]}"#,
        r#"{"documents": [null]}"#,
        r#"{"documents": [[{"text": "t"}]]}"#,
        r#"{"documents": [{"text": "t", "embedding": [1e999]}]}"#,
        r#"{"documents": [{"text": "t", "embedding": [NaN]}]}"#,
        r#"{"documents": [{"text": "\ud800", "embedding": [1]}]}"#,
        r#"[{"text": "t", "embedding": [1]}]"#,
    ] {
        server
            .send_text(Method::POST, "/collections/c/documents", body)
            .await
            .refused(400);
    }
    assert_eq!(server.get("/collections/c").await.ok()["count"], 0);
}

/// Two lengths in a request are told by index; a width is the collection's for good.
#[tokio::test]
async fn the_first_documents_decide_the_width() {
    let server = plain().await;
    server.create("c").await;
    server
        .add("c", vec![json!({"id": "a", "text": "t", "embedding": [1, 2, 3]})])
        .await;
    let wrong = json!({"documents": [{"text": "t", "embedding": [1, 2]}]});
    let detail = server
        .post("/collections/c/documents", wrong.clone())
        .await
        .refused(400);
    assert!(
        detail.contains("dimension mismatch") && detail.contains('2') && detail.contains('3'),
        "{detail}"
    );
    let server = server.restarted().await;
    server.post("/collections/c/documents", wrong).await.refused(400);
    let widest = json!({"documents": [{"text": "t", "embedding": vec![0.5; 8192]}]});
    server.create("wide").await;
    server.post("/collections/wide/documents", widest).await.ok();
}

#[tokio::test]
async fn the_collections_model_embeds_what_comes_without_vectors() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    let added = server
        .add(
            "c",
            vec![
                json!({"id": "fox", "text": "fox"}),
                json!({"id": "long", "text": fixtures::long_text()}),
            ],
        )
        .await;
    assert_eq!(
        added,
        json!({"status": "added", "collection": "c", "count": 2, "ids": ["fox", "long"], "truncated": ["long"]})
    );
    // The whole text is stored, whatever the model read of it.
    assert_eq!(
        server.get("/collections/c/documents/long").await.ok()["text"],
        fixtures::long_text()
    );
    let found = server
        .post("/collections/c/query", json!({"query": "fox", "top_k": 1}))
        .await
        .ok();
    assert_eq!(ids(&found["results"]), ["fox"]);

    // Vectors of the client live beside the model's, in one width.
    let own = vec![0.25; fixtures::DIMENSIONS];
    server
        .add("c", vec![json!({"id": "own", "text": "mine", "embedding": own})])
        .await;
    let some = json!({"documents": [{"text": "a", "embedding": own}, {"text": "b"}]});
    let detail = server.post("/collections/c/documents", some).await.refused(400);
    assert!(
        detail.starts_with("All documents must include pre-computed embeddings"),
        "{detail}"
    );
    let narrow = json!({"documents": [{"text": "a", "embedding": [1, 2]}]});
    let detail = server.post("/collections/c/documents", narrow).await.refused(400);
    assert!(detail.contains("dimension mismatch"), "{detail}");
}

/// A collection that holds vectors of another width than its model makes takes no more texts.
#[tokio::test]
async fn a_model_of_another_width_is_refused() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    // Vectors that its model could never search or add to would block an empty collection.
    let narrow = json!({"documents": [{"text": "a", "embedding": [1, 2, 3]}]});
    let detail = server
        .post("/collections/c/documents", narrow.clone())
        .await
        .refused(400);
    assert!(
        detail.contains("dimension mismatch") && detail.contains("model 'tiny'"),
        "{detail}"
    );
    let metadata = |model: &str| json!({"metadata": {"embedding_model": model}});
    server
        .put("/collections/c/metadata", metadata("elsewhere"))
        .await
        .ok();
    server.post("/collections/c/documents", narrow).await.ok();
    server.put("/collections/c/metadata", metadata("tiny")).await.ok();
    let detail = server
        .post("/collections/c/documents", json!({"documents": [{"text": "b"}]}))
        .await
        .refused(400);
    assert!(
        detail.contains("dimension mismatch") && detail.contains("'tiny'"),
        "{detail}"
    );
    assert_eq!(server.get("/collections/c").await.ok()["count"], 1);
}
