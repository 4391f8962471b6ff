//! The body of an add: any bytes are either refused, or documents that keep every rule.

#![no_main]

use std::collections::HashSet;

use libfuzzer_sys::fuzz_target;
use ragstone_core::document::{MAX_DIMENSIONS, RawDocument, check_documents};

fuzz_target!(|body: &[u8]| {
    let Ok(raw) = serde_json::from_slice::<Vec<RawDocument>>(body) else {
        return;
    };
    let sent = raw.len();
    let documents = match check_documents(raw) {
        Ok(documents) => documents,
        Err(refusal) => {
            let message = refusal.message();
            assert!(
                message.starts_with("Document at index ") || message == "Documents array is required",
                "{message}"
            );
            assert!(
                message.len() < 2000,
                "a refusal must not echo everything it was sent"
            );
            return;
        }
    };
    assert_eq!(documents.len(), sent);
    let mut ids = HashSet::new();
    for new in &documents {
        let id = new.document.id.as_str();
        assert!(!id.is_empty() && id.len() <= 512);
        assert!(ids.insert(id), "two documents have the id {id:?}");
        assert!(!new.document.text.is_empty());
        if let Some(vector) = &new.embedding {
            assert!((1..=MAX_DIMENSIONS).contains(&vector.len()));
            assert!(vector.iter().all(|x| x.is_finite()) && vector.iter().any(|x| *x != 0.0));
        }
    }
});
