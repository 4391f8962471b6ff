//! The embeddings API of OpenAI, which Ollama and many others offer too.

use std::fmt;

use async_trait::async_trait;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ragstone_core::model::{CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelInfo, Role};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::batches;
use super::vectors;
use crate::http::{Call, ServiceClient};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Flavour {
    OpenAi,
    Ollama,
}

impl Flavour {
    fn limits(self) -> CallLimits {
        match self {
            // 2,048 inputs and 300,000 tokens.
            Self::OpenAi => CallLimits {
                texts: 2048,
                bytes: 300_000,
            },
            // Ollama has no limit. These keep one call well within its deadline.
            Self::Ollama => CallLimits {
                texts: 64,
                bytes: 128 << 10,
            },
        }
    }
}

#[derive(Debug)]
pub(super) struct OpenAiEmbedder {
    client: ServiceClient,
    info: ModelInfo,
    flavour: Flavour,
}

#[derive(Serialize)]
struct Request<'a> {
    model: &'a str,
    input: &'a [String],
    dimensions: usize,
    encoding_format: &'static str,
}

#[derive(Deserialize)]
struct OpenAiEmbeddings {
    data: Vec<Item>,
    #[serde(default)]
    usage: OpenAiUsage,
}

#[derive(Deserialize)]
struct Item {
    index: usize,
    #[serde(deserialize_with = "numbers")]
    embedding: Vec<f32>,
}

/// Reads a vector: in base64, which is requested because it is shorter and faster to parse, or as a list,
/// from services without base64.
fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
    struct NumbersVisitor;

    impl<'de> Visitor<'de> for NumbersVisitor {
        type Value = Vec<f32>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of numbers or 32-bit numbers in base64")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
            let bytes = STANDARD.decode(text).map_err(E::custom)?;
            match bytes.as_chunks::<4>() {
                (numbers, []) => Ok(numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()),
                _ => Err(E::custom("an embedding in base64 is not of 32-bit numbers")),
            }
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut numbers = Vec::with_capacity(list.size_hint().unwrap_or(0).min(4096));
            while let Some(number) = list.next_element::<f32>()? {
                numbers.push(number);
            }
            Ok(numbers)
        }
    }

    deserializer.deserialize_any(NumbersVisitor)
}

#[derive(Default, Deserialize)]
struct OpenAiUsage {
    #[serde(default)]
    prompt_tokens: usize,
}

impl OpenAiEmbedder {
    pub(super) fn new(client: ServiceClient, info: ModelInfo, flavour: Flavour) -> Self {
        Self {
            client,
            info,
            flavour,
        }
    }

    async fn embed_batch(&self, texts: &[String]) -> Result<Vec<Embedding>, ModelError> {
        let call = Call::post("embeddings").json(&Request {
            model: &self.info.name,
            input: texts,
            dimensions: self.info.identity.dimensions,
            encoding_format: "base64",
        });
        let answer: OpenAiEmbeddings = self.client.call_json(call).await.map_err(vectors::model_error)?;
        let tokens = answer.usage.prompt_tokens;
        in_order(answer.data, texts.len())
            .and_then(|in_order| vectors::finish(in_order, texts, tokens, &self.info))
            .map_err(|reason| vectors::model_error(self.client.bad_answer(reason)))
    }
}

/// Sorts vectors by their index, which must be complete and unique: the API promises no order.
fn in_order(items: Vec<Item>, count: usize) -> Result<Vec<Vec<f32>>, String> {
    if items.len() != count {
        return Err(format!("{} vectors for {count} texts", items.len()));
    }
    let mut slots: Vec<Option<Vec<f32>>> = vec![None; count];
    for item in items {
        match slots.get_mut(item.index) {
            Some(slot @ None) => *slot = Some(item.embedding),
            Some(Some(_)) => return Err(format!("index {} comes twice", item.index)),
            None => return Err(format!("index {} for {count} texts", item.index)),
        }
    }
    Ok(slots.into_iter().flatten().collect())
}

#[async_trait]
impl Embedder for OpenAiEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        let texts = batches::into_texts(inputs, self.client.service())?;
        let mut embeddings = Vec::with_capacity(texts.len());
        for batch in batches::split(&texts, self.limits()) {
            embeddings.extend(self.embed_batch(batch).await?);
        }
        Ok(embeddings)
    }

    fn limits(&self) -> CallLimits {
        self.flavour.limits()
    }
}
