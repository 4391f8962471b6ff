//! One search: rank by meaning and by word within the filter, fuse, and fetch the documents.

use std::collections::HashMap;

use deadpool_postgres::Pool;
use ragstone_core::CollectionName;
use ragstone_core::analysis::analyze_query;
use ragstone_core::fusion::{HitRanks, Rank, fuse};
use ragstone_core::storage::{SearchHit, SearchHits, StorageQuery};
use ragstone_core::vector::normalise;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::Thresholds;
use super::encode::{COUNT_WEIGHTS, LARGEST_UNIT, tsquery};
use super::last_seen::{LastSeen, Seen};
use super::nearest::{Columns, Nearest, Way, depth};
use super::pool::Session;
use super::read::{View, read_document, view};
use super::siblings::Siblings;
use super::statement::Statement;
use crate::error::{Error, Result};
use crate::index::dense::distance;
use crate::search::{StageClock, dense_score};

/// A sample of fewer rows tells too little to be used again.
const WORTH_REMEMBERING: i64 = 200;

/// A document's place, and how similar it is or how well its words fit.
type Scored = (i64, f64);

struct Ranked {
    place: i64,
    ranks: HitRanks,
}

/// Begins to read a collection, and sends along what the search will begin with if the collection is
/// still what it was: most searches are one journey to the database and back.
async fn begin(
    pool: &Pool,
    guess: Option<&Seen>,
    thresholds: Thresholds,
    name: &CollectionName,
    request: &StorageQuery,
) -> Result<(Session, View)> {
    let ahead = guess.and_then(|seen| {
        let mut vector = request.vector.clone()?;
        if request.limit == 0 || seen.dimensions != Some(vector.len()) {
            return None;
        }
        normalise(&mut vector);
        let way = Way::new(thresholds, seen, request);
        Some(by_meaning(&seen.table, request, &vector).first(way, seen.count))
    });
    let begun = match view(pool, name, ahead.as_ref()).await {
        Ok((session, _)) if session.failed_ahead() => None,
        Err(Error::Postgres(error)) if ahead.is_some() && error.as_db_error().is_some() => None,
        begun => Some(begun),
    };
    match begun {
        Some(begun) => begun,
        // Its table is another one by now, most likely.
        None => view(pool, name, None).await,
    }
}

/// The search by meaning that is all of a request, or the deeper one that is half of it.
fn by_meaning<'a>(table: &'a str, request: &'a StorageQuery, vector: &'a [f32]) -> Nearest<'a> {
    let columns = match request.text {
        None => Columns::Document,
        Some(_) => Columns::Place,
    };
    Nearest {
        table,
        request,
        vector,
        limit: depth(request),
        columns,
    }
}

pub(super) async fn search(
    pool: &Pool,
    last_seen: &LastSeen,
    thresholds: Thresholds,
    name: &CollectionName,
    request: &StorageQuery,
) -> Result<SearchHits> {
    let guess = last_seen.get(name, &request.filter);
    let (session, view) = begin(pool, guess.as_ref(), thresholds, name, request).await?;
    last_seen.note(&view);
    let vector = unit_vector(name, &view, request)?;
    let mut clock = StageClock::default();
    let mut hits = Vec::new();
    let mut siblings_cut = false;
    if let Some(table) = &view.table
        && request.limit > 0
    {
        let search = Search {
            session: &session,
            view: &view,
            table,
            request,
            thresholds,
            vector: vector.as_deref(),
            share: guess
                .filter(|seen| seen.table == *table)
                .and_then(|seen| seen.share),
            last_seen,
        };
        let ranked;
        (ranked, hits) = search.hits(&mut clock).await?;
        if let Some(request) = &request.siblings {
            let siblings = Siblings::new(&session, table, request);
            let expanded = expand(siblings, &ranked, &mut hits);
            siblings_cut = clock.time_async("expand", expanded).await?;
        }
    }
    Ok(SearchHits {
        hits,
        siblings_cut,
        metadata: view.collection.metadata,
        stages: clock.stages,
    })
}

/// Returns whether siblings were left out.
async fn expand(mut siblings: Siblings<'_>, ranked: &[Ranked], hits: &mut [SearchHit]) -> Result<bool> {
    for (hit, Ranked { place, .. }) in hits.iter_mut().zip(ranked) {
        hit.siblings = siblings.of(*place, &hit.document).await?;
    }
    Ok(siblings.cut())
}

fn unit_vector(name: &CollectionName, view: &View, request: &StorageQuery) -> Result<Option<Vec<f32>>> {
    let Some(mut vector) = request.vector.clone() else {
        return Ok(None);
    };
    let actual = vector.len();
    if let Some(expected) = view.collection.dimensions.filter(|width| *width != actual) {
        return Err(Error::DimensionMismatch {
            collection: name.clone(),
            expected,
            actual,
        });
    }
    normalise(&mut vector);
    Ok(Some(vector))
}

struct Search<'a> {
    session: &'a Session,
    view: &'a View,
    table: &'a str,
    request: &'a StorageQuery,
    thresholds: Thresholds,
    /// Of length one.
    vector: Option<&'a [f32]>,
    /// How many of all documents match, where a search of late found that out.
    share: Option<f64>,
    last_seen: &'a LastSeen,
}

impl Search<'_> {
    /// The hits, and where each stands in the table.
    async fn hits(&self, clock: &mut StageClock) -> Result<(Vec<Ranked>, Vec<SearchHit>)> {
        if let (Some(nearest), None) = (self.by_meaning(), &self.request.text) {
            return clock.time_async("dense", self.dense_hits(&nearest)).await;
        }
        let ranked = self.rank(clock).await?;
        let hits = clock.time_async("fetch", self.fetch(&ranked)).await?;
        Ok((ranked, hits))
    }

    fn by_meaning(&self) -> Option<Nearest<'_>> {
        Some(by_meaning(self.table, self.request, self.vector?))
    }

    async fn dense_hits(&self, nearest: &Nearest<'_>) -> Result<(Vec<Ranked>, Vec<SearchHit>)> {
        let rows = self.nearest(nearest).await?;
        let (mut ranked, mut hits) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for row in rows {
            let similarity = similarity(row.try_get(1)?);
            let distance = distance(similarity);
            if self
                .request
                .max_distance
                .is_some_and(|farthest| distance > farthest)
            {
                continue;
            }
            let ranks = HitRanks {
                dense: Some(Rank {
                    rank: hits.len() + 1,
                    score: dense_score(similarity),
                }),
                ..HitRanks::default()
            };
            ranked.push(Ranked {
                place: row.try_get(0)?,
                ranks,
            });
            hits.push(SearchHit {
                document: read_document(&row, 2)?,
                distance: Some(distance),
                ranks,
                siblings: None,
            });
        }
        Ok((ranked, hits))
    }

    async fn rank(&self, clock: &mut StageClock) -> Result<Vec<Ranked>> {
        let limit = self.request.limit;
        match (self.by_meaning(), &self.request.text) {
            (None, Some(text)) => {
                let found = clock.time_async("keyword", self.keyword(text, limit)).await?;
                Ok(only(found, |stage| HitRanks {
                    keyword: Some(stage),
                    ..HitRanks::default()
                }))
            }
            (Some(nearest), Some(text)) => {
                let depth = nearest.limit;
                let dense = clock.time_async("dense", self.dense(&nearest)).await?;
                let keyword = clock.time_async("keyword", self.keyword(text, depth)).await?;
                let fused = clock.time("fusion", || fuse(&dense, &keyword, self.request.weights));
                let ranked = fused.into_iter().take(limit);
                Ok(ranked.map(|(place, ranks)| Ranked { place, ranks }).collect())
            }
            (_, None) => Ok(Vec::new()),
        }
    }

    async fn dense(&self, nearest: &Nearest<'_>) -> Result<Vec<Scored>> {
        let mut found: Vec<(i64, f32)> = Vec::with_capacity(nearest.limit);
        for row in self.nearest(nearest).await? {
            found.push((row.try_get(0)?, similarity(row.try_get(1)?)));
        }
        if let Some(farthest) = self.request.max_distance {
            found.retain(|(_, similarity)| distance(*similarity) <= farthest);
        }
        Ok(found
            .into_iter()
            .map(|(place, similarity)| (place, dense_score(similarity)))
            .collect())
    }

    /// The nearest documents, nearest first.
    async fn nearest(&self, nearest: &Nearest<'_>) -> Result<Vec<Row>> {
        let collection = &self.view.collection;
        let seen = Seen {
            table: self.table.to_owned(),
            dimensions: collection.dimensions,
            count: collection.count,
            share: self.share,
        };
        let mut way = Way::new(self.thresholds, &seen, self.request);
        if let Way::Sample = way {
            let sample = nearest.first(way, seen.count);
            let row = self.session.query_one(&sample).await?;
            let (drawn, matching): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
            let share = matching as f64 / drawn.max(1) as f64;
            if drawn >= WORTH_REMEMBERING {
                self.last_seen
                    .note_share(&collection.name, &self.request.filter, share);
            }
            let seen = Seen {
                share: Some(share),
                ..seen
            };
            way = Way::new(self.thresholds, &seen, self.request);
        }
        if let Way::Index(index, breadth) = way {
            let found = self.session.query(&nearest.by_index(index, breadth)).await?;
            let possible = usize::try_from(collection.count).unwrap_or(usize::MAX);
            // With fewer, it gave up on the way, or so few match: only a look at all of them can tell.
            if found.len() >= nearest.limit.min(possible) {
                return Ok(found);
            }
        }
        self.session.query(&nearest.of_all()).await
    }

    /// BM25 with the constants of the embedded store. How often a word is in a document is what
    /// `ts_rank_cd` gives for that word alone: the sum of the weights of its positions, which stand for
    /// the units that `encode` writes a count in.
    async fn keyword(&self, text: &str, limit: usize) -> Result<Vec<Scored>> {
        let terms = analyze_query(text);
        if terms.is_empty() {
            return Ok(Vec::new());
        }
        let words: Vec<String> = terms.iter().map(|term| tsquery(&term.text)).collect();
        let weights: Vec<f32> = terms.iter().map(|term| term.weight).collect();
        let documents = self.view.collection.count.max(1) as f64;
        let average = (self.view.words as f64 / documents).max(1.0);
        let table = self.table;
        let mut best = Statement::new("WITH wanted AS (SELECT word::tsquery AS word, weight FROM unnest(");
        best.bind(words, Type::TEXT_ARRAY)
            .push(", ")
            .bind(weights, Type::FLOAT4_ARRAY)
            .push(&format!(
                ") AS given (word, weight)), posting AS MATERIALIZED (
                     SELECT place, words, word, weight,
                            ts_rank_cd('{COUNT_WEIGHTS}', terms, word)::float8 * {LARGEST_UNIT} AS count, ("
            ))
            .matching(self.request)
            .push(&format!(
                ") AS matches FROM wanted JOIN {table} ON terms @@ word), known AS (
                     SELECT word, ln(1 + ("
            ))
            .bind(documents, Type::FLOAT8)
            .push(
                " - count(*) + 0.5) / (count(*) + 0.5)) AS idf FROM posting GROUP BY word), score AS (
                     SELECT place, sum(weight * idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * words / ",
            )
            .bind(average, Type::FLOAT8)
            .push(
                "))) AS score
                     FROM posting JOIN known USING (word) WHERE matches GROUP BY place
                     ORDER BY score DESC, place",
            )
            .limit(limit)
            .push(") SELECT score.place, score.score");
        if let Some(vector) = self.vector {
            best.push(", embedding <#> ")
                .bind(vector.to_vec(), Type::FLOAT4_ARRAY)
                .push(&format!("::vector FROM score JOIN {table} USING (place)"));
        } else {
            best.push(" FROM score");
        }
        best.push(" ORDER BY score.score DESC, score.place");
        let mut found = Vec::new();
        for row in self.session.query(&best).await? {
            let near_enough = match (self.vector, self.request.max_distance) {
                (Some(_), Some(farthest)) => distance(similarity(row.try_get(2)?)) <= farthest,
                _ => true,
            };
            if near_enough {
                found.push((row.try_get(0)?, row.try_get(1)?));
            }
        }
        Ok(found)
    }

    async fn fetch(&self, ranked: &[Ranked]) -> Result<Vec<SearchHit>> {
        if ranked.is_empty() {
            return Ok(Vec::new());
        }
        let places: Vec<i64> = ranked.iter().map(|hit| hit.place).collect();
        let mut fetch = Statement::new("SELECT place, id, metadata, body");
        if let Some(vector) = self.vector {
            fetch
                .push(", embedding <#> ")
                .bind(vector.to_vec(), Type::FLOAT4_ARRAY)
                .push("::vector");
        }
        fetch
            .push(&format!(" FROM {} WHERE place = ANY (", self.table))
            .bind(places, Type::INT8_ARRAY)
            .push(")");
        let mut found = HashMap::with_capacity(ranked.len());
        for row in self.session.query(&fetch).await? {
            let distance = match self.vector {
                Some(_) => Some(distance(similarity(row.try_get(4)?))),
                None => None,
            };
            found.insert(row.try_get::<_, i64>(0)?, (read_document(&row, 1)?, distance));
        }
        ranked
            .iter()
            .map(|hit| {
                let (document, distance) = found
                    .remove(&hit.place)
                    .ok_or_else(|| Error::Damaged(format!("place {} has no row", hit.place)))?;
                Ok(SearchHit {
                    document,
                    distance,
                    ranks: hit.ranks,
                    siblings: None,
                })
            })
            .collect()
    }
}

fn only(found: Vec<Scored>, ranks: impl Fn(Rank) -> HitRanks) -> Vec<Ranked> {
    found
        .into_iter()
        .enumerate()
        .map(|(number, (place, score))| Ranked {
            place,
            ranks: ranks(Rank {
                rank: number + 1,
                score,
            }),
        })
        .collect()
}

/// pgvector orders by the negative inner product.
fn similarity(far: f64) -> f32 {
    -far as f32
}
