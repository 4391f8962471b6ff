//! Removing what vanished from where it was read.

use ragstone_core::collection::CollectionName;
use ragstone_core::store::Selection;

use super::chunk::keys;
use super::manifest;
use super::plan;
use super::report::Progress;
use super::run::Ingestion;
use crate::error::ServiceError;

impl Ingestion {
    /// The sources that a collection has documents of.
    pub async fn sources(&self, collection: &CollectionName) -> Result<Vec<String>, ServiceError> {
        let values = self
            .service
            .store
            .metadata_values(collection, keys::SOURCE)
            .await?;
        Ok(values
            .into_iter()
            .filter_map(|value| value.as_str().map(str::to_owned))
            .collect())
    }

    /// Removes all documents of a source.
    pub async fn remove_source(
        &self,
        collection: &CollectionName,
        source: &str,
        progress: &Progress,
    ) -> Result<(), ServiceError> {
        let selection = Selection::Matching(plan::of_source(source));
        let removed = self.service.store.delete_documents(collection, selection).await?;
        self.records
            .apply(vec![manifest::remove(collection, source)])
            .await?;
        progress.update(|report| {
            report.documents.removed += 1;
            report.chunks.removed += removed;
        });
        Ok(())
    }
}
