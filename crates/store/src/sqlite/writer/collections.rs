//! Steps that change collections.

use ragstone_core::storage::MetadataUpdate;
use ragstone_core::{Collection, CollectionName, Metadata};

use super::transaction::{Change, Transaction};
use crate::error::{Error, Result};
use crate::sqlite::faults::FaultPoint;

impl Transaction<'_> {
    pub(crate) fn create_collection(
        &mut self,
        name: CollectionName,
        metadata: Metadata,
    ) -> Result<Collection> {
        if self.find(&name)?.is_some() {
            return Err(Error::CollectionExists(name));
        }
        self.connection
            .prepare_cached("INSERT INTO collections (name, metadata, version) VALUES (?1, ?2, 0)")?
            .execute((name.as_str(), serde_json::to_string(&metadata)?))?;
        let id = self.connection.last_insert_rowid();
        self.change(id, Change::Create);
        Ok(Collection {
            name,
            count: 0,
            metadata,
            dimensions: None,
        })
    }

    pub(crate) fn update_metadata(
        &mut self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata> {
        let row = self.require(name)?;
        let metadata = match update {
            MetadataUpdate::Replace => metadata,
            MetadataUpdate::Merge => {
                let mut merged: Metadata = serde_json::from_str(&row.metadata)?;
                merged.extend(metadata);
                merged
            }
        };
        self.connection
            .prepare_cached("UPDATE collections SET metadata = ?2 WHERE id = ?1")?
            .execute((row.id, serde_json::to_string(&metadata)?))?;
        self.change(row.id, Change::Touch);
        Ok(metadata)
    }

    pub(crate) fn delete_collection(&mut self, name: &CollectionName) -> Result<()> {
        let row = self.require(name)?;
        self.drop_collection(row.id)
    }

    /// Replaces the collection by an empty one of the same name, with another id.
    pub(crate) fn empty(&mut self, name: &CollectionName) -> Result<u64> {
        let row = self.require(name)?;
        let count = self.snapshot(row.id)?.count();
        if count == 0 {
            return Ok(0);
        }
        self.drop_collection(row.id)?;
        self.fault(FaultPoint::WhileEmptying)?;
        self.connection
            .prepare_cached("INSERT INTO collections (name, metadata, version) VALUES (?1, ?2, ?3)")?
            .execute((name.as_str(), row.metadata, row.version))?;
        let id = self.connection.last_insert_rowid();
        self.change(id, Change::Create);
        Ok(count)
    }

    fn drop_collection(&mut self, collection: i64) -> Result<()> {
        self.connection
            .prepare_cached("DELETE FROM collections WHERE id = ?1")?
            .execute([collection])?;
        self.mark_collection_deleted(collection)?;
        self.change(collection, Change::Drop);
        Ok(())
    }
}
