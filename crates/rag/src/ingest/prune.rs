//! Removing what vanished from where it was read.

use std::path::PathBuf;

use ragstone_core::collection::CollectionName;
use ragstone_core::storage::Selection;

use super::manifest;
use super::plan;
use super::report::Progress;
use super::run::Ingestion;
use super::walk;
use crate::error::ServiceError;

/// What was ingested under one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ingested {
    pub source: String,
    /// Where its file was; absent for what was no file of this machine.
    pub origin: Option<PathBuf>,
}

impl Ingestion {
    /// What was ingested into a collection, by name. What somebody added by hand is not among it.
    pub async fn ingested(&self, collection: &CollectionName) -> Result<Vec<Ingested>, ServiceError> {
        let manifests = manifest::list(self.records.as_ref(), collection).await?;
        let mut ingested: Vec<Ingested> = manifests
            .into_iter()
            .filter(|manifest| !manifest.source.is_empty())
            .map(|manifest| Ingested {
                origin: manifest.origin.as_deref().map(walk::path_of),
                source: manifest.source,
            })
            .collect();
        ingested.sort_by(|one, other| one.source.cmp(&other.source));
        Ok(ingested)
    }

    /// Forgets what was ingested into a collection that is no longer there, so that one of the same name
    /// begins anew.
    pub async fn forget_collection(&self, collection: &CollectionName) -> Result<(), ServiceError> {
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

    /// Removes all documents that were made of a source. The vectors of their texts stay in the
    /// ledger, where the same texts may need them again.
    pub async fn remove_source(
        &self,
        collection: &CollectionName,
        source: &str,
        progress: &Progress,
    ) -> Result<(), ServiceError> {
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
