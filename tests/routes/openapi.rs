//! `GET /openapi.json`

use std::collections::HashSet;

use serde_json::Value;

use crate::support::plain;

#[tokio::test]
async fn the_whole_document() {
    let server = plain().await;
    let answer = server.get("/openapi.json").await;
    assert_eq!(answer.header("content-type"), "application/json");
    let mut api = answer.ok();
    api["info"]["version"] = "[version]".into();
    insta::assert_json_snapshot!("openapi", api);
}

/// Every reference leads somewhere, and every route says what it answers, its errors included.
#[tokio::test]
async fn it_is_complete() {
    let server = plain().await;
    let api = server.get("/openapi.json").await.ok();
    assert!(api["openapi"].as_str().unwrap().starts_with("3."));
    let mut references = Vec::new();
    collect_references(&api, &mut references);
    assert!(!references.is_empty());
    for reference in references {
        let pointer = reference.strip_prefix('#').expect("within the document");
        assert!(api.pointer(pointer).is_some(), "{reference} leads nowhere");
    }
    let mut operations = HashSet::new();
    for (path, item) in api["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let name = format!("{method} {path}");
            let id = operation["operationId"].as_str().unwrap();
            assert!(operations.insert(id), "{name} is not the only {id}");
            assert!(operation["summary"].is_string(), "{name} has no summary");
            let responses = operation["responses"].as_object().unwrap();
            assert!(responses.keys().any(|status| status.starts_with('2')), "{name}");
            assert!(responses.contains_key("500"), "{name}");
            let open = ["/health", "/livez", "/readyz"].contains(&path.as_str());
            assert_eq!(responses.contains_key("401"), !open, "{name}");
            if path.contains('{') {
                assert!(responses.contains_key("404"), "{name}");
                assert!(
                    operation["parameters"].as_array().is_some_and(|p| !p.is_empty()),
                    "{name}"
                );
            }
            if path.starts_with("/api/") && responses.contains_key("502") {
                assert!(
                    responses.contains_key("429"),
                    "{name} passes on what a service says"
                );
            }
            if let Some(body) = operation.get("requestBody") {
                assert!(responses.contains_key("400"), "{name}");
                let forms = body["content"].as_object().expect("the forms of the body");
                assert!(
                    forms.values().all(|form| form["schema"].is_object()) && !forms.is_empty(),
                    "{name}"
                );
            }
            for (status, response) in responses.iter().filter(|(status, _)| !status.starts_with('2')) {
                let schema = &response["content"]["application/json"]["schema"]["$ref"];
                assert_eq!(*schema, "#/components/schemas/ErrorBody", "{name} {status}");
            }
        }
    }
    assert!(api["components"]["securitySchemes"]["bearer"].is_object());
    assert!(api["components"]["securitySchemes"]["api_key"].is_object());
}

fn collect_references<'a>(value: &'a Value, into: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            into.extend(map.get("$ref").and_then(Value::as_str));
            map.values().for_each(|value| collect_references(value, into));
        }
        Value::Array(items) => items.iter().for_each(|value| collect_references(value, into)),
        _ => {}
    }
}
