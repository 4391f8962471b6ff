//! The vectors of a collection in memory, by slot: unit length, in shared chunks.
//!
//! A full chunk has codes for the quick scan and bytes for what the scan leaves over; the last
//! one, while it fills, has neither and is compared exactly. A replaced vector gets its code anew
//! with the chunk's centre as it was.

use std::sync::Arc;

use super::bytes::Bytes;
use super::codes::{Codes, Rotation};
use super::kernel::prefetch;

/// Vectors that share a centre and whose codes are made together.
pub(crate) const CHUNK: usize = 256;
/// Vectors that are copied together when one of them changes.
pub(crate) const BLOCK: usize = 32;

#[derive(Debug, Clone, Default)]
pub(crate) struct VectorChunk {
    blocks: Vec<Arc<Vec<f32>>>,
    codes: Option<Arc<Codes>>,
    bytes: Option<Arc<Bytes>>,
}

impl VectorChunk {
    fn from_blocks(blocks: Vec<Vec<f32>>, rotation: &Rotation, home: &Arc<Vec<f32>>) -> Self {
        let mut chunk = Self {
            blocks: blocks.into_iter().map(Arc::new).collect(),
            ..Self::default()
        };
        if chunk.blocks.iter().map(|block| block.len()).sum::<usize>() == CHUNK * rotation.dimensions() {
            chunk.encode(rotation, Some(home));
        }
        chunk
    }

    pub(crate) fn bytes(&self) -> Option<&Bytes> {
        self.bytes.as_deref()
    }

    pub(crate) fn codes(&self) -> Option<&Codes> {
        self.codes.as_deref()
    }

    pub(crate) fn vector(&self, at: usize, dimensions: usize) -> &[f32] {
        let start = at % BLOCK * dimensions;
        self.blocks
            .get(at / BLOCK)
            .and_then(|block| block.get(start..start + dimensions))
            .unwrap_or(&[])
    }

    fn push(&mut self, vector: &[f32]) {
        let full = BLOCK * vector.len();
        match self.blocks.last_mut().filter(|block| block.len() < full) {
            Some(block) => Arc::make_mut(block).extend_from_slice(vector),
            None => self.blocks.push(Arc::new(vector.to_vec())),
        }
    }

    fn encode(&mut self, rotation: &Rotation, home: Option<&Arc<Vec<f32>>>) {
        let dimensions = rotation.dimensions().max(1);
        let vectors = || {
            self.blocks
                .iter()
                .flat_map(|block| block.chunks_exact(dimensions))
        };
        self.codes = Some(Arc::new(Codes::encode(vectors(), rotation, home)));
        self.bytes = Some(Arc::new(Bytes::encode(vectors(), dimensions)));
    }

    fn set(&mut self, at: usize, vector: &[f32], rotation: &Rotation) {
        let start = at % BLOCK * vector.len();
        if let Some(block) = self.blocks.get_mut(at / BLOCK)
            && let Some(place) = Arc::make_mut(block).get_mut(start..start + vector.len())
        {
            place.copy_from_slice(vector);
        }
        if let Some(codes) = &mut self.codes {
            Arc::make_mut(codes).set(at, vector, rotation);
        }
        if let Some(bytes) = &mut self.bytes {
            Arc::make_mut(bytes).set(at, vector);
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Vectors {
    dimensions: usize,
    rotation: Arc<Rotation>,
    chunks: Vec<Arc<VectorChunk>>,
    len: usize,
    /// The home of new codes, and how many chunks there were when it was chosen. A collection that
    /// has grown many times gets a new one for the chunks to come; the others keep theirs.
    home: Option<(Arc<Vec<f32>>, usize)>,
}

const GROWTH_FOR_NEW_HOME: usize = 8;

impl Vectors {
    pub(crate) fn new(dimensions: usize) -> Self {
        Self {
            dimensions,
            rotation: Arc::new(Rotation::new(dimensions)),
            chunks: Vec::new(),
            len: 0,
            home: None,
        }
    }

    /// Takes all vectors at once, a block's worth in each part, encoding them on several threads.
    pub(crate) fn from_blocks(dimensions: usize, blocks: Vec<Vec<f32>>, threads: usize) -> Self {
        let mut all = Self::new(dimensions);
        let rotation = all.rotation.clone();
        all.len = blocks.iter().map(|block| block.len() / dimensions.max(1)).sum();
        let vectors = blocks
            .iter()
            .flat_map(|block| block.chunks_exact(dimensions.max(1)));
        let home = Arc::new(rotation.rotated(&mean(dimensions, vectors)));
        let chunks = all.len.div_ceil(CHUNK);
        all.home = Some((home.clone(), chunks));
        let encode = |blocks: Vec<Vec<f32>>| Arc::new(VectorChunk::from_blocks(blocks, &rotation, &home));
        let share = chunks.div_ceil(threads.max(1)).max(1);
        let mut blocks = blocks.into_iter();
        let mut parts = std::iter::from_fn(|| {
            let part: Vec<Vec<f32>> = blocks.by_ref().take(CHUNK / BLOCK).collect();
            (!part.is_empty()).then_some(part)
        })
        .peekable();
        let mut shares: Vec<Vec<Vec<Vec<f32>>>> = Vec::new();
        while parts.peek().is_some() {
            shares.push(parts.by_ref().take(share).collect());
        }
        all.chunks = std::thread::scope(|scope| {
            let workers: Vec<_> = shares
                .into_iter()
                .map(|share| scope.spawn(|| share.into_iter().map(encode).collect::<Vec<_>>()))
                .collect();
            workers
                .into_iter()
                .flat_map(|worker| {
                    worker
                        .join()
                        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
                .collect()
        });
        all
    }

    pub(crate) fn dimensions(&self) -> usize {
        self.dimensions
    }

    pub(crate) fn rotation(&self) -> &Rotation {
        &self.rotation
    }

    pub(crate) fn chunks(&self) -> &[Arc<VectorChunk>] {
        &self.chunks
    }

    pub(crate) fn get(&self, slot: u32) -> &[f32] {
        let slot = slot as usize;
        self.chunks
            .get(slot / CHUNK)
            .map_or(&[], |chunk| chunk.vector(slot % CHUNK, self.dimensions))
    }

    /// Has fetched from memory what a scan that is at this chunk needs of the next ones: their
    /// codes are found by way of two pointers, each of which is fetched a chunk earlier.
    pub(crate) fn prefetch_codes_after(&self, chunk: usize) {
        if let Some(far) = self.chunks.get(chunk + 3) {
            prefetch(std::slice::from_ref(&**far));
        }
        if let Some(codes) = self.chunks.get(chunk + 2).and_then(|chunk| chunk.codes()) {
            prefetch(std::slice::from_ref(codes));
        }
        if let Some(codes) = self.chunks.get(chunk + 1).and_then(|chunk| chunk.codes()) {
            codes.prefetch();
        }
    }

    /// Has a vector's bytes fetched from memory, or the vector where it has none.
    pub(crate) fn prefetch(&self, slot: u32) {
        let chunk = self.chunks.get(slot as usize / CHUNK);
        match chunk.and_then(|chunk| chunk.bytes()) {
            Some(bytes) => prefetch(bytes.values(slot as usize % CHUNK)),
            None => prefetch(self.get(slot)),
        }
    }

    pub(crate) fn push(&mut self, vector: &[f32]) {
        if self.len.is_multiple_of(CHUNK) {
            self.chunks.push(Arc::new(VectorChunk::default()));
        }
        self.len += 1;
        if let Some(last) = self.chunks.last_mut() {
            Arc::make_mut(last).push(vector);
        }
        if self.len.is_multiple_of(CHUNK) {
            self.encode_last();
        }
    }

    fn encode_last(&mut self) {
        let full = self.chunks.len();
        if self
            .home
            .as_ref()
            .is_some_and(|(_, chunks)| full >= chunks * GROWTH_FOR_NEW_HOME)
        {
            let centres = self
                .chunks
                .iter()
                .filter_map(|chunk| chunk.codes())
                .map(Codes::centre);
            self.home = Some((Arc::new(mean(self.dimensions, centres)), full));
        }
        let home = self.home.as_ref().map(|(home, _)| home);
        if let Some(last) = self.chunks.last_mut() {
            let chunk = Arc::make_mut(last);
            chunk.encode(&self.rotation, home);
            if self.home.is_none() {
                self.home = chunk.codes().map(|codes| (codes.home().clone(), full));
            }
        }
    }

    pub(crate) fn set(&mut self, slot: u32, vector: &[f32]) {
        if let Some(chunk) = self.chunks.get_mut(slot as usize / CHUNK) {
            Arc::make_mut(chunk).set(slot as usize % CHUNK, vector, &self.rotation);
        }
    }
}

fn mean<'a>(dimensions: usize, vectors: impl Iterator<Item = &'a [f32]>) -> Vec<f32> {
    let mut sums = vec![0.0f32; dimensions];
    let mut count = 0;
    for vector in vectors {
        count += 1;
        for (sum, x) in sums.iter_mut().zip(vector) {
            *sum += x;
        }
    }
    sums.iter_mut().for_each(|sum| *sum /= count.max(1) as f32);
    sums
}
