//! One search: filter, rank by vector and by words, fuse, and fetch the documents.

use ragstone_core::analysis::analyze_query;
use ragstone_core::fusion::{HitRanks, Rank, fuse};
use ragstone_core::search::SearchHit;
use ragstone_core::storage::{SearchHits, StorageQuery};
use ragstone_core::vector::normalise;
use ragstone_core::{Document, DocumentId};
use roaring::RoaringBitmap;
use rusqlite::{Connection, OptionalExtension};

use crate::error::{Error, Result};
use crate::ranking::{StageClock, dense_score, distance, document, fusion_depth};
use crate::sqlite::export::vector_models;
use crate::sqlite::index::Snapshot;
use crate::sqlite::index::budget::WorkBudget;
use crate::sqlite::index::dense::{Candidates, Neighbour, nearest};
use crate::sqlite::index::kernel::dot;
use crate::sqlite::readers::CollectionView;
use crate::sqlite::siblings::SiblingGatherer;

/// A hit before its document is fetched.
struct RankedSlot {
    slot: u32,
    distance: Option<f32>,
    ranks: HitRanks,
}

pub(crate) fn search(
    connection: &Connection,
    view: &CollectionView,
    mut request: StorageQuery,
    budget: &WorkBudget,
) -> Result<SearchHits> {
    let mut clock = StageClock::default();
    let snapshot = &view.snapshot;
    if let Some(vector) = &mut request.vector {
        normalise(vector);
        let actual = vector.len();
        if let Some(expected) = snapshot.dimensions().filter(|expected| *expected != actual) {
            return Err(Error::DimensionMismatch {
                collection: view.collection.name.clone(),
                expected,
                actual,
            });
        }
    }
    let mut candidates = clock.time("filter", || snapshot.matching(&request.filter, budget))?;
    if let Some(ids) = &request.ids {
        *candidates.to_mut() &= slots_of(connection, view, ids)?;
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
                    rerank: None,
                    siblings: None,
                })
            })
            .collect::<Result<Vec<_>>>()
    })?;
    let mut siblings_cut = false;
    if let Some(request) = &request.siblings {
        siblings_cut = clock.time("expand", || {
            let mut siblings = SiblingGatherer::new(connection, snapshot, request, budget);
            for (hit, RankedSlot { slot, .. }) in hits.iter_mut().zip(&ranked) {
                hit.siblings = siblings.of(*slot, &hit.document)?;
            }
            Ok::<_, Error>(siblings.cut())
        })?;
    }
    let models = match request.vector {
        Some(_) => vector_models(connection, snapshot)?,
        None => Vec::new(),
    };
    Ok(SearchHits {
        hits,
        metadata: view.collection.metadata.clone(),
        models,
        siblings_truncated: siblings_cut,
        timings: clock.stages,
    })
}

/// The slots of the documents with these ids that exist.
fn slots_of(connection: &Connection, view: &CollectionView, ids: &[DocumentId]) -> Result<RoaringBitmap> {
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
) -> Vec<RankedSlot> {
    let limit = request.limit;
    match (&request.vector, &request.text) {
        (Some(vector), None) => clock
            .time("dense", || {
                dense(snapshot, candidates, vector, limit, request.max_distance)
            })
            .into_iter()
            .enumerate()
            .map(|(place, found)| RankedSlot {
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
            .map(|(place, (slot, score))| RankedSlot {
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
) -> Vec<RankedSlot> {
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
            .map(|(slot, ranks)| RankedSlot {
                slot,
                distance: Some(distance_of(slot)),
                ranks,
            })
            .collect()
    })
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
