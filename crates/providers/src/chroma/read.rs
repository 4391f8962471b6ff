//! Reading documents: pages, metadata values, and matching ids.

use std::collections::{BTreeSet, HashMap};

use ragstone_core::collection::shorten;
use ragstone_core::filter::Scalar;
use ragstone_core::storage::{DocumentPage, Page, StorageError};
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::ChromaStorage;
use super::api::{ChromaRecords, CollectionRecord};
use super::codec;
use super::narrow::{Narrowed, narrow};

/// Page sizes, in documents: of metadata alone, and with texts.
const METADATA_PAGE: usize = 5000;
pub(super) const TEXT_PAGE: usize = 1000;

/// Consecutive documents.
#[derive(Default)]
struct Run {
    documents: Vec<Document>,
    /// How many were read, unusable ones included.
    read: usize,
}

impl ChromaStorage {
    pub(super) async fn page(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        let record = self.api.collection(name).await?;
        if filter.is_everything() {
            let counted = self.api.count(&record).await?;
            if page.offset >= counted {
                // Chroma refuses very large offsets.
                return Ok(DocumentPage {
                    documents: Vec::new(),
                    total: counted,
                });
            }
            let Run { documents, read } = self.run_of_documents(&record, page).await?;
            // A page that reaches the end gives the total of the state it was read from.
            let read = read as u64;
            let total = if read < page.limit as u64 && (read > 0 || page.offset == 0) {
                page.offset + read
            } else {
                counted
            };
            return Ok(DocumentPage { documents, total });
        }
        let mut total = 0;
        let mut ids = Vec::new();
        self.each_match(&record, filter, |id| {
            if total >= page.offset && ids.len() < page.limit {
                ids.push(id);
            }
            total += 1;
        })
        .await?;
        let documents = self.fetch(&record, &ids).await?;
        Ok(DocumentPage { documents, total })
    }

    async fn run_of_documents(&self, record: &CollectionRecord, page: Page) -> Result<Run, StorageError> {
        let mut run = Run::default();
        while run.read < page.limit {
            let limit = (page.limit - run.read).min(TEXT_PAGE);
            let records = self
                .api
                .get(
                    record,
                    &json!({
                        "include": ["documents", "metadatas"],
                        "limit": limit, "offset": page.offset + run.read as u64,
                    }),
                )
                .await?;
            let got = records.ids.len();
            run.documents.extend(self.read_documents(records));
            run.read += got;
            if got < limit {
                break;
            }
        }
        Ok(run)
    }

    /// The documents of these ids, in their order. Missing ones are left out.
    pub(super) async fn fetch(
        &self,
        record: &CollectionRecord,
        ids: &[String],
    ) -> Result<Vec<Document>, StorageError> {
        let mut found: HashMap<String, Document> = HashMap::with_capacity(ids.len());
        for ids in ids.chunks(TEXT_PAGE) {
            let request = json!({"ids": ids, "include": ["documents", "metadatas"]});
            let records = self.api.get(record, &request).await?;
            for document in self.read_documents(records) {
                found.insert(document.id.as_str().to_owned(), document);
            }
        }
        Ok(ids.iter().filter_map(|id| found.remove(id)).collect())
    }

    /// Visits all documents with their texts, in order.
    pub(super) async fn each_document(
        &self,
        record: &CollectionRecord,
        mut visit: impl FnMut(Document) + Send,
    ) -> Result<(), StorageError> {
        let mut offset = 0;
        loop {
            let page = Page {
                limit: TEXT_PAGE,
                offset,
            };
            let Run { documents, read } = self.run_of_documents(record, page).await?;
            documents.into_iter().for_each(&mut visit);
            if read < TEXT_PAGE {
                return Ok(());
            }
            offset += read as u64;
        }
    }

    /// Visits the ids of all matching documents, in order.
    pub(super) async fn each_match(
        &self,
        record: &CollectionRecord,
        filter: &Filter,
        mut visit: impl FnMut(String) + Send,
    ) -> Result<(), StorageError> {
        self.each_candidate(record, narrow(filter), |id, metadata| {
            if filter.matches(&metadata) {
                visit(id);
            }
        })
        .await
    }

    pub(super) async fn each_candidate(
        &self,
        record: &CollectionRecord,
        narrowed: Narrowed,
        mut visit: impl FnMut(String, Metadata) + Send,
    ) -> Result<(), StorageError> {
        let mut request = json!({"include": ["metadatas"], "limit": METADATA_PAGE});
        match narrowed {
            Narrowed::Nothing => return Ok(()),
            Narrowed::Everything => {}
            Narrowed::Where(condition) => request["where"] = condition,
        }
        let mut offset = 0;
        loop {
            request["offset"] = offset.into();
            let records = self.api.get(record, &request).await?;
            let got = records.ids.len();
            let metadatas = records.metadatas.unwrap_or_else(|| vec![None; got]);
            for (id, stored) in records.ids.into_iter().zip(metadatas) {
                match codec::decode(stored) {
                    Ok(metadata) => visit(id, metadata),
                    Err(reason) => self.skip(&id, &reason),
                }
            }
            if got < METADATA_PAGE {
                return Ok(());
            }
            offset += got;
        }
    }

    pub(super) async fn values(
        &self,
        name: &CollectionName,
        field: &str,
    ) -> Result<Vec<Value>, StorageError> {
        let record = self.api.collection(name).await?;
        let mut values: BTreeSet<Scalar> = BTreeSet::new();
        self.each_candidate(&record, Narrowed::Everything, |_, metadata| {
            match metadata.get(field) {
                Some(Value::Array(elements)) => values.extend(elements.iter().filter_map(Scalar::from_json)),
                Some(value) => values.extend(Scalar::from_json(value)),
                None => {}
            }
        })
        .await?;
        Ok(values.iter().map(Scalar::to_json).collect())
    }

    /// The usable documents.
    fn read_documents(&self, records: ChromaRecords) -> Vec<Document> {
        let count = records.ids.len();
        let texts = records.documents.unwrap_or_else(|| vec![None; count]);
        let metadatas = records.metadatas.unwrap_or_else(|| vec![None; count]);
        records
            .ids
            .into_iter()
            .zip(texts)
            .zip(metadatas)
            .filter_map(|((id, text), metadata)| self.usable_document(id, text, metadata))
            .collect()
    }

    /// `None` for a document of another client that is not valid here. Such a document is skipped, and
    /// the others are still returned.
    pub(super) fn usable_document(
        &self,
        id: String,
        text: Option<String>,
        metadata: Option<Metadata>,
    ) -> Option<Document> {
        match read(id.clone(), text, metadata) {
            Ok(document) => Some(document),
            Err(reason) => {
                self.skip(&id, &reason);
                None
            }
        }
    }

    fn skip(&self, id: &str, reason: &str) {
        tracing::warn!(
            service = self.api.service(),
            id = shorten(id),
            reason,
            "skipping an unusable document"
        );
    }

    /// A document that must not be skipped.
    pub(super) fn read_document(
        &self,
        id: String,
        text: Option<String>,
        metadata: Option<Metadata>,
    ) -> Result<Document, StorageError> {
        read(id, text, metadata).map_err(|reason| self.api.bad_answer(reason))
    }
}

/// The error is the reason why the document is not valid here.
fn read(id: String, text: Option<String>, metadata: Option<Metadata>) -> Result<Document, String> {
    Ok(Document {
        id: DocumentId::parse(id).map_err(|e| e.to_string())?,
        text: text.unwrap_or_default(),
        metadata: codec::decode(metadata)?,
    })
}
