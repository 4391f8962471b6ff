//! Searching by vector, under any filter.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ragstone_core::document::check_vector;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::Role;
use ragstone_core::provider::{ProviderAnswer, ProviderError, ProviderHit, ProviderQuery};
use ragstone_core::siblings::{Expand, Gathering, SECTION_REACH, SIBLING_BYTES, in_document_order};
use ragstone_core::storage::Page;
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::Chroma;
use super::api::{COSINE, CollectionRecord, Ranked, Records};
use super::narrow::{Narrowed, narrow};
use super::write::check_width;

/// So many ids go into one query.
const IDS_PER_QUERY: usize = 10_000;
/// Up to so many documents that Chroma did not come across are looked at here, so many in a request.
const OVERLOOKED_AT_MOST: usize = 5_000;
const VECTORS_PER_PAGE: usize = 500;
/// How many milliseconds a search that lost a race with a writer waits before it is tried again.
const PAUSES: [u64; 5] = [0, 10, 30, 100, 300];

pub(super) struct Found {
    pub(super) document: Document,
    pub(super) distance: f32,
}

/// What one query brought.
struct Ranking {
    found: Vec<Found>,
    /// How many Chroma gave, those that cannot be used included.
    given: usize,
}

impl Chroma {
    pub(super) async fn find(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        let options = Options::read(&query.options)?;
        let record = self.api.collection(name).await?;
        let mut extra = Metadata::new();
        if options.rerank {
            extra.insert("reranked".into(), false.into());
        }
        let answer = |hits, warnings| ProviderAnswer {
            hits,
            collection_metadata: record.described.metadata.clone(),
            warnings,
            extra,
        };
        let vector = self.query_vector(&record, query.text, query.vector).await?;
        let Some(width) = record.described.dimensions else {
            return Ok(answer(Vec::new(), options.warnings));
        };
        check_width(name, width, vector.len())?;
        check_space(&record)?;
        let (filter, among) = (&query.filter, query.among.as_deref());
        let best = || self.best_of(&record, &vector, filter, among, query.top_k);
        let mut found = self.despite_races(&record, best).await?;
        if let Some(limit) = query.max_distance.filter(|limit| *limit > 0.0) {
            found.retain(|hit| hit.distance <= limit);
        }
        let mut gathering = options
            .expand
            .as_ref()
            .map(|expand| Gathering::new(expand, SIBLING_BYTES));
        let mut hits = Vec::with_capacity(found.len());
        for Found { document, distance } in found {
            let mut extra = Metadata::new();
            if let Some(gathering) = &mut gathering
                && let Some(siblings) = self.siblings(name, &document, gathering).await?
            {
                extra.insert("siblings".into(), siblings);
            }
            hits.push(ProviderHit {
                document,
                distance: Some(distance),
                score: Some(1.0 - f64::from(distance) / 2.0),
                extra,
            });
        }
        Ok(answer(hits, options.warnings))
    }

    /// Asks until no writer comes in between. Chroma finds ids first and what belongs to them later, and
    /// fails where one is deleted meanwhile; the next time it is not among them. While the first documents
    /// of a collection are on their way, and for good where their writer died, it has nothing to search in
    /// and fails, too.
    pub(super) async fn despite_races<T, Answer>(
        &self,
        record: &CollectionRecord,
        ask: impl Fn() -> Answer,
    ) -> Result<T, ProviderError>
    where
        T: Default,
        Answer: Future<Output = Result<T, ProviderError>>,
    {
        for pause in PAUSES {
            match ask().await {
                Err(error) if lost_a_race(&error) => {
                    if self.api.count(record).await? == 0 {
                        return Ok(T::default());
                    }
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                }
                outcome => return outcome,
            }
        }
        ask().await
    }

    async fn query_vector(
        &self,
        record: &CollectionRecord,
        text: Option<String>,
        vector: Option<Vec<f32>>,
    ) -> Result<Vec<f32>, ProviderError> {
        match (vector, text) {
            (Some(mut vector), _) => {
                check_vector(&vector)?;
                // Chroma loses the direction of very large and very small numbers.
                normalise(&mut vector);
                Ok(vector)
            }
            (None, Some(text)) => {
                let embedded = self
                    .embedder(record, Role::Query)?
                    .embed(vec![text.into()], Role::Query)
                    .await?;
                embedded
                    .into_iter()
                    .next()
                    .map(|embedding| embedding.vector)
                    .ok_or_else(|| self.api.bad_answer("no embedding for the query"))
            }
            (None, None) => Err(InvalidInput::new("'query' or 'query_embedding' is required").into()),
        }
    }

    /// The true best of the matching documents, or of those among a few.
    pub(super) async fn best_of(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        filter: &Filter,
        among: Option<&[DocumentId]>,
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        let Some(ids) = among else {
            return self.best(record, vector, filter, top_k).await;
        };
        let ids: Vec<String> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        let mut found = self.best_matching(record, vector, filter, &ids, top_k).await?;
        found.truncate(top_k);
        Ok(found)
    }

    /// The best of these ids that are there and match.
    async fn best_matching(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        filter: &Filter,
        ids: &[String],
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        let mut documents = self.documents_by_id(record, ids).await?;
        documents.retain(|document| filter.matches(&document.metadata));
        let there: Vec<String> = documents.iter().map(|d| d.id.as_str().to_owned()).collect();
        self.best_among(record, vector, &there, top_k).await
    }

    /// The true best of the matching documents. Chroma ranks the candidates; if too few of those it
    /// gives match, and it had more to give, then the matching ids are found first and ranked.
    async fn best(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        filter: &Filter,
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        let mut request =
            json!({"query_embeddings": [vector], "include": ["documents", "metadatas", "distances"]});
        match narrow(filter) {
            _ if top_k == 0 => return Ok(Vec::new()),
            Narrowed::Nothing => return Ok(Vec::new()),
            Narrowed::Everything => {}
            Narrowed::Where(condition) => request["where"] = condition,
        }
        let asked = if filter.is_everything() {
            top_k
        } else {
            top_k * 2 + 10
        };
        request["n_results"] = asked.into();
        let Ranking { found, given } = self.ranked(record, &request).await?;
        let exhausted = given < asked;
        let mut found: Vec<Found> = found
            .into_iter()
            .filter(|candidate| filter.matches(&candidate.document.metadata))
            .collect();
        if found.len() < top_k && !exhausted {
            let ids = self.matching_ids(record, filter).await?;
            found = self.best_among(record, vector, &ids, top_k).await?;
        } else if found.len() < top_k && !self.are_all(record, &found).await? {
            let ids = self.matching_ids(record, filter).await?;
            found = self.completed(record, vector, &ids, found, top_k).await?;
        }
        found.truncate(top_k);
        Ok(found)
    }

    /// Whether these are all documents of the collection.
    async fn are_all(&self, record: &CollectionRecord, found: &[Found]) -> Result<bool, ProviderError> {
        Ok(self.api.count(record).await? <= found.len() as u64)
    }

    /// The best of these ids, most likely all of them there.
    pub(super) async fn best_there(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[String],
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        match self.best_among(record, vector, ids, top_k).await {
            Err(error) if lost_a_race(&error) => {
                let any = Filter::default();
                self.best_matching(record, vector, &any, ids, top_k).await
            }
            outcome => outcome,
        }
    }

    /// The best of these ids, all of which must be there.
    pub(super) async fn best_among(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[String],
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        let mut found = Vec::new();
        for ids in ids.chunks(IDS_PER_QUERY) {
            let request = json!({
                "query_embeddings": [vector], "ids": ids, "n_results": top_k,
                "include": ["documents", "metadatas", "distances"],
            });
            found.extend(self.ranked(record, &request).await?.found);
        }
        found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
        self.completed(record, vector, ids, found, top_k).await
    }

    /// Parts of Chroma's graph may be out of reach after many documents were replaced or deleted. Where
    /// it gave fewer of these ids than there are and are wanted, the others are compared here.
    async fn completed(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[String],
        mut found: Vec<Found>,
        top_k: usize,
    ) -> Result<Vec<Found>, ProviderError> {
        if found.len() >= top_k.min(ids.len()) {
            return Ok(found);
        }
        let known: HashSet<&str> = found.iter().map(|hit| hit.document.id.as_str()).collect();
        let overlooked = ids.iter().map(String::as_str).filter(|id| !known.contains(id));
        let overlooked: Vec<&str> = overlooked.collect();
        if overlooked.len() > OVERLOOKED_AT_MOST {
            tracing::warn!(
                service = self.api.service(), collection = %record.described.name, found = found.len(),
                overlooked = overlooked.len(), "ChromaDB finds too few of its documents"
            );
            return Ok(found);
        }
        let mut query = vector.to_vec();
        normalise(&mut query);
        for ids in overlooked.chunks(VECTORS_PER_PAGE) {
            let request = json!({"ids": ids, "include": ["documents", "metadatas", "embeddings"]});
            found.extend(self.compared(&query, self.api.get(record, &request).await?)?);
        }
        found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
        Ok(found)
    }

    /// How far documents are from a query of length one.
    fn compared(&self, query: &[f32], records: Records) -> Result<Vec<Found>, ProviderError> {
        let count = records.ids.len();
        let vectors = records.embeddings.unwrap_or_default();
        let texts = records.documents.unwrap_or_else(|| vec![None; count]);
        let metadatas = records.metadatas.unwrap_or_else(|| vec![None; count]);
        if vectors.len() != count {
            return Err(self.api.bad_answer("documents without vectors"));
        }
        let mut found = Vec::with_capacity(count);
        let rows = records.ids.into_iter().zip(texts);
        for ((id, text), (metadata, vector)) in rows.zip(metadatas.into_iter().zip(vectors)) {
            let mut vector = vector.ok_or_else(|| self.api.bad_answer("a document without a vector"))?;
            normalise(&mut vector);
            let cosine: f32 = query.iter().zip(&vector).map(|(a, b)| a * b).sum();
            if let Some(document) = self.usable_document(id, text, metadata) {
                found.push(Found {
                    document,
                    distance: (1.0 - cosine).clamp(0.0, 2.0),
                });
            }
        }
        Ok(found)
    }

    async fn ranked(&self, record: &CollectionRecord, request: &Value) -> Result<Ranking, ProviderError> {
        let Ranked {
            ids,
            metadatas,
            documents,
            distances,
        } = self.api.query(record, request).await?;
        let ids = ids.into_iter().next().unwrap_or_default();
        let count = ids.len();
        let first = |column: Option<Vec<Vec<Option<f32>>>>| column.and_then(|c| c.into_iter().next());
        let distances = first(distances).unwrap_or_default();
        let texts = documents.and_then(|c| c.into_iter().next()).unwrap_or_default();
        let metadatas = metadatas.and_then(|c| c.into_iter().next()).unwrap_or_default();
        if [distances.len(), texts.len(), metadatas.len()] != [count; 3] {
            return Err(self.api.bad_answer("its columns have different lengths"));
        }
        let is_bare = |n: &usize| texts[*n].is_none() && metadatas[*n].is_none();
        let bare: Vec<String> = (0..count).filter(is_bare).map(|n| ids[n].clone()).collect();
        let mut found = Vec::with_capacity(count);
        for (((id, text), metadata), distance) in ids.into_iter().zip(texts).zip(metadatas).zip(distances) {
            // Rounding may take a distance just below zero.
            let distance = distance
                .filter(|d| d.is_finite())
                .ok_or_else(|| self.api.bad_answer("a hit without a distance"))?
                .clamp(0.0, 2.0);
            if let Some(document) = self.usable_document(id, text, metadata) {
                found.push(Found { document, distance });
            }
        }
        if !bare.is_empty() {
            self.look_again(record, &bare, &mut found).await?;
        }
        Ok(Ranking { found, given: count })
    }

    /// Hits without text and metadata are documents that other clients left so, or, much more often, such
    /// as are deleted at this moment.
    async fn look_again(
        &self,
        record: &CollectionRecord,
        bare: &[String],
        found: &mut Vec<Found>,
    ) -> Result<(), ProviderError> {
        let there = self.documents_by_id(record, bare).await?;
        let mut there: HashMap<String, Document> = there
            .into_iter()
            .map(|document| (document.id.as_str().to_owned(), document))
            .collect();
        let bare: HashSet<&str> = bare.iter().map(String::as_str).collect();
        found.retain_mut(|hit| {
            let id = hit.document.id.as_str();
            if !bare.contains(id) {
                return true;
            }
            there.remove(id).is_some_and(|document| {
                hit.document = document;
                true
            })
        });
        Ok(())
    }

    /// The documents that share a scalar of a field with a hit, itself included, in order; `None` where
    /// the hit has none.
    async fn siblings(
        &self,
        name: &CollectionName,
        hit: &Document,
        gathering: &mut Gathering<'_>,
    ) -> Result<Option<Value>, ProviderError> {
        let expand = gathering.expand;
        let Some(shared) = expand.section(hit) else {
            return Ok(None);
        };
        let page = Page {
            limit: 2 * SECTION_REACH,
            offset: 0,
        };
        let section = self.page(name, &expand.filter(shared), page).await?.documents;
        let siblings = gathering.within(&in_document_order(section), hit);
        Ok(Some(
            siblings
                .iter()
                .map(|d| json!({"id": d.id.as_str(), "text": d.text, "metadata": d.metadata}))
                .collect(),
        ))
    }
}

fn lost_a_race(error: &ProviderError) -> bool {
    matches!(error, ProviderError::Call(error) if error.status() == Some(500))
}

pub(super) fn check_space(record: &CollectionRecord) -> Result<(), ProviderError> {
    if record.space == COSINE {
        return Ok(());
    }
    Err(ProviderError::Unsupported(format!(
        "Collection '{}' ranks by '{}' and not by cosine distance; it must be created with the cosine space to be searched here",
        record.described.name, record.space
    )))
}

/// The fields of a search that go beyond vectors and filters.
#[derive(Debug, Default, PartialEq)]
struct Options {
    expand: Option<Expand>,
    /// It was asked for, in vain.
    rerank: bool,
    warnings: Vec<String>,
}

impl Options {
    fn read(options: &Metadata) -> Result<Self, ProviderError> {
        let mut read = Self::default();
        for (name, value) in options {
            match (name.as_str(), value) {
                (_, Value::Null | Value::Bool(false)) => {}
                ("mode", Value::String(mode)) if mode == "dense" => {}
                ("mode", _) => {
                    return Err(ProviderError::Unsupported(
                        "ChromaDB services are searched with 'mode' dense only".to_owned(),
                    ));
                }
                ("rerank", _) => {
                    read.rerank = true;
                    read.warnings
                        .push("reranking was skipped: ChromaDB has no cross-encoder".to_owned());
                }
                ("explain", _) => read
                    .warnings
                    .push("'explain' was skipped: ChromaDB does not tell how it ranks".to_owned()),
                ("expand", expand) => read.expand = Some(Expand::from_json(expand)?),
                // Unknown fields of a request are ignored everywhere.
                _ => {}
            }
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(value: Value) -> Result<Options, ProviderError> {
        match value {
            Value::Object(options) => Options::read(&options),
            _ => unreachable!("tests give objects"),
        }
    }

    #[test]
    fn what_chroma_cannot_do_is_refused_or_said() {
        assert!(matches!(
            options(json!({"mode": "hybrid"})),
            Err(ProviderError::Unsupported(_))
        ));
        assert!(options(json!({"expand": 3})).is_err());
        let read =
            options(json!({"mode": "dense", "rerank": true, "explain": false, "expand": {"field": "s", "max_chars": 9}})).unwrap();
        let expand = read.expand.unwrap();
        assert_eq!((expand.field.as_str(), expand.max_chars), ("s", Some(9)));
        assert!(read.rerank);
        assert_eq!(read.warnings.len(), 1);
    }
}
