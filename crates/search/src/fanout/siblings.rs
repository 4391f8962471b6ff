//! Expanding the merged hits with the documents that share a metadata field with them.

use std::collections::HashMap;

use futures::StreamExt;
use ragstone_core::backend::BackendError;
use ragstone_core::document::Document;
use ragstone_core::filter::Scalar;
use ragstone_core::siblings::{Expand, Gathering, SECTION_REACH, SIBLING_BYTES, in_document_order};
use ragstone_core::storage::Page;

use super::{FanoutQuery, FanoutResponse, Target};
use crate::storage_backend::search::siblings_truncated;

/// Sections that are fetched concurrently.
const CONCURRENT_SECTIONS: usize = 8;

/// The documents of one target that share a value of the field.
type SectionKey = (usize, Scalar);

/// Attaches to each hit the documents that share its value of the field, in document order. A section
/// of several hits is fetched once. A section that cannot be fetched is a warning.
pub(super) async fn expand(query: &FanoutQuery, expand: &Expand, response: &mut FanoutResponse) {
    let mut keys: Vec<Option<SectionKey>> = Vec::with_capacity(response.hits.len());
    let mut fetches = HashMap::new();
    for hit in &response.hits {
        let key = expand.section(&hit.hit.document).map(|value| (hit.target, value));
        if let Some(key) = &key
            && !fetches.contains_key(key)
        {
            let target = &query.targets[hit.target];
            fetches.insert(key.clone(), section(key.clone(), target, expand));
        }
        keys.push(key);
    }
    let fetched: Vec<_> = futures::stream::iter(fetches.into_values())
        .buffer_unordered(CONCURRENT_SECTIONS)
        .collect()
        .await;
    let mut sections = HashMap::new();
    for (key, found) in fetched {
        match found {
            Ok(documents) => {
                sections.insert(key, in_document_order(documents));
            }
            Err(error) => {
                let Target { service, name } = &query.targets[key.0];
                tracing::warn!(service = service.name, collection = %name, %error, "siblings could not be fetched");
                response.warn(Some(key.0), format!("no siblings: {}", error.public()));
            }
        }
    }
    let mut gathering = Gathering::new(expand, SIBLING_BYTES);
    for (hit, key) in response.hits.iter_mut().zip(keys) {
        if let Some(section) = key.and_then(|key| sections.get(&key)) {
            hit.hit.siblings = Some(gathering.within(section, &hit.hit.document));
        }
    }
    if gathering.cut {
        response.warn(None, siblings_truncated());
    }
}

async fn section(
    key: SectionKey,
    target: &Target,
    expand: &Expand,
) -> (SectionKey, Result<Vec<Document>, BackendError>) {
    let filter = expand.filter(key.1.clone());
    let page = Page {
        limit: 2 * SECTION_REACH,
        offset: 0,
    };
    let found = target
        .service
        .backend
        .documents(&target.name, &filter, page)
        .await;
    (key, found.map(|page| page.documents))
}
