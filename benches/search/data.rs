//! Documents and vectors for the benchmark, the same in every run.

use ragstone_core::storage::{DocumentBatch, StoredDocument};
use ragstone_core::{Document, DocumentId, Metadata};
use serde_json::json;

pub(crate) const DIMENSIONS: usize = 384;

pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// About normally distributed.
    fn normal(&mut self) -> f32 {
        (0..6).map(|_| self.uniform()).sum::<f32>() * 1.414 - 4.243
    }
}

/// Where vectors come from: clusters of random ones, or a file of little-endian floats.
pub(crate) enum Source {
    Clusters(Vec<Vec<f32>>, Noise),
    File(Vec<f32>, Noise),
}

impl Source {
    pub(crate) fn clusters() -> Self {
        let mut noise = Noise(1);
        let centres = (0..1000)
            .map(|_| (0..DIMENSIONS).map(|_| noise.normal()).collect())
            .collect();
        Self::Clusters(centres, noise)
    }

    pub(crate) fn file(path: &str) -> std::io::Result<Self> {
        let bytes = std::fs::read(path)?;
        let floats = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        Ok(Self::File(floats, Noise(2)))
    }

    /// Real vectors are used once each; beyond their number, two are mixed with a little noise.
    pub(crate) fn vector(&mut self, number: usize) -> Vec<f32> {
        match self {
            Self::Clusters(centres, noise) => {
                let centre = &centres[noise.below(centres.len())];
                unit(centre.iter().map(|x| x * 0.8 + noise.normal()).collect())
            }
            Self::File(floats, noise) => {
                let count = floats.len() / DIMENSIONS;
                let at = |n: usize| &floats[n * DIMENSIONS..(n + 1) * DIMENSIONS];
                if number < count {
                    return unit(at(number).to_vec());
                }
                let (a, b) = (at(noise.below(count)), at(noise.below(count)));
                unit(
                    a.iter()
                        .zip(b)
                        .map(|(a, b)| a * 0.8 + b * 0.35 + noise.normal() * 0.012)
                        .collect(),
                )
            }
        }
    }
}

fn unit(mut vector: Vec<f32>) -> Vec<f32> {
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    vector.iter_mut().for_each(|x| *x /= length);
    vector
}

/// Words with frequencies like those of a language: few are common, most are rare.
fn text(noise: &mut Noise) -> String {
    let words = 30 + noise.below(60);
    let mut text = String::new();
    for _ in 0..words {
        let rank = (f64::from(noise.uniform()) * 10.8).exp() as usize;
        text.push_str(&word(rank));
        text.push(' ');
    }
    text
}

pub(crate) fn word(rank: usize) -> String {
    const SYLLABLES: [&str; 16] = [
        "ka", "ro", "mi", "tu", "le", "so", "na", "pi", "du", "ve", "go", "ha", "ze", "bo", "fi", "wu",
    ];
    let mut rest = rank + 16;
    let mut word = String::new();
    while rest > 0 {
        word.push_str(SYLLABLES[rest % 16]);
        rest /= 16;
    }
    word
}

/// Documents `from..to`, with fields whose values are as selective as their names say.
pub(crate) fn batch(from: usize, to: usize, vectors: &[Vec<f32>]) -> DocumentBatch {
    let mut noise = Noise(from as u64 + 77);
    let documents = (from..to)
        .map(|n| StoredDocument {
            document: Document {
                id: DocumentId::parse(format!("document-{n}")).unwrap(),
                text: text(&mut noise),
                metadata: fields(n),
            },
            vector: vectors[n - from].clone(),
        })
        .collect();
    DocumentBatch {
        documents,
        model: None,
    }
}

pub(crate) fn fields(n: usize) -> Metadata {
    // Multiplying by an odd number spreads documents of one value over the whole collection.
    let spread = n.wrapping_mul(2_654_435_761) >> 7;
    let value = json!({
        "half": spread % 2,
        "tenth": spread % 10,
        "hundredth": format!("value-{}", spread % 100),
        "rare": format!("source-{:05}", spread % 5000),
        "tags": [format!("t{}", spread % 7), format!("t{}", spread % 11)],
    });
    match value {
        serde_json::Value::Object(fields) => fields,
        _ => Metadata::new(),
    }
}
