//! One search: filter, rank by meaning and by word, fuse, and fetch the documents.

use std::time::Instant;

use ragstone_core::analysis::analyze_query;
use ragstone_core::fusion::{HitRanks, Rank, fuse};
use ragstone_core::storage::{SearchHit, SearchHits, StageTime, StorageQuery};
use ragstone_core::vector::normalise;
use ragstone_core::{Document, DocumentId, Metadata};
use roaring::RoaringBitmap;
use rusqlite::{Connection, OptionalExtension};

use crate::error::{Error, Result};
use crate::index::Snapshot;
use crate::index::dense::{Candidates, Neighbour, distance, nearest};
use crate::index::kernel::dot;
use crate::readers::View;
use crate::siblings::Siblings;

/// How much deeper than the answer each ranking goes before the two are fused.
const FUSION_DEPTH: usize = 4;
const FUSION_AT_LEAST: usize = 100;

/// A hit before its document is fetched.
struct Ranked {
    slot: u32,
    distance: Option<f32>,
    ranks: HitRanks,
}

pub(crate) fn search(connection: &Connection, view: View, mut request: StorageQuery) -> Result<SearchHits> {
    let mut clock = StageClock::default();
    let snapshot = &view.snapshot;
    if let Some(vector) = &mut request.vector {
        normalise(vector);
        let actual = vector.len();
        if let Some(expected) = snapshot.dimensions().filter(|expected| *expected != actual) {
            return Err(Error::DimensionMismatch {
                collection: view.collection.name,
                expected,
                actual,
            });
        }
    }
    let mut candidates = clock.time("filter", || snapshot.matching(&request.filter));
    if let Some(ids) = &request.among {
        *candidates.to_mut() &= slots_of(connection, &view, ids)?;
    }
    let ranked = rank(snapshot, &candidates, &request, &mut clock);
    let mut hits = clock.time("fetch", || {
        ranked
            .iter()
            .map(|hit| {
                Ok(SearchHit {
                    document: fetch(connection, snapshot, hit.slot)?,
                    distance: hit.distance,
                    ranks: hit.ranks,
                    siblings: None,
                })
            })
            .collect::<Result<Vec<_>>>()
    })?;
    let mut siblings_cut = false;
    if let Some(request) = &request.siblings {
        siblings_cut = clock.time("expand", || {
            let mut siblings = Siblings::new(connection, snapshot, request);
            for (hit, Ranked { slot, .. }) in hits.iter_mut().zip(&ranked) {
                hit.siblings = siblings.of(*slot, &hit.document)?;
            }
            Ok::<_, Error>(siblings.cut())
        })?;
    }
    Ok(SearchHits {
        hits,
        siblings_cut,
        metadata: view.collection.metadata,
        stages: clock.stages,
    })
}

/// Where the documents of these ids stand, as far as they are there.
fn slots_of(connection: &Connection, view: &View, ids: &[DocumentId]) -> Result<RoaringBitmap> {
    let mut find =
        connection.prepare_cached("SELECT rowid FROM documents WHERE collection = ?1 AND id = ?2")?;
    let mut slots = RoaringBitmap::new();
    for id in ids {
        let rowid = find
            .query_row((view.key, id.as_str()), |row| row.get(0))
            .optional()?;
        slots.extend(rowid.and_then(|rowid| view.snapshot.slot(rowid)));
    }
    Ok(slots)
}

fn rank(
    snapshot: &Snapshot,
    candidates: &RoaringBitmap,
    request: &StorageQuery,
    clock: &mut StageClock,
) -> Vec<Ranked> {
    let limit = request.limit;
    match (&request.vector, &request.text) {
        (Some(vector), None) => clock
            .time("dense", || {
                dense(snapshot, candidates, vector, limit, request.max_distance)
            })
            .into_iter()
            .enumerate()
            .map(|(place, found)| Ranked {
                slot: found.slot,
                distance: Some(distance(found.similarity)),
                ranks: HitRanks {
                    dense: Some(Rank {
                        rank: place + 1,
                        score: dense_score(found.similarity),
                    }),
                    ..HitRanks::default()
                },
            })
            .collect(),
        (None, Some(text)) => clock
            .time("keyword", || {
                snapshot.keyword().search(&analyze_query(text), candidates, limit)
            })
            .into_iter()
            .enumerate()
            .map(|(place, (slot, score))| Ranked {
                slot,
                distance: None,
                ranks: HitRanks {
                    keyword: Some(Rank {
                        rank: place + 1,
                        score,
                    }),
                    ..HitRanks::default()
                },
            })
            .collect(),
        (Some(vector), Some(text)) => hybrid(snapshot, candidates, vector, text, request, clock),
        (None, None) => Vec::new(),
    }
}

fn dense(
    snapshot: &Snapshot,
    candidates: &RoaringBitmap,
    vector: &[f32],
    limit: usize,
    max_distance: Option<f32>,
) -> Vec<Neighbour> {
    let Some(vectors) = snapshot.vectors() else {
        return Vec::new();
    };
    let candidates = Candidates {
        slots: candidates,
        total: snapshot.slots(),
    };
    let mut found = nearest(vectors, vector, &candidates, limit);
    if let Some(farthest) = max_distance {
        found.retain(|neighbour| distance(neighbour.similarity) <= farthest);
    }
    found
}

fn hybrid(
    snapshot: &Snapshot,
    candidates: &RoaringBitmap,
    vector: &[f32],
    text: &str,
    request: &StorageQuery,
    clock: &mut StageClock,
) -> Vec<Ranked> {
    let depth = fusion_depth(request.limit);
    let distance_of = |slot: u32| {
        let similarity = snapshot
            .vectors()
            .map_or(0.0, |vectors| dot(vector, vectors.get(slot)));
        distance(similarity)
    };
    let near_enough = |slot: u32| {
        request
            .max_distance
            .is_none_or(|farthest| distance_of(slot) <= farthest)
    };
    let dense: Vec<(u32, f64)> = clock.time("dense", || {
        dense(snapshot, candidates, vector, depth, request.max_distance)
            .into_iter()
            .map(|found| (found.slot, dense_score(found.similarity)))
            .collect()
    });
    let keyword = clock.time("keyword", || {
        let mut found = snapshot.keyword().search(&analyze_query(text), candidates, depth);
        found.retain(|(slot, _)| near_enough(*slot));
        found
    });
    clock.time("fusion", || {
        fuse(&dense, &keyword, request.weights)
            .into_iter()
            .take(request.limit)
            .map(|(slot, ranks)| Ranked {
                slot,
                distance: Some(distance_of(slot)),
                ranks,
            })
            .collect()
    })
}

/// How deep each ranking goes for an answer of this length.
pub(crate) fn fusion_depth(limit: usize) -> usize {
    limit.saturating_mul(FUSION_DEPTH).max(FUSION_AT_LEAST)
}

/// The score clients see: one for the same direction, zero for the opposite one.
pub(crate) fn dense_score(similarity: f32) -> f64 {
    f64::from(1.0 - distance(similarity) / 2.0)
}

/// Reads the document of a slot.
pub(crate) fn fetch(connection: &Connection, snapshot: &Snapshot, slot: u32) -> Result<Document> {
    let rowid = snapshot
        .rowid(slot)
        .ok_or_else(|| Error::Damaged(format!("slot {slot} has no row")))?;
    let (id, metadata, text) = connection
        .prepare_cached("SELECT id, metadata, text FROM documents WHERE rowid = ?1")?
        .query_row([rowid], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get(2)?))
        })?;
    document(id, &metadata, text)
}

pub(crate) fn document(id: String, metadata: &str, text: String) -> Result<Document> {
    let metadata: Metadata = serde_json::from_str(metadata)?;
    Ok(Document {
        id: DocumentId::parse(id).map_err(|e| Error::Damaged(e.to_string()))?,
        text,
        metadata,
    })
}

#[derive(Default)]
pub(crate) struct StageClock {
    pub(crate) stages: Vec<StageTime>,
}

impl StageClock {
    pub(crate) fn time<T>(&mut self, stage: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = work();
        self.note(stage, start);
        outcome
    }

    pub(crate) async fn time_async<T>(&mut self, stage: &'static str, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let outcome = work.await;
        self.note(stage, start);
        outcome
    }

    fn note(&mut self, stage: &'static str, start: Instant) {
        self.stages.push(StageTime {
            stage,
            took: start.elapsed(),
        });
    }
}
