//! The JSON form of an exported document: a line of an export file, and an element of the bodies of the
//! export and import routes.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::collection::shorten;
use crate::document::{Document, DocumentId, Metadata, check_vector};
use crate::error::{InvalidInput, in_plain_words};
use crate::model::ModelIdentity;
use crate::storage::ExportedDocument;
use crate::vector::normalise;

/// How far the squared length of a vector beside a `norm` may be from one.
const UNIT_TOLERANCE: f64 = 1e-3;

/// An exported document as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct DocumentLine<'a> {
    id: Cow<'a, str>,
    text: Cow<'a, str>,
    #[serde(default)]
    metadata: Cow<'a, Metadata>,
    /// Of length one where `norm` is given; of any length otherwise.
    embedding: Cow<'a, [f32]>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    norm: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<ModelLine<'a>>,
}

#[derive(Debug, Serialize, Deserialize)]
struct ModelLine<'a> {
    id: Cow<'a, str>,
    version: Cow<'a, str>,
    dimensions: usize,
}

impl<'a> From<&'a ExportedDocument> for DocumentLine<'a> {
    fn from(exported: &'a ExportedDocument) -> Self {
        Self {
            id: exported.document.id.as_str().into(),
            text: exported.document.text.as_str().into(),
            metadata: Cow::Borrowed(&exported.document.metadata),
            embedding: exported.vector.as_slice().into(),
            norm: Some(exported.norm),
            model: exported.model.as_ref().map(|model| ModelLine {
                id: model.id.as_str().into(),
                version: model.version.as_str().into(),
                dimensions: model.dimensions,
            }),
        }
    }
}

impl<'a> DocumentLine<'a> {
    pub fn parse(line: &'a [u8]) -> Result<Self, InvalidInput> {
        serde_json::from_slice(line).map_err(|error| {
            let mut problem = json_problem(&error);
            if error.is_data() {
                problem = format!("not a document: {problem}");
            }
            InvalidInput::new(problem)
        })
    }

    /// Checks the fields. The message does not name the document.
    pub fn check(self) -> Result<ExportedDocument, InvalidInput> {
        let mut vector = self.embedding.into_owned();
        check_vector(&vector)?;
        let norm = match self.norm {
            None => normalise(&mut vector),
            Some(norm) => {
                let square: f64 = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                if (square - 1.0).abs() > UNIT_TOLERANCE {
                    return Err(InvalidInput::new(
                        "an embedding beside a 'norm' must be of length one: leave 'norm' out for any other",
                    ));
                }
                if !norm.is_finite() || norm < 0.0 {
                    return Err(InvalidInput::new("'norm' must be a finite number, zero or more"));
                }
                norm
            }
        };
        let model = self.model.map(|model| ModelIdentity {
            id: model.id.into_owned(),
            version: model.version.into_owned(),
            dimensions: model.dimensions,
        });
        if let Some(model) = model.as_ref().filter(|model| model.dimensions != vector.len()) {
            return Err(InvalidInput::new(format!(
                "its model makes vectors of {} numbers, this one has {}",
                model.dimensions,
                vector.len()
            )));
        }
        Ok(ExportedDocument {
            document: Document {
                id: DocumentId::parse(self.id)?,
                text: self.text.into_owned(),
                metadata: self.metadata.into_owned(),
            },
            vector,
            norm,
            model,
        })
    }
}

/// Checks documents that arrived together, or names the first at fault.
pub fn read_documents(lines: Vec<DocumentLine<'_>>) -> Result<Vec<ExportedDocument>, InvalidInput> {
    let mut documents: Vec<ExportedDocument> = Vec::with_capacity(lines.len());
    for (index, line) in lines.into_iter().enumerate() {
        let at = |problem: &InvalidInput| InvalidInput::new(format!("Document at index {index}: {problem}"));
        documents.push(line.check().map_err(|problem| at(&problem))?);
    }
    let mut seen = HashMap::with_capacity(documents.len());
    for (index, exported) in documents.iter().enumerate() {
        if let Some(first) = seen.insert(exported.document.id.as_str(), index) {
            return Err(InvalidInput::new(format!(
                "Document at index {index} has the same id as the document at index {first}: {:?}",
                shorten(exported.document.id.as_str())
            )));
        }
    }
    Ok(documents)
}

/// The problem with one line of JSON, without the line number, which is always 1.
pub fn json_problem(error: &serde_json::Error) -> String {
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
