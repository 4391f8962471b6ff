//! Splitting of documents, and runs.

mod golden;
mod rows;
mod run;
mod sharing;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Role};

/// A token is a word. Remembers how many texts it was asked for, and refuses those that say so.
pub(super) struct WordModel {
    info: ModelInfo,
    texts: AtomicUsize,
}

impl WordModel {
    pub(super) fn new(version: &str) -> Arc<Self> {
        let identity = ModelIdentity {
            id: "words".into(),
            version: version.into(),
            dimensions: 8,
        };
        let info = ModelInfo {
            identity,
            name: "words".into(),
            max_tokens: Some(48),
        };
        Arc::new(Self {
            info,
            texts: AtomicUsize::new(0),
        })
    }

    /// Texts embedded since the last time this was asked.
    pub(super) fn embedded(&self) -> usize {
        self.texts.swap(0, Ordering::Relaxed)
    }
}

#[async_trait]
impl Embedder for WordModel {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        let mut embeddings = Vec::new();
        for input in inputs {
            let EmbedInput::Text(text) = input else {
                unreachable!("tests send texts")
            };
            if text.contains("unembeddable") {
                return Err(ModelError::InvalidInput("that cannot be embedded".into()));
            }
            self.texts.fetch_add(1, Ordering::Relaxed);
            let hash = super::chunk::content_hash(&text);
            let vector = hash.bytes().take(8).map(|byte| f32::from(byte) - 60.0).collect();
            embeddings.push(Embedding {
                vector,
                tokens: text.split_whitespace().count(),
                truncated: false,
            });
        }
        Ok(embeddings)
    }

    fn count_tokens(&self, text: &str) -> Option<usize> {
        Some(text.split_whitespace().count())
    }
}

/// A small PDF file: one string a line, pages apart.
pub(super) fn pdf(pages: &[&[&str]]) -> Vec<u8> {
    let mut objects = vec![
        "<< /Type /Catalog /Pages 2 0 R >>".to_owned(),
        String::new(),
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>".to_owned(),
    ];
    let mut kids = Vec::new();
    for lines in pages {
        let shown: String = lines
            .iter()
            .map(|line| format!("({line}) Tj 0 -14 Td "))
            .collect();
        let content = format!("BT /F1 12 Tf 72 720 Td {shown}ET");
        let page = objects.len() + 1;
        kids.push(format!("{page} 0 R"));
        objects.push(format!(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {} 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
            page + 1
        ));
        objects.push(format!(
            "<< /Length {} >>\nstream\n{content}\nendstream",
            content.len()
        ));
    }
    objects[1] = format!(
        "<< /Type /Pages /Kids [{}] /Count {} >>",
        kids.join(" "),
        kids.len()
    );
    let mut file = "%PDF-1.4\n".to_owned();
    let mut offsets = Vec::new();
    for (index, object) in objects.iter().enumerate() {
        offsets.push(file.len());
        file.push_str(&format!("{} 0 obj\n{object}\nendobj\n", index + 1));
    }
    let table = file.len();
    file.push_str(&format!("xref\n0 {}\n0000000000 65535 f \n", objects.len() + 1));
    offsets
        .iter()
        .for_each(|offset| file.push_str(&format!("{offset:010} 00000 n \n")));
    let size = objects.len() + 1;
    file.push_str(&format!(
        "trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n"
    ));
    file.into_bytes()
}
