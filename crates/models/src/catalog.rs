//! Recommended cross-encoders.

use std::fmt::Write;

/// Search page for more cross-encoders.
pub const HUB_SEARCH: &str = "https://huggingface.co/models?pipeline_tag=text-ranking";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CuratedModel {
    pub name: &'static str,
    pub use_case: UseCase,
    /// Size of the download: safetensors weights and a tokenizer.
    pub size: &'static str,
    /// Latency for 10 documents of about 150 tokens on two cores without a GPU, estimated from the number
    /// of multiplications and the throughput of the kernel.
    pub latency: &'static str,
    pub accuracy: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseCase {
    Fast,
    Recommended,
    HighAccuracy,
}

impl UseCase {
    pub fn name(self) -> &'static str {
        match self {
            Self::Fast => "fast",
            Self::Recommended => "recommended",
            Self::HighAccuracy => "high-accuracy",
        }
    }
}

pub const CROSS_ENCODERS: [CuratedModel; 5] = [
    CuratedModel {
        name: "cross-encoder/ms-marco-MiniLM-L-6-v2",
        use_case: UseCase::Fast,
        size: "92 MB",
        latency: "~0.3 s",
        accuracy: "good, English",
    },
    CuratedModel {
        name: "cross-encoder/ms-marco-MiniLM-L-12-v2",
        use_case: UseCase::Fast,
        size: "134 MB",
        latency: "~0.5 s",
        accuracy: "good, English",
    },
    CuratedModel {
        name: "BAAI/bge-reranker-base",
        use_case: UseCase::Recommended,
        size: "1.13 GB",
        latency: "~2 s",
        accuracy: "high, English and Chinese",
    },
    CuratedModel {
        name: "BAAI/bge-reranker-large",
        use_case: UseCase::HighAccuracy,
        size: "2.26 GB",
        latency: "~7 s",
        accuracy: "very high, English and Chinese",
    },
    CuratedModel {
        name: "BAAI/bge-reranker-v2-m3",
        use_case: UseCase::HighAccuracy,
        size: "2.29 GB",
        latency: "~7 s",
        accuracy: "very high, many languages",
    },
];

/// The list as `--list-reranker-models` prints it.
pub fn render() -> String {
    let mut text = String::from("Recommended cross-encoders for reranking\n");
    for use_case in [UseCase::Fast, UseCase::Recommended, UseCase::HighAccuracy] {
        let _ = write!(text, "\n{}\n", use_case.name());
        for model in CROSS_ENCODERS.iter().filter(|model| model.use_case == use_case) {
            let CuratedModel {
                name,
                size,
                latency,
                accuracy,
                ..
            } = model;
            let _ = writeln!(
                text,
                "  {name:<40} {size:>8}   {latency:>7} for 10 documents   accuracy: {accuracy}"
            );
        }
    }
    let _ = write!(
        text,
        "\nLatency: estimated, for 10 documents of about 150 tokens on two cores without a GPU.\n\
         Any Hugging Face cross-encoder of a supported architecture works ({}), with safetensors weights\n\
         and one output. Find more at {HUB_SEARCH}\n",
        crate::encoder::config::SUPPORTED_ARCHITECTURES
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of an encoder with a classification head in f32, and of its tokenizer.
    fn bytes([vocabulary, positions, types, hidden, layers]: [usize; 5], tokenizer: usize) -> usize {
        let norm = 2 * hidden;
        let linear = |from: usize, to: usize| from * to + to;
        let attention = 4 * linear(hidden, hidden) + norm;
        let feed_forward = linear(hidden, 4 * hidden) + linear(4 * hidden, hidden) + norm;
        let embeddings = (vocabulary + positions + types) * hidden + norm;
        let head = linear(hidden, hidden) + linear(hidden, 1);
        4 * (embeddings + layers * (attention + feed_forward) + head) + tokenizer
    }

    #[test]
    fn sizes_follow_from_the_shapes_of_the_models() {
        let (english, multilingual) = (711_000, 17_098_000);
        let shapes = [
            ([30_522, 512, 2, 384, 6], english),
            ([30_522, 512, 2, 384, 12], english),
            ([250_002, 514, 1, 768, 12], multilingual),
            ([250_002, 514, 1, 1_024, 24], multilingual),
            ([250_002, 8_194, 1, 1_024, 24], multilingual),
        ];
        for (model, (shape, tokenizer)) in CROSS_ENCODERS.iter().zip(shapes) {
            let megabytes = bytes(shape, tokenizer) as f64 / 1e6;
            let size = if megabytes < 1e3 {
                format!("{megabytes:.0} MB")
            } else {
                format!("{:.2} GB", megabytes / 1e3)
            };
            assert_eq!(model.size, size, "{}", model.name);
        }
    }

    #[test]
    fn the_list_names_every_model_with_its_facts_and_where_to_find_more() {
        let text = render();
        for model in CROSS_ENCODERS {
            let line = text.lines().find(|line| line.contains(model.name)).unwrap();
            assert!(
                line.contains(model.size) && line.contains(model.latency) && line.contains(model.accuracy)
            );
        }
        for part in [
            "\nfast\n",
            "\nrecommended\n",
            "\nhigh-accuracy\n",
            HUB_SEARCH,
            "Any Hugging Face cross-encoder",
        ] {
            assert!(text.contains(part), "{part}");
        }
    }
}
