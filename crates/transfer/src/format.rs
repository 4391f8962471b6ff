//! A collection as lines of JSON.
//!
//! The first line says what collection it is, the last one how many documents there are and what
//! they add up to, and each line between is a document. The same collection always gives the same
//! bytes: keys are sorted, numbers are written as short as they can be read back.

use ragstone_core::error::{InvalidInput, in_plain_words};
use ragstone_core::storage::{ExportedDocument, VectorPrecision};
use ragstone_core::{Collection, Metadata};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

const VERSION: u32 = 1;

/// What is moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Head {
    /// The version of this format.
    ragstone_export: u32,
    pub collection: String,
    #[serde(default)]
    pub metadata: Metadata,
    pub dimensions: Option<usize>,
}

impl Head {
    pub fn of(collection: &Collection) -> Self {
        Self {
            ragstone_export: VERSION,
            collection: collection.name.to_string(),
            metadata: collection.metadata.clone(),
            dimensions: collection.dimensions,
        }
    }

    pub(super) fn parse(line: &[u8]) -> Result<Self, InvalidInput> {
        let head: Self = serde_json::from_slice(line).map_err(|error| {
            InvalidInput::new(format!(
                "its first line must be one such as {{\"ragstone_export\": {VERSION}, \"collection\": \"docs\", \"metadata\": \
                 {{}}}}: {}",
                json_problem(&error)
            ))
        })?;
        if head.ragstone_export != VERSION {
            return Err(InvalidInput::new(format!(
                "the export has format version {}; this program reads version {VERSION}",
                head.ragstone_export
            )));
        }
        Ok(head)
    }
}

/// What the first line adds up to, without what ends it.
pub(super) fn head_sha256(line: &[u8]) -> String {
    hex(Sha256::digest(line.trim_ascii()).as_slice())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// How many documents there are, and what they add up to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sum {
    pub documents: u64,
    /// Over everything that is kept of them, in their order.
    pub sha256: String,
}

/// The last line, as it is written.
#[derive(Serialize)]
pub(super) struct End<'a> {
    end: EndFields<'a>,
}

#[derive(Serialize)]
struct EndFields<'a> {
    #[serde(flatten)]
    sum: &'a Sum,
    /// Of the first line.
    head_sha256: String,
}

impl<'a> End<'a> {
    pub(super) fn new(sum: &'a Sum, head: &Head) -> Self {
        let head_sha256 = head_sha256(&serde_json::to_vec(head).unwrap_or_default());
        Self {
            end: EndFields { sum, head_sha256 },
        }
    }
}

/// The last line, as it is read: one of somebody's own may do without the checksum.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportClaim {
    pub documents: u64,
    pub sha256: Option<String>,
    /// Of the first line.
    head_sha256: Option<String>,
}

impl ExportClaim {
    pub(super) fn check_head(&self, found: &str) -> Result<(), InvalidInput> {
        match &self.head_sha256 {
            Some(claimed) if claimed != found => Err(InvalidInput::new(format!(
                "the source is damaged: it says that its first line has the checksum {claimed}, and it has {found}"
            ))),
            _ => Ok(()),
        }
    }

    /// `None` for a line that is a document's.
    pub(super) fn parse(line: &[u8]) -> Result<Option<Self>, InvalidInput> {
        const LONGEST: usize = 512;
        const KEY: &[u8] = b"\"end\"";
        if line.len() > LONGEST || !line.windows(KEY.len()).any(|part| part == KEY) {
            return Ok(None);
        }
        let Ok(mut fields) = serde_json::from_slice::<Metadata>(line) else {
            return Ok(None);
        };
        match fields.remove("end") {
            Some(end) if fields.is_empty() => serde_json::from_value(end).map(Some).map_err(|error| {
                InvalidInput::new(format!(
                    "the line that counts the documents must be one such as {{\"end\": {{\"documents\": 3}}}}, with a \
                     \"sha256\" where there is one: {}",
                    json_problem(&error)
                ))
            }),
            _ => Ok(None),
        }
    }
}

/// Without the place within the line, which says that it is line 1.
fn json_problem(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let (problem, column) = match message.rsplit_once(" at line 1 column ") {
        Some((problem, column)) => (problem, Some(column)),
        None => (message.as_str(), None),
    };
    let problem = in_plain_words(problem);
    match column {
        Some(column) if error.is_syntax() || error.is_eof() => {
            format!("this is not JSON ({problem} at column {column})")
        }
        _ => problem,
    }
}

/// Adds documents up, one after the other.
#[derive(Clone)]
pub(super) struct Summing {
    documents: u64,
    hash: Sha256,
    vectors: VectorPrecision,
}

impl Default for Summing {
    fn default() -> Self {
        Self::comparing(VectorPrecision::Exact)
    }
}

impl Summing {
    /// Vectors that are rounded on the way are not part of the sum.
    pub(super) fn comparing(vectors: VectorPrecision) -> Self {
        Self {
            documents: 0,
            hash: Sha256::new(),
            vectors,
        }
    }

    pub(super) fn add(&mut self, moved: &ExportedDocument) {
        self.documents += 1;
        let metadata = serde_json::to_vec(&moved.document.metadata).unwrap_or_default();
        self.field(moved.document.id.as_str().as_bytes());
        self.field(moved.document.text.as_bytes());
        self.field(&metadata);
        if self.vectors == VectorPrecision::Exact {
            let vector: Vec<u8> = moved.vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            self.field(&vector);
        }
        self.field(&moved.norm.to_le_bytes());
        match &moved.model {
            None => self.field(&[]),
            Some(model) => {
                self.field(model.id.as_bytes());
                self.field(model.version.as_bytes());
            }
        }
    }

    /// With its length before it, so that no two rows of fields are the same bytes.
    fn field(&mut self, bytes: &[u8]) {
        self.hash.update((bytes.len() as u64).to_le_bytes());
        self.hash.update(bytes);
    }

    pub(super) fn vectors(&self) -> VectorPrecision {
        self.vectors
    }

    pub(super) fn documents(&self) -> u64 {
        self.documents
    }

    pub(super) fn finish(self) -> Sum {
        Sum {
            documents: self.documents,
            sha256: hex(self.hash.finalize().as_slice()),
        }
    }
}
