//! Embedding and RAG for agents: the scenarios that are visible over HTTP. Unit tests of the same names
//! cover providers and the embedding buffer.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use crate::memory::stub::{self, Stub};
use crate::memory::{config, config_with, save_knowledge, setup, until_embedded};
use crate::support::{Server, Setup, ids, plain};

async fn filled(stub: &Stub) -> Server {
    filled_with(setup(stub)).await
}

async fn filled_with(setup: Setup) -> Server {
    let server = setup.start().await;
    save_knowledge(&server, "tea", "tea is at four").await;
    save_knowledge(&server, "fuel", "diesel engines need glow plugs").await;
    for (kind, session) in [
        ("observations", "s1"),
        ("observations", "s2"),
        ("reflections", "s2"),
    ] {
        let id = format!("{}-{session}", &kind[..1]);
        let body = json!({"session_key": session, "content": format!("tea in session {session}"), "id": id});
        server.post(&format!("/memory/{kind}"), body).await.ok();
    }
    let learning = json!({"trigger": "no tea", "fix": "boil water", "category": "kitchen", "id": "l"});
    server.post("/memory/learnings", learning).await.ok();
    until_embedded(&server, 6).await;
    server
}

async fn retrieve(server: &Server, body: Value) -> Value {
    server.post("/rag/retrieve", body).await.ok()
}

fn sorted_ids(answer: &Value) -> Vec<&str> {
    let mut found = ids(&answer["results"]);
    found.sort_unstable();
    found
}

fn distances(answer: &Value) -> Vec<f64> {
    let results = answer["results"].as_array().expect("results");
    results
        .iter()
        .map(|result| result["distance"].as_f64().expect("a distance"))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn req_emb_001_the_vector_dimension_matches_the_sqlite_vec_table_schema() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let setup = server.setup().clone();
    server.stop();
    let database = setup.data_dir().join("ragstone.db");
    let connection = rusqlite::Connection::open(database).unwrap();
    let mut tables = connection
        .prepare("SELECT sql FROM sqlite_master WHERE sql LIKE '%USING vec0%'")
        .unwrap();
    let tables: Vec<String> = tables
        .query_map([], |row| row.get(0))
        .unwrap()
        .map(Result::unwrap)
        .collect();
    assert_eq!(tables.len(), 4, "one table for each kind of memory: {tables:?}");
    assert!(
        tables
            .iter()
            .all(|sql| sql.contains(&format!("float[{}]", stub::WIDTH))),
        "{tables:?}"
    );
}

#[tokio::test]
async fn req_emb_002_given_a_record_when_upsert_is_called_then_it_is_stored_and_retrievable() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    let learning = json!({"trigger": "no tea", "fix": "boil water", "category": "kitchen", "id": "l"});
    server.post("/memory/learnings", learning).await.ok();
    until_embedded(&server, 1).await;
    let answer = retrieve(&server, json!({"query": "boil water"})).await;
    assert_eq!(ids(&answer["results"]), ["l"]);
    assert_eq!(answer["results"][0]["metadata"], json!({"category": "kitchen"}));
}

#[tokio::test]
async fn req_emb_002_given_an_existing_id_when_upsert_is_called_again_then_the_record_is_replaced() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    save_knowledge(&server, "tea", "glow plugs and diesel engines").await;
    until_embedded(&server, 6).await;
    let body = json!({"query": "glow plugs and diesel engines", "collections": ["knowledge"]});
    let answer = retrieve(&server, body).await;
    assert_eq!(ids(&answer["results"]), ["tea", "fuel"]);
    assert!(distances(&answer)[0] < 1e-3, "{answer}");
}

#[tokio::test]
async fn req_emb_002_given_stored_vectors_when_search_is_called_then_results_are_sorted_by_distance() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let answer = retrieve(&server, json!({"query": "tea at four", "limit": 6})).await;
    assert_eq!(answer["results"][0]["id"], "tea");
    assert!(distances(&answer).is_sorted(), "{answer}");
}

#[tokio::test]
async fn req_emb_002_given_stored_records_when_delete_is_called_then_those_records_are_removed() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    server.delete("/memory/knowledge/tea").await.ok();
    until_embedded(&server, 5).await;
    let answer = retrieve(&server, json!({"query": "tea is at four", "limit": 10})).await;
    assert_eq!(sorted_ids(&answer), ["fuel", "l", "o-s1", "o-s2", "r-s2"]);
}

#[tokio::test]
async fn req_emb_004_given_multiple_enqueued_requests_they_are_sent_to_the_provider_in_one_batch() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    // Two calls that are not answered yet keep the buffer from making another.
    stub.hold();
    save_knowledge(&server, "first", "first").await;
    stub.until_in_flight(1).await;
    save_knowledge(&server, "second", "second").await;
    stub.until_in_flight(2).await;
    let texts: BTreeSet<String> = (0..20).map(|n| format!("number {n:02}")).collect();
    for text in &texts {
        let body = json!({"session_key": "s", "content": text});
        server.post("/memory/observations", body).await.ok();
    }
    stub.release();
    until_embedded(&server, 22).await;
    let calls = stub.embed_calls();
    let [_, _, batch] = calls.as_slice() else {
        panic!("not one batch after the two calls: {calls:?}")
    };
    assert_eq!(batch.iter().cloned().collect::<BTreeSet<_>>(), texts);
    assert_eq!(batch.len(), 20);
}

#[tokio::test]
async fn req_emb_005_without_embedding_saving_and_reading_work_as_before() {
    let server = plain().await;
    save_knowledge(&server, "tea", "tea is at four").await;
    assert_eq!(
        server.get("/memory/knowledge/tea").await.ok()["content"],
        "tea is at four"
    );
    assert_eq!(
        server.get("/memory/status").await.ok(),
        json!({"enabled": false, "queued": 0, "embedded": 0, "failed": 0, "dropped": 0})
    );
    let detail = server
        .post("/rag/retrieve", json!({"query": "tea"}))
        .await
        .refused(503);
    assert!(detail.contains("embedding.providerID"), "{detail}");
}

/// Two collections with a model of their own each. Neither model answers before both were asked, so
/// that searches one after the other never get to the second.
#[tokio::test]
async fn req_emb_006_parallel_collection_search() {
    let (memory, one, two) = (Stub::start().await, Stub::start().await, Stub::start().await);
    let provider = |name: &str, stub: &Stub| {
        format!(
            "  {name}: {{type: openai, apiKey: {:?}, baseUrl: {:?}}}\n",
            stub::KEY,
            stub.url()
        )
    };
    let providers = format!("providers:\n{}{}", provider("one", &one), provider("two", &two));
    let setup = Setup::serve().config(&config(&memory).replacen("providers:\n", &providers, 1));
    let model = |name: &str| {
        let width = stub::WIDTH;
        format!("  - {{id: {name}, provider: {name}, model: stub-embed, dimensions: {width}}}\n")
    };
    let models = setup.file(
        "embeddings.yml",
        &format!("embeddings:\n{}{}", model("one"), model("two")),
    );
    let server = setup.arg("--embeddings-config").arg(models).start().await;
    for name in ["one", "two"] {
        server
            .post("/collections", json!({"name": name, "embedding_model": name}))
            .await
            .ok();
        let documents = json!({"id": format!("in-{name}"), "text": "tea time"});
        server.add(name, vec![documents]).await;
    }
    let before = [&one, &two].map(|stub| stub.embed_calls().len());
    one.hold();
    two.hold();
    let asked = retrieve(
        &server,
        json!({"query": "when is tea?", "collections": ["one", "two"]}),
    );
    let both_asked = async {
        one.until_in_flight(1).await;
        two.until_in_flight(1).await;
        one.release();
        two.release();
    };
    let (answer, ()) = tokio::join!(asked, both_asked);
    assert_eq!(sorted_ids(&answer), ["in-one", "in-two"]);
    assert_eq!(answer["warnings"], json!([]));
    for (stub, before) in [(&one, before[0]), (&two, before[1])] {
        assert_eq!(
            stub.embed_calls()[before..],
            [["when is tea?".to_owned()]],
            "each model embeds the query once"
        );
    }
}

#[tokio::test]
async fn a_query_is_embedded_once_for_all_kinds_of_memory() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let before = stub.embed_calls().len();
    let answer = retrieve(&server, json!({"query": "tea time", "limit": 10})).await;
    assert_eq!(sorted_ids(&answer), ["fuel", "l", "o-s1", "o-s2", "r-s2", "tea"]);
    assert_eq!(stub.embed_calls()[before..], [["tea time".to_owned()]]);
}

#[tokio::test]
async fn req_emb_006_single_collection_failure() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let answer = retrieve(
        &server,
        json!({"query": "tea", "collections": ["knowledge", "missing"]}),
    )
    .await;
    assert_eq!(sorted_ids(&answer), ["fuel", "tea"]);
    assert_eq!(answer["warnings"].as_array().unwrap().len(), 1);
    server.wait_for_log("a collection could not be searched");
}

#[tokio::test]
async fn req_emb_006_results_sorted_and_limited() {
    let stub = Stub::start().await;
    let server = filled_with(Setup::without_models().config(&config_with(&stub, "{maxResults: 2}"))).await;
    let all = retrieve(&server, json!({"query": "tea", "limit": 10})).await;
    assert!(distances(&all).is_sorted() && distances(&all).len() == 6);
    let configured = retrieve(&server, json!({"query": "tea"})).await;
    assert_eq!(
        configured["results"].as_array(),
        all["results"].as_array().map(|all| all[..2].to_vec()).as_ref()
    );
}

#[tokio::test]
async fn req_emb_007_the_section_is_injected_into_the_system_prompt_before_each_call() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    for messages in [
        json!([{"role": "user", "content": "when is tea?"}]),
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "when is tea?"}]),
    ] {
        server
            .post("/v1/chat/completions", json!({"messages": messages}))
            .await
            .ok();
        let system = stub.last_system_prompt();
        assert!(
            system.contains("## Semantic Context (RAG)\n") && system.contains("### [knowledge] tea\n"),
            "{system}"
        );
        assert!(system.contains("tea is at four"), "{system}");
    }
    assert!(stub.last_system_prompt().starts_with("Be brief."));
}

#[tokio::test]
async fn req_emb_008_all_embedding_settings_are_read_from_the_configuration() {
    let stub = Stub::start().await;
    let snake = config(&stub)
        .replace("providerID", "provider_id")
        .replace("baseUrl", "base_url")
        .replace("apiKey", "api_key")
        .replace(
            "{enabled: true}",
            "{enabled: true, max_results: 1, max_distance: 0.5, collections: [knowledge]}",
        );
    let server = filled_with(Setup::without_models().config(&snake)).await;
    let query = "tea is at four";
    // A setting takes effect unless the request overrides it.
    for (body, expected) in [
        (json!({"query": query}), &["tea"][..]),
        (json!({"query": query, "limit": 10}), &["tea"]),
        (json!({"query": query, "max_distance": 2}), &["tea"]),
        (
            json!({"query": query, "limit": 10, "max_distance": 2}),
            &["tea", "fuel"],
        ),
    ] {
        let answer = retrieve(&server, body.clone()).await;
        assert_eq!(ids(&answer["results"]), expected, "{body}");
    }
    req_emb_008_rag_settings_of_chats(&stub).await;
    req_emb_008_local_endpoint().await;
}

async fn req_emb_008_rag_settings_of_chats(stub: &Stub) {
    let ask = async |server: &Server, message: &str| {
        let body = json!({"messages": [{"role": "user", "content": message}]});
        server.post("/v1/chat/completions", body).await.ok();
        stub.last_system_prompt()
    };
    let server = filled_with(Setup::without_models().config(&config_with(stub, "{enabled: false}"))).await;
    assert_eq!(ask(&server, "when is tea?").await, "");

    let few = "{enabled: true, max_tokens: 120, max_results: 6}";
    let server = filled_with(Setup::without_models().config(&config_with(stub, few))).await;
    let short = ask(&server, "when is tea?").await;
    let server =
        filled_with(Setup::without_models().config(&config_with(stub, "{enabled: true, max_results: 6}")))
            .await;
    let whole = ask(&server, "when is tea?").await;
    let entries = |prompt: &str| prompt.matches("\n### [").count();
    assert_eq!(entries(&whole), 6, "{whole}");
    assert!((1..6).contains(&entries(&short)), "{short}");

    // Longer than a chat waits by default.
    let patient = "{enabled: true, timeout_ms: 100000}";
    let server = filled_with(Setup::without_models().config(&config_with(stub, patient))).await;
    stub.hold();
    let released = async {
        stub.until_in_flight(1).await;
        tokio::time::sleep(Duration::from_millis(2500)).await;
        stub.release();
    };
    let (prompt, ()) = tokio::join!(ask(&server, "is it tea time yet?"), released);
    assert!(prompt.contains("tea is at four"), "{prompt}");
}

/// The stub checks the model, the dimensions and that no key is sent.
async fn req_emb_008_local_endpoint() {
    let stub = Stub::behaving(stub::Behaviour {
        keyless: true,
        ..stub::Behaviour::default()
    })
    .await;
    for (model, local_model) in [("stub-embed", ""), ("", "stub-embed")] {
        let yaml = format!(
            "embedding: {{provider: local, model: {model:?}, dimensions: {}, \
             local: {{baseUrl: {:?}, model: {local_model:?}}}}}",
            stub::WIDTH,
            stub.url()
        );
        let before = stub.embed_calls().len();
        let server = Setup::without_models().config(&yaml).start().await;
        save_knowledge(&server, "tea", "tea is at four").await;
        until_embedded(&server, 1).await;
        assert_eq!(stub.embed_calls()[before..], [["tea is at four".to_owned()]]);
    }
}

#[tokio::test]
async fn req_emb_009_the_doctor_includes_an_embedding_rag_check() {
    let finished = Setup::command(&["doctor", "--json"])
        .config("embedding: {providerID: nobody}")
        .run();
    assert_eq!(finished.code, Some(1));
    let report: Value = serde_json::from_str(&finished.stdout).unwrap();
    let results = report["results"].as_array().unwrap();
    let check = results
        .iter()
        .find(|result| result["name"] == "Embedding / RAG")
        .unwrap();
    assert_eq!(check["status"], "fail");
}

#[tokio::test]
async fn req_emb_011_given_provider_local_then_the_backend_is_local_with_no_api_key() {
    let server = Setup::without_models()
        .config("embedding: {provider: local, local: {baseUrl: \"http://127.0.0.1:9/v1\", model: m}}")
        .start()
        .await;
    assert_eq!(server.get("/memory/status").await.ok()["enabled"], true);
    server.wait_for_log("local/m/768");
}

#[tokio::test]
async fn req_emb_011_given_both_are_empty_then_the_embedding_system_is_disabled() {
    let server = Setup::without_models()
        .config("embedding: {providerID: \"\", provider: \"\"}")
        .start()
        .await;
    assert_eq!(server.get("/memory/status").await.ok()["enabled"], false);
}

#[tokio::test]
async fn req_emb_012_given_max_distance_a_result_beyond_it_is_excluded() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let all = retrieve(&server, json!({"query": "tea is at four", "limit": 10})).await;
    assert!(distances(&all).iter().any(|distance| *distance > 0.5), "{all}");
    let near = retrieve(
        &server,
        json!({"query": "tea is at four", "limit": 10, "max_distance": 0.5}),
    )
    .await;
    assert!(
        !distances(&near).is_empty() && distances(&near).iter().all(|distance| *distance <= 0.5),
        "{near}"
    );
}

#[tokio::test]
async fn req_emb_012_given_max_distance_zero_all_results_are_returned() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let body = json!({"query": "entirely unrelated words", "limit": 10, "max_distance": 0.0});
    assert_eq!(distances(&retrieve(&server, body).await).len(), 6);
}

#[tokio::test]
async fn req_emb_013_given_a_session_key_only_that_sessions_entries_are_included() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let answer = retrieve(&server, json!({"query": "tea", "limit": 10, "session_key": "s2"})).await;
    assert_eq!(sorted_ids(&answer), ["fuel", "l", "o-s2", "r-s2", "tea"]);
    let nobody = retrieve(
        &server,
        json!({"query": "tea", "collections": ["observation"], "session_key": "s9"}),
    )
    .await;
    assert_eq!(nobody["results"], json!([]));
}

#[tokio::test]
async fn req_emb_013_given_no_session_key_all_results_are_returned() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let answer = retrieve(&server, json!({"query": "tea", "limit": 10})).await;
    assert_eq!(sorted_ids(&answer).len(), 6);
}

#[tokio::test]
async fn req_emb_014_given_nil_search_options_behavior_is_identical() {
    let stub = Stub::start().await;
    let server = filled(&stub).await;
    let plain = retrieve(&server, json!({"query": "tea", "limit": 10})).await;
    let nil = json!({"query": "tea", "limit": 10, "session_key": null, "max_distance": null});
    assert_eq!(sorted_ids(&plain).len(), 6);
    assert_eq!(retrieve(&server, nil).await["results"], plain["results"]);
}

/// A selective filter still finds the best matching entries.
#[tokio::test]
async fn req_emb_014_given_a_metadata_filter_results_match_all_pairs() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    for n in 0..60 {
        let session = if n == 59 { "rare" } else { "common" };
        let body = json!({"session_key": session, "content": format!("tea {n}"), "id": format!("o{n}")});
        server.post("/memory/observations", body).await.ok();
    }
    until_embedded(&server, 60).await;
    let body = json!({"query": "tea 3", "limit": 3, "session_key": "rare", "collections": ["observation"]});
    assert_eq!(ids(&retrieve(&server, body).await["results"]), ["o59"]);

    // Collections have arbitrary metadata. The document that matches both pairs is the farthest.
    server.post("/collections", json!({"name": "c"})).await.ok();
    let pairs = |n: usize| match n {
        59 => json!({"a": "rare", "b": "rare"}),
        n if n % 2 == 0 => json!({"a": "rare", "b": "common"}),
        _ => json!({"a": "common", "b": "rare"}),
    };
    let documents: Vec<Value> = (0..60)
        .map(|n| json!({"id": format!("d{n}"), "text": "x", "metadata": pairs(n), "embedding": [1.0, n as f64]}))
        .collect();
    server
        .post("/collections/c/documents", json!({"documents": documents}))
        .await
        .ok();
    let query = json!({"collection": "c", "query_embedding": [1.0, 0.0], "top_k": 3,
        "where": {"a": "rare", "b": "rare"}});
    assert_eq!(ids(&server.post("/query", query).await.ok()["results"]), ["d59"]);
}

/// The stub answers on another thread while this one waits for a process to end.
#[tokio::test(flavor = "multi_thread")]
async fn req_emb_004_given_the_buffer_is_stopped_remaining_items_are_drained_before_exit() {
    let stub = Stub::behaving(stub::Behaviour {
        delay: Duration::from_millis(200),
        ..stub::Behaviour::default()
    })
    .await;
    let server = setup(&stub).start().await;
    save_knowledge(&server, "tea", "tea is at four").await;
    let (status, _) = server.stop();
    assert!(status.success());
    assert_eq!(stub.embed_calls().concat(), ["tea is at four"]);
}
