//! Documents, and how they are read from JSON.
//!
//! The same reader serves the HTTP body of an add, and a line of JSONL: it accepts what a person
//! may reasonably send and refuses the rest with the index of the document at fault.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::collection::shorten;
use crate::error::InvalidInput;

/// Any JSON object. Scalars and lists of scalars in it can be filtered on.
pub type Metadata = serde_json::Map<String, Value>;

/// The widest vector that can be stored.
pub const MAX_DIMENSIONS: usize = 8192;

const MAX_ID_BYTES: usize = 512;

/// Any non-empty string of up to 512 bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DocumentId(String);

impl DocumentId {
    pub fn parse(id: impl Into<String>) -> Result<Self, InvalidInput> {
        let id = id.into();
        if id.is_empty() {
            return Err(InvalidInput::new("a document id must not be empty"));
        }
        if id.len() > MAX_ID_BYTES {
            return Err(InvalidInput::new(format!(
                "document id {:?} has {} bytes; at most {MAX_ID_BYTES} are allowed",
                shorten(&id),
                id.len()
            )));
        }
        Ok(Self(id))
    }

    pub fn generate() -> Self {
        Self(format!("doc_{}", uuid::Uuid::new_v4()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn into_string(self) -> String {
        self.0
    }
}

impl fmt::Display for DocumentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    pub id: DocumentId,
    pub text: String,
    pub metadata: Metadata,
}

/// A document as a client sends it: with a vector of its own, or for the service to embed.
#[derive(Debug, Clone, PartialEq)]
pub struct NewDocument {
    pub document: Document,
    pub embedding: Option<Vec<f32>>,
}

/// What became of documents that were added.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Added {
    /// In the order of the documents.
    pub ids: Vec<DocumentId>,
    /// Those of which the model read only the beginning.
    pub truncated: Vec<DocumentId>,
}

/// Checks a vector's width and numbers. The message does not say whose vector it is.
pub fn check_vector(vector: &[f32]) -> Result<(), InvalidInput> {
    if vector.is_empty() || vector.len() > MAX_DIMENSIONS {
        return Err(InvalidInput::new(format!(
            "an embedding must have 1 to {MAX_DIMENSIONS} numbers, this one has {}",
            vector.len()
        )));
    }
    if !vector.iter().all(|x| x.is_finite()) {
        return Err(InvalidInput::new(
            "an embedding must be an array of finite numbers",
        ));
    }
    if vector.iter().all(|x| *x == 0.0) {
        return Err(InvalidInput::new(
            "an embedding must not be all zeros: it has no direction to compare",
        ));
    }
    Ok(())
}

/// A document whose JSON was well formed, before its fields are checked.
#[derive(Debug, Default)]
pub struct RawDocument {
    id: Option<Value>,
    text: Option<Value>,
    metadata: Option<Value>,
    embedding: RawEmbedding,
}

impl RawDocument {
    /// `index` is the document's place in its request, for the error message.
    pub fn check(self, index: usize) -> Result<NewDocument, InvalidInput> {
        let at = |problem: String| InvalidInput::new(format!("Document at index {index}{problem}"));
        let text = match self.text {
            Some(Value::String(text)) if !text.is_empty() => text,
            None | Some(Value::Null | Value::String(_)) => {
                return Err(at(" missing required 'text' field".into()));
            }
            Some(_) => return Err(at(": 'text' must be a string".into())),
        };
        let id = match self.id {
            None | Some(Value::Null) => DocumentId::generate(),
            Some(Value::String(id)) => DocumentId::parse(id).map_err(|e| at(format!(": {e}")))?,
            Some(_) => return Err(at(": 'id' must be a string".into())),
        };
        let metadata = match self.metadata {
            None | Some(Value::Null) => Metadata::new(),
            Some(Value::Object(metadata)) => metadata,
            Some(_) => return Err(at(": 'metadata' must be a JSON object".into())),
        };
        let embedding = match self.embedding {
            RawEmbedding::Absent => None,
            RawEmbedding::Vector(vector) => {
                check_vector(&vector).map_err(|e| at(format!(": {e}")))?;
                Some(vector)
            }
            RawEmbedding::Invalid => {
                return Err(at(": 'embedding' must be an array of finite numbers".into()));
            }
        };
        Ok(NewDocument {
            document: Document { id, text, metadata },
            embedding,
        })
    }
}

/// Reads a whole list, or names the first document at fault.
pub fn check_documents(raw: Vec<RawDocument>) -> Result<Vec<NewDocument>, InvalidInput> {
    if raw.is_empty() {
        return Err(InvalidInput::new("Documents array is required"));
    }
    let documents = raw
        .into_iter()
        .enumerate()
        .map(|(index, raw)| raw.check(index))
        .collect::<Result<Vec<_>, _>>()?;
    let mut seen = std::collections::HashMap::with_capacity(documents.len());
    for (index, new) in documents.iter().enumerate() {
        if let Some(first) = seen.insert(new.document.id.as_str(), index) {
            return Err(InvalidInput::new(format!(
                "Document at index {index} has the same id as the document at index {first}: {:?}",
                shorten(new.document.id.as_str())
            )));
        }
    }
    Ok(documents)
}

impl<'de> Deserialize<'de> for RawDocument {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct DocumentVisitor;

        impl<'de> Visitor<'de> for DocumentVisitor {
            type Value = RawDocument;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a document object with a 'text' field")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawDocument, A::Error> {
                let mut raw = RawDocument::default();
                while let Some(key) = map.next_key::<std::borrow::Cow<'de, str>>()? {
                    match key.as_ref() {
                        "id" => raw.id = Some(map.next_value()?),
                        "text" => raw.text = Some(map.next_value()?),
                        "metadata" => raw.metadata = Some(map.next_value()?),
                        "embedding" => raw.embedding = map.next_value()?,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(raw)
            }
        }

        deserializer.deserialize_map(DocumentVisitor)
    }
}

/// Floats are read straight into the vector: going through [`Value`] would cost five times the memory.
#[derive(Debug, Default)]
enum RawEmbedding {
    #[default]
    Absent,
    Vector(Vec<f32>),
    Invalid,
}

impl<'de> Deserialize<'de> for RawEmbedding {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VectorVisitor;

        impl<'de> Visitor<'de> for VectorVisitor {
            type Value = RawEmbedding;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of finite numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RawEmbedding, A::Error> {
                let mut vector = Vec::with_capacity(seq.size_hint().unwrap_or(384).min(MAX_DIMENSIONS));
                let mut valid = true;
                while let Some(MaybeNumber(number)) = seq.next_element()? {
                    match number {
                        Some(number) if valid && vector.len() <= MAX_DIMENSIONS => vector.push(number),
                        Some(_) => {}
                        None => valid = false,
                    }
                }
                Ok(if valid {
                    RawEmbedding::Vector(vector)
                } else {
                    RawEmbedding::Invalid
                })
            }

            fn visit_unit<E: de::Error>(self) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Absent)
            }

            fn visit_bool<E: de::Error>(self, _: bool) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Invalid)
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Invalid)
            }

            fn visit_u64<E: de::Error>(self, _: u64) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Invalid)
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Invalid)
            }

            fn visit_str<E: de::Error>(self, _: &str) -> Result<RawEmbedding, E> {
                Ok(RawEmbedding::Invalid)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawEmbedding, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(RawEmbedding::Invalid)
            }
        }

        deserializer.deserialize_any(VectorVisitor)
    }
}

/// One element of an embedding; `None` for anything that is not a number.
struct MaybeNumber(Option<f32>);

impl<'de> Deserialize<'de> for MaybeNumber {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor;

        impl<'de> Visitor<'de> for NumberVisitor {
            type Value = MaybeNumber;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_f64<E: de::Error>(self, x: f64) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(Some(x as f32)))
            }

            fn visit_i64<E: de::Error>(self, x: i64) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(Some(x as f32)))
            }

            fn visit_u64<E: de::Error>(self, x: u64) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(Some(x as f32)))
            }

            fn visit_unit<E: de::Error>(self) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(None))
            }

            fn visit_bool<E: de::Error>(self, _: bool) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(None))
            }

            fn visit_str<E: de::Error>(self, _: &str) -> Result<MaybeNumber, E> {
                Ok(MaybeNumber(None))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<MaybeNumber, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(MaybeNumber(None))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<MaybeNumber, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(MaybeNumber(None))
            }
        }

        deserializer.deserialize_any(NumberVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<Vec<NewDocument>, InvalidInput> {
        check_documents(serde_json::from_str(json).unwrap())
    }

    fn refusal(json: &str) -> String {
        read(json).unwrap_err().to_string()
    }

    #[test]
    fn a_full_document_is_read_as_sent() {
        let new =
            read(r#"[{"id":"a","text":"t","metadata":{"n":1},"embedding":[1, -0.5, 2e-1],"more":[{}]}]"#)
                .unwrap();
        assert_eq!(new[0].document.id.as_str(), "a");
        assert_eq!(new[0].document.metadata["n"], 1);
        assert_eq!(new[0].embedding.as_deref(), Some(&[1.0, -0.5, 0.2][..]));
    }

    #[test]
    fn absent_and_null_fields_take_their_defaults() {
        let new = read(r#"[{"id":null,"text":"t","metadata":null,"embedding":null}]"#).unwrap();
        assert!(new[0].document.id.as_str().starts_with("doc_"));
        assert!(new[0].document.metadata.is_empty());
        assert!(new[0].embedding.is_none());
    }

    #[test]
    fn refusals_name_the_document() {
        assert_eq!(
            refusal(r#"[{"text":"t"},{}]"#),
            "Document at index 1 missing required 'text' field"
        );
        assert_eq!(
            refusal(r#"[{"text":3}]"#),
            "Document at index 0: 'text' must be a string"
        );
        assert_eq!(refusal("[]"), "Documents array is required");
        for bad in [
            "\"x\"",
            "5",
            "true",
            "{\"a\":[1]}",
            "[1,\"2\"]",
            "[1,null]",
            "[[1]]",
            "[{}]",
            "[true]",
        ] {
            assert_eq!(
                refusal(&format!(r#"[{{"text":"t","embedding":{bad}}}]"#)),
                "Document at index 0: 'embedding' must be an array of finite numbers",
            );
        }
        for bad in ["[]", "[1e300]", "[0,0.0,-0]"] {
            assert!(
                refusal(&format!(r#"[{{"text":"t","embedding":{bad}}}]"#))
                    .starts_with("Document at index 0: an embedding")
            );
        }
    }

    #[test]
    fn the_same_id_twice_is_refused() {
        assert!(refusal(r#"[{"id":"a","text":"t"},{"id":"a","text":"u"}]"#).contains("same id"));
    }
}
