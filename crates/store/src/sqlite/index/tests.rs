//! Snapshots that grew by many changes against what a fresh look at the documents says.

use std::sync::Arc;

use ragstone_core::analysis::{QueryTerm, analyze_document, analyze_query};
use ragstone_core::vector::normalise;
use ragstone_core::{Filter, Metadata};
use roaring::RoaringBitmap;
use serde_json::json;

use super::budget::WorkBudget;
use super::dense::{Candidates, Neighbour, nearest};
use super::kernel::dot;
use super::{Indexed, Snapshot};
use crate::error::Error;
use crate::sqlite::terms::encode;

struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn float(&mut self) -> f32 {
        (self.next() % 20_001) as f32 / 10_000.0 - 1.0
    }

    fn unit(&mut self, dimensions: usize) -> Vec<f32> {
        let mut vector: Vec<f32> = (0..dimensions).map(|_| self.float()).collect();
        normalise(&mut vector);
        vector
    }
}

#[derive(Clone)]
struct Entry {
    rowid: i64,
    text: String,
    number: usize,
    vector: Vec<f32>,
}

impl Entry {
    fn indexed(&self) -> Indexed {
        let mut metadata = Metadata::new();
        metadata.insert("tenth".into(), json!(self.number % 10));
        metadata.insert("own".into(), json!(format!("value {}", self.number)));
        Indexed {
            metadata,
            terms: encode(&analyze_document(&self.text)),
        }
    }
}

fn entry(noise: &mut Noise, rowid: i64) -> Entry {
    let words = ["wing", "lift", "drag", "flow", "shock", "plate", "tunnel", "mach"];
    let text: Vec<&str> = (0..1 + noise.below(6))
        .map(|_| words[noise.below(words.len())])
        .collect();
    Entry {
        rowid,
        text: text.join(" "),
        number: noise.below(500),
        vector: noise.unit(8),
    }
}

fn matching<'a>(snapshot: &'a Snapshot, filter: &Filter) -> std::borrow::Cow<'a, RoaringBitmap> {
    snapshot.matching(filter, &WorkBudget::uncancelled()).unwrap()
}

fn check(snapshot: &Snapshot, entries: &[Entry], noise: &mut Noise) {
    let fresh = check_search(snapshot, entries, noise);
    assert_eq!(*snapshot.fields(), renumbered_fields(&fresh, snapshot));
}

fn check_values(snapshot: &Snapshot, entries: &[Entry]) {
    let mut own: Vec<_> = entries.iter().map(|e| format!("value {}", e.number)).collect();
    own.sort_unstable();
    own.dedup();
    assert_eq!(snapshot.values("own"), own);
}

/// Returns a snapshot that has never seen anything but these entries.
fn check_search(snapshot: &Snapshot, entries: &[Entry], noise: &mut Noise) -> Snapshot {
    assert_eq!(snapshot.count(), entries.len() as u64);
    let tenth = noise.below(10);
    let filter = Filter::parse(&json!({"tenth": tenth})).unwrap();
    let slots = matching(snapshot, &filter);
    let rowids: Vec<i64> = slots.iter().map(|slot| snapshot.rowid(slot).unwrap()).collect();
    let expected: Vec<&Entry> = entries.iter().filter(|e| e.number % 10 == tenth).collect();
    assert!(rowids.iter().eq(expected.iter().map(|e| &e.rowid)));
    for (slot, entry) in slots.iter().zip(&expected) {
        assert_eq!(snapshot.vectors().unwrap().get(slot), entry.vector);
        assert_eq!(snapshot.slot(entry.rowid), Some(slot));
    }
    let mut fresh = Snapshot::default();
    for entry in entries {
        fresh.insert(entry.rowid, &entry.vector, entry.indexed());
    }
    fresh.seal().unwrap();
    let query = analyze_query("wing shock tunnel absent");
    let ranked = |snapshot: &Snapshot, candidates: &RoaringBitmap| -> Vec<(i64, i64)> {
        let found = snapshot.keyword().search(&query, candidates, 50);
        found
            .iter()
            .map(|(slot, score)| (snapshot.rowid(*slot).unwrap(), (score * 1e4) as i64))
            .collect()
    };
    for filter in [Filter::everything(), filter] {
        assert_eq!(
            ranked(snapshot, &matching(snapshot, &filter)),
            ranked(&fresh, &matching(&fresh, &filter))
        );
    }
    fresh
}

/// The fields of `fresh`, in the slots that the same rows have in `snapshot`.
fn renumbered_fields(fresh: &Snapshot, snapshot: &Snapshot) -> super::fields::Fields {
    fresh
        .fields()
        .renumber(&|slot| snapshot.slot(fresh.rowid(slot).unwrap()))
}

#[test]
fn a_snapshot_after_many_changes_is_like_a_fresh_one() {
    let mut noise = Noise(11);
    let mut snapshot = Snapshot::default();
    let mut entries: Vec<Entry> = Vec::new();
    let mut next_rowid = 0;
    let mut renumbered = 0;
    for round in 0..60 {
        let published = (round % 10 == 0).then(|| (snapshot.clone(), entries.clone()));
        // Grows at first, then shrinks, so that empty slots come to outnumber the others.
        let (added, removed) = if round < 25 { (160, 20) } else { (10, 110) };
        for _ in 0..noise.below(added) {
            next_rowid += 1 + noise.below(3) as i64;
            let new = entry(&mut noise, next_rowid);
            snapshot.insert(new.rowid, &new.vector, new.indexed());
            entries.push(new);
        }
        for _ in 0..noise.below(removed).min(entries.len()) {
            let gone = entries.remove(noise.below(entries.len()));
            let slot = snapshot.slot(gone.rowid).unwrap();
            snapshot.remove(slot, &gone.indexed()).unwrap();
        }
        for _ in 0..noise.below(20).min(entries.len()) {
            let at = noise.below(entries.len());
            let new = entry(&mut noise, entries[at].rowid);
            let slot = snapshot.slot(new.rowid).unwrap();
            snapshot
                .replace(slot, &new.vector, &entries[at].indexed(), new.indexed())
                .unwrap();
            entries[at] = new;
        }
        let mut unpurged = Vec::new();
        if round % 3 == 0 {
            let (gone, left): (Vec<_>, Vec<_>) = entries.into_iter().partition(|_| noise.below(4) == 0);
            let slots = gone.iter().map(|gone| snapshot.slot(gone.rowid).unwrap());
            let slots: RoaringBitmap = slots.collect();
            snapshot.remove_many(&slots);
            (unpurged, entries) = (gone, left);
        }
        snapshot.seal().unwrap();
        check_values(&snapshot, &entries);
        check_search(&snapshot, &entries, &mut noise);
        let renumbers = snapshot.wants_renumbering();
        if renumbers {
            snapshot = snapshot.renumbered();
            renumbered += 1;
            assert_eq!(snapshot.slots(), entries.len());
        }
        for gone in unpurged {
            snapshot.forget(gone.rowid, &gone.indexed().metadata);
        }
        check(&snapshot, &entries, &mut noise);
        if let Some((mut published, entries)) = published {
            published.seal().unwrap();
            check(&published, &entries, &mut noise);
        }
    }
    assert!(renumbered > 0, "the test must reach the renumbering of slots");
}

fn brute_force(snapshot: &Snapshot, query: &[f32], slots: &RoaringBitmap, limit: usize) -> Vec<Neighbour> {
    let vectors = snapshot.vectors().unwrap();
    let mut all: Vec<Neighbour> = slots
        .iter()
        .map(|slot| Neighbour {
            slot,
            similarity: dot(query, vectors.get(slot)),
        })
        .collect();
    all.sort_by(|a, b| b.similarity.total_cmp(&a.similarity).then(a.slot.cmp(&b.slot)));
    all.truncate(limit);
    all
}

/// Vectors that a plain sign code could not tell apart: all positive, with a few large numbers.
fn lopsided(noise: &mut Noise, centre: &[f32]) -> Vec<f32> {
    let mut vector: Vec<f32> = centre.iter().map(|c| c + 3.0 + noise.float().powi(5)).collect();
    normalise(&mut vector);
    vector
}

#[test]
fn the_scan_of_codes_finds_what_brute_force_finds() {
    // More than are compared in any case.
    const DIMENSIONS: usize = 72;
    let mut noise = Noise(3);
    let centres: Vec<Vec<f32>> = (0..50)
        .map(|_| (0..DIMENSIONS).map(|_| noise.float()).collect())
        .collect();
    let mut snapshot = Snapshot::default();
    let mut rows = Vec::new();
    for rowid in 0..24_000 {
        let row = Entry {
            rowid,
            text: String::new(),
            number: noise.below(500),
            vector: lopsided(&mut noise, &centres[rowid as usize % 50]),
        };
        snapshot.insert(rowid, &row.vector, row.indexed());
        rows.push(row);
    }
    for rowid in (0..24_000).step_by(17) {
        let slot = snapshot.slot(rowid).unwrap();
        snapshot.remove(slot, &rows[rowid as usize].indexed()).unwrap();
    }
    for rowid in (1..24_000).step_by(17) {
        let mut new = rows[rowid as usize].clone();
        new.vector = lopsided(&mut noise, &centres[rowid as usize % 7]);
        let slot = snapshot.slot(rowid).unwrap();
        let old = rows[rowid as usize].indexed();
        snapshot.replace(slot, &new.vector, &old, new.indexed()).unwrap();
    }
    snapshot.seal().unwrap();
    let filters = [
        json!({}),
        json!({"tenth": {"$lt": 6}}),
        json!({"tenth": 3}),
        json!({"own": "value 7"}),
    ];
    for filter in filters {
        let slots = matching(&snapshot, &Filter::parse(&filter).unwrap());
        let candidates = Candidates {
            slots: &slots,
            total: snapshot.slots(),
        };
        // As many slots as make two threads share the search, most of them empty.
        let of_many = Candidates {
            slots: &slots,
            total: super::dense::PARALLEL_VECTORS,
        };
        let (mut right, mut wanted) = (0, 0);
        for centre in centres.iter().take(40) {
            let query = lopsided(&mut noise, centre);
            let expected = brute_force(&snapshot, &query, &slots, 10);
            let found = nearest(snapshot.vectors().unwrap(), &query, &candidates, 10);
            let shared = nearest(snapshot.vectors().unwrap(), &query, &of_many, 10);
            wanted += expected.len();
            right += shared.iter().filter(|n| expected.contains(n)).count();
            assert_eq!(found.len(), expected.len());
            assert!(found.iter().all(|n| slots.contains(n.slot)));
            wanted += expected.len();
            right += found.iter().filter(|n| expected.contains(n)).count();
            if slots.len() <= super::dense::EXACT_CANDIDATES {
                assert_eq!(found, expected);
            }
        }
        assert!(
            right as f64 >= wanted as f64 * 0.995,
            "{filter}: {right} of {wanted}"
        );
    }
}

/// All about equally far from any query, so that estimates alone tell few of them apart.
#[test]
fn the_nearest_of_vectors_without_pattern_are_found() {
    for dimensions in [2, 8, 64, 96, 384] {
        let mut noise = Noise(5);
        let mut snapshot = Snapshot::default();
        for rowid in 0..12_500 {
            let row = Entry {
                rowid,
                text: String::new(),
                number: 0,
                vector: noise.unit(dimensions),
            };
            snapshot.insert(rowid, &row.vector, row.indexed());
        }
        snapshot.seal().unwrap();
        let slots = matching(&snapshot, &Filter::default());
        let candidates = Candidates {
            slots: &slots,
            total: snapshot.slots(),
        };
        for limit in [1, 10, 100] {
            let (mut right, mut wanted) = (0, 0);
            for _ in 0..20 {
                let query = noise.unit(dimensions);
                let expected = brute_force(&snapshot, &query, &slots, limit);
                let found = nearest(snapshot.vectors().unwrap(), &query, &candidates, limit);
                wanted += limit;
                right += found.iter().filter(|n| expected.contains(n)).count();
            }
            assert!(
                right as f64 >= wanted as f64 * 0.995,
                "{limit} of {dimensions} dimensions: {right} of {wanted}"
            );
        }
    }
}

#[test]
fn a_query_of_unknown_words_finds_nothing() {
    let mut snapshot = Snapshot::default();
    let row = Entry {
        rowid: 1,
        text: "wing".into(),
        number: 1,
        vector: vec![1.0],
    };
    snapshot.insert(1, &row.vector, row.indexed());
    snapshot.seal().unwrap();
    let everything = matching(&snapshot, &Filter::everything()).into_owned();
    let term = |text: &str| QueryTerm {
        text: text.into(),
        weight: 1.0,
    };
    assert_eq!(snapshot.keyword().search(&[term("flap")], &everything, 10), []);
    assert_eq!(snapshot.keyword().search(&[], &everything, 10), []);
    assert_eq!(snapshot.keyword().search(&[term("wing")], &everything, 0), []);
    assert_eq!(
        snapshot
            .keyword()
            .search(&[term("wing")], &RoaringBitmap::new(), 10),
        []
    );
    assert_eq!(
        snapshot.keyword().search(&[term("wing")], &everything, 10).len(),
        1
    );
}

#[test]
fn a_filter_ends_when_it_is_too_expensive_or_nobody_waits_for_it() {
    let mut snapshot = Snapshot::default();
    for rowid in 0..20_000 {
        let row = Entry {
            rowid,
            text: String::new(),
            number: rowid as usize,
            vector: vec![1.0],
        };
        snapshot.insert(rowid, &row.vector, row.indexed());
    }
    snapshot.seal().unwrap();
    // More conditions than a request may have, so that few documents are enough.
    let any = |conditions: usize| {
        let condition = |n| Filter::parse(&json!({"own": {"$contains": format!("e 9{n}")}})).unwrap();
        Filter::Any((0..conditions).map(condition).collect())
    };
    assert!(matching(&snapshot, &any(20)).len() > 1000);
    let outcome = snapshot.matching(&any(5000), &WorkBudget::uncancelled());
    assert!(matches!(outcome, Err(Error::ExpensiveFilter)));
    let gone = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let outcome = snapshot.matching(&any(20), &WorkBudget::new(gone));
    assert!(matches!(outcome, Err(Error::Cancelled)));
}
