//! Sources of a collection: listing and removing them.

use std::collections::HashSet;

use ragstone_core::collection::CollectionName;
use ragstone_core::storage::Selection;
use serde::{Deserialize, Serialize};

use super::chunk::keys;
use super::manifest;
use super::plan;
use super::report::Progress;
use super::run::Ingestion;
use ragstone_core::backend::BackendError;

/// A source that was ingested into a collection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IngestedSource {
    pub source: String,
    /// Machine and absolute path that it was read from; absent where it was no file.
    pub origin: Option<String>,
    /// Whether it has no documents, because it has no text.
    #[serde(default)]
    pub empty: bool,
}

impl Ingestion {
    /// Sources that were ingested into a collection, by name. Documents that were added otherwise have
    /// no source here, and sources whose documents were deleted are left out.
    pub async fn sources(&self, collection: &CollectionName) -> Result<Vec<IngestedSource>, BackendError> {
        let stored = self
            .service
            .store
            .metadata_values(collection, keys::SOURCE)
            .await?;
        let stored: HashSet<&str> = stored.iter().filter_map(|value| value.as_str()).collect();
        let manifests = manifest::list(self.records.as_ref(), collection).await?;
        let mut sources: Vec<IngestedSource> = manifests
            .into_iter()
            .filter(|manifest| !manifest.source.is_empty())
            .filter(|manifest| manifest.chunks == 0 || stored.contains(manifest.source.as_str()))
            .map(|manifest| IngestedSource {
                empty: !stored.contains(manifest.source.as_str()),
                origin: manifest.origin,
                source: manifest.source,
            })
            .collect();
        sources.sort_by(|one, other| one.source.cmp(&other.source));
        Ok(sources)
    }

    /// Forgets the sources of a deleted collection, so that one of the same name starts empty.
    pub async fn forget_collection(&self, collection: &CollectionName) -> Result<(), BackendError> {
        for manifests in manifest::list(self.records.as_ref(), collection)
            .await?
            .chunks(1000)
        {
            let changes = manifests
                .iter()
                .map(|manifest| manifest::remove(collection, &manifest.source));
            self.records.apply(changes.collect()).await?;
        }
        Ok(())
    }

    /// Removes all documents of a source. The vectors of their texts stay in the ledger, for use by
    /// the same texts.
    pub async fn remove_source(
        &self,
        collection: &CollectionName,
        source: &str,
        progress: &Progress,
    ) -> Result<(), BackendError> {
        let before = manifest::load(self.records.as_ref(), collection, source).await?;
        let selection = Selection::Matching(plan::of_source(source));
        let removed = self.service.store.delete_documents(collection, selection).await?;
        self.records
            .apply(vec![manifest::remove(collection, source)])
            .await?;
        let was_there = removed > 0 || before.is_some_and(|manifest| manifest.chunks == 0);
        progress.update(|report| {
            report.documents.removed += u64::from(was_there);
            report.chunks.removed += removed;
        });
        Ok(())
    }
}
