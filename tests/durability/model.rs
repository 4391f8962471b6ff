//! A reference implementation of a store.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::support::{Server, ids};

/// Documents in the order of their first insertion.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ModelCollection {
    pub(super) metadata: Value,
    pub(super) documents: Vec<ModelDocument>,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModelDocument {
    pub(super) id: String,
    pub(super) text: String,
    pub(super) metadata: Value,
    pub(super) vector: [f32; 3],
}

pub(super) type ModelStore = BTreeMap<String, ModelCollection>;

impl ModelCollection {
    pub(super) fn new(metadata: Value) -> Self {
        Self {
            metadata,
            documents: Vec::new(),
        }
    }

    pub(super) fn upsert(&mut self, document: ModelDocument) {
        match self.documents.iter_mut().find(|known| known.id == document.id) {
            Some(known) => *known = document,
            None => self.documents.push(document),
        }
    }

    /// Returns the number of deleted documents.
    pub(super) fn delete(&mut self, doomed: impl Fn(&ModelDocument) -> bool) -> usize {
        let before = self.documents.len();
        self.documents.retain(|document| !doomed(document));
        before - self.documents.len()
    }

    pub(super) fn as_json(&self) -> Vec<Value> {
        self.documents.iter().map(ModelDocument::as_json).collect()
    }
}

impl ModelDocument {
    pub(super) fn as_json(&self) -> Value {
        json!({"id": self.id, "text": self.text, "metadata": self.metadata})
    }

    pub(super) fn to_add(&self) -> Value {
        json!({"id": self.id, "text": self.text, "metadata": self.metadata, "embedding": self.vector})
    }
}

/// All documents of a collection, page by page.
pub(super) async fn stored(server: &Server, collection: &str) -> Vec<Value> {
    let mut documents = Vec::new();
    loop {
        let path = format!(
            "/collections/{collection}/documents?limit=1000&offset={}",
            documents.len()
        );
        let page = server.get(&path).await.ok();
        let more = page["documents"].as_array().expect("documents").clone();
        let total = page["total"].as_u64().expect("a total") as usize;
        documents.extend(more);
        if documents.len() >= total || page["count"] == 0 {
            assert_eq!(documents.len(), total, "the pages add up to the total");
            return documents;
        }
    }
}

/// Asserts that the indexes of vectors, words and metadata contain exactly these documents.
pub(super) async fn assert_indexes_agree(server: &Server, collection: &str, documents: &[Value]) {
    let mut expected = ids_of(documents);
    expected.sort_unstable();
    let query = format!("/collections/{collection}/query");
    for body in [
        json!({"query_embedding": [1.0, 0.5, 0.25], "top_k": 1000}),
        json!({"query": "word", "mode": "keyword", "top_k": 1000}),
    ] {
        let answer = server.post(&query, body.clone()).await.ok();
        let mut found: Vec<String> = ids(&answer["results"]).into_iter().map(str::to_owned).collect();
        found.sort_unstable();
        assert_eq!(found, expected, "{collection}: {body}");
    }
    let mut groups: Vec<i64> = documents
        .iter()
        .filter_map(|document| document["metadata"]["group"].as_i64())
        .collect();
    groups.sort_unstable();
    groups.dedup();
    let values = server
        .get(&format!("/collections/{collection}/metadata-values?field=group"))
        .await
        .ok();
    assert_eq!(values["values"], json!(groups), "{collection}");
    for group in groups {
        let page = server.find(collection, json!({"group": group})).await.ok();
        let members = documents
            .iter()
            .filter(|document| document["metadata"]["group"] == group)
            .count();
        assert_eq!(page["total"], members, "{collection}, group {group}");
    }
}

fn ids_of(documents: &[Value]) -> Vec<String> {
    documents
        .iter()
        .map(|document| document["id"].as_str().expect("an id").to_owned())
        .collect()
}
