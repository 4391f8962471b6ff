//! `GET /collections/{name}/documents` and `GET …/documents/{id}`

use serde_json::json;

use crate::support::{documents, ids, plain, vector};

#[tokio::test]
async fn pages_are_in_insertion_order_and_total_is_true() {
    let server = plain().await;
    server.create("c").await;
    server.add("c", documents(7, |n| json!({"n": n}))).await;
    for (query, expected) in [
        ("", &["d0", "d1", "d2", "d3", "d4", "d5", "d6"][..]),
        ("limit=3", &["d0", "d1", "d2"]),
        ("limit=3&offset=5", &["d5", "d6"]),
        ("offset=6", &["d6"]),
        ("offset=7", &[]),
        ("offset=18446744073709551615", &[]),
        ("limit=0", &[]),
        ("limit=0&offset=3", &[]),
        ("limit=1000000000000", &["d0", "d1", "d2", "d3", "d4", "d5", "d6"]),
        (
            "limit=99999999999999999999",
            &["d0", "d1", "d2", "d3", "d4", "d5", "d6"],
        ),
        ("limit=3&offset=99999999999999999999", &[]),
        ("limit=2&limit=1", &["d0"]),
    ] {
        let page = server
            .get(&format!("/collections/c/documents?{query}"))
            .await
            .ok();
        assert_eq!(ids(&page["documents"]), expected, "{query}");
        assert_eq!(page["count"], expected.len(), "{query}");
        assert_eq!(page["total"], 7, "{query}");
    }
}

#[tokio::test]
async fn replacing_a_document_keeps_its_place() {
    let server = plain().await;
    server.create("c").await;
    server.add("c", documents(3, |_| json!({}))).await;
    server
        .add(
            "c",
            vec![json!({"id": "d1", "text": "new text", "metadata": {"new": true}, "embedding": vector(9)})],
        )
        .await;
    let page = server.get("/collections/c/documents").await.ok();
    assert_eq!(ids(&page["documents"]), ["d0", "d1", "d2"]);
    assert_eq!(
        page["documents"][1],
        json!({"id": "d1", "text": "new text", "metadata": {"new": true}})
    );
    // Deleted and added again, it is new.
    server
        .delete_with("/collections/c/documents", json!(["d0"]))
        .await
        .ok();
    server.add("c", documents(1, |_| json!({}))).await;
    let page = server.get("/collections/c/documents").await.ok();
    assert_eq!(ids(&page["documents"]), ["d1", "d2", "d0"]);
}

#[tokio::test]
async fn wrong_numbers_are_refused_by_name() {
    let server = plain().await;
    server.create("c").await;
    for (query, name) in [
        ("limit=-1", "'limit'"),
        ("limit=ten", "'limit'"),
        ("limit=1.5", "'limit'"),
        ("limit=", "'limit'"),
        ("offset=-1", "'offset'"),
        ("offset=x", "'offset'"),
    ] {
        let detail = server
            .get(&format!("/collections/c/documents?{query}"))
            .await
            .refused(400);
        assert!(detail.contains(name), "{query}: {detail}");
    }
}

#[tokio::test]
async fn one_document_by_its_id() {
    let server = plain().await;
    server.create("c").await;
    let longest = "ü".repeat(256);
    let strange = [
        "plain",
        "with space",
        "a/b",
        "ünïcödé 🦀",
        "%41",
        "?x=1#y",
        "..",
        "'; DROP TABLE d; --",
        longest.as_str(),
    ];
    let documents = strange
        .iter()
        .enumerate()
        .map(|(n, id)| json!({"id": id, "text": format!("t{n}"), "embedding": vector(n)}));
    server.add("c", documents.collect()).await;
    for (n, id) in strange.iter().enumerate() {
        // Every client resolves `..`, however it is written.
        if *id == ".." {
            continue;
        }
        let encoded: String = id.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let path = format!("/collections/c/documents/{encoded}");
        let found = server.get(&path).await.ok();
        assert_eq!(
            found,
            json!({"id": id, "text": format!("t{n}"), "metadata": {}}),
            "{path}"
        );
    }
    let page = server.get("/collections/c/documents").await.ok();
    assert_eq!(ids(&page["documents"]), strange);
    let detail = server.get("/collections/c/documents/missing").await.refused(404);
    assert!(detail.contains("'missing'"), "{detail}");
    server
        .get(&format!("/collections/c/documents/{}", "x".repeat(513)))
        .await
        .refused(404);
}

/// `all` is a word of the route for DELETE, and an id like any other for GET.
#[tokio::test]
async fn a_document_may_be_called_all() {
    let server = plain().await;
    server.create("c").await;
    server
        .add(
            "c",
            vec![
                json!({"id": "all", "text": "t", "embedding": [1]}),
                json!({"id": "b", "text": "u", "embedding": [1]}),
            ],
        )
        .await;
    let answer = server.get("/collections/c/documents/all").await;
    assert_eq!(answer.ok()["id"], "all", "{answer:?}");
    let deleted = server
        .delete_with("/collections/c/documents", json!(["all"]))
        .await
        .ok();
    assert_eq!(deleted["count"], 1);
    assert_eq!(server.get("/collections/c").await.ok()["count"], 1);
}

#[tokio::test]
async fn text_and_metadata_come_back_as_they_went() {
    let server = plain().await;
    server.create("c").await;
    let metadata = json!({
        "s": "x", "n": 1, "f": 0.1, "t": true, "z": null, "l": [1, "a", null, [2], {"b": 3}], "o": {"p": {"q": []}},
        "": "", "$weird": 1, "a.b": 2, "big": 18446744073709551615u64, "exp": 1e300, "tiny": 5e-324,
    });
    let texts = [
        "a",
        " ",
        "\n\t",
        "nul \u{0} inside",
        "🦀 \u{200b}\u{301}",
        "'\"\\",
        "\u{feff}bom",
        "line\r\nline",
    ];
    let documents = texts.iter().enumerate().map(|(n, text)| json!({"id": format!("d{n}"), "text": text, "metadata": metadata, "embedding": vector(n)}));
    server.add("c", documents.collect()).await;
    let server = server.restarted().await;
    for (n, text) in texts.iter().enumerate() {
        let document = server.get(&format!("/collections/c/documents/d{n}")).await.ok();
        assert_eq!(
            document,
            json!({"id": format!("d{n}"), "text": text, "metadata": metadata})
        );
    }
}
