//! BM25, the ranking of documents by the words they share with a query.

const K1: f32 = 1.2;
const B: f32 = 0.75;

/// How much a word counts that so many of all documents have.
pub fn idf(documents: u64, having: u64) -> f32 {
    let (all, having) = (documents as f64, having as f64);
    (1.0 + (all - having + 0.5) / (having + 0.5)).ln() as f32
}

/// How much the occurrences of a word in a document count.
#[derive(Debug, Clone, Copy)]
pub struct Bm25 {
    fixed: f32,
    per_length: f32,
}

impl Bm25 {
    /// For documents that have so many words together.
    pub fn new(documents: u64, total_length: u64) -> Self {
        let average = (total_length as f64 / documents.max(1) as f64).max(1.0) as f32;
        Self {
            fixed: K1 * (1.0 - B),
            per_length: K1 * B / average,
        }
    }

    #[inline]
    pub fn saturation(&self, count: u16, length: u32) -> f32 {
        let count = f32::from(count);
        count * (K1 + 1.0) / (count + self.fixed + self.per_length * length as f32)
    }
}
