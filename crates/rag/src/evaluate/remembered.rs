//! An embedding model that remembers what it was asked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use ragstone_core::model::{CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelInfo, Role};

/// The same vectors as the model's own, each made once: an evaluation asks for the same few thousand
/// texts many times over. Never forgets, so it is nothing for a server.
pub struct Remembered {
    model: Arc<dyn Embedder>,
    queries: Mutex<HashMap<String, Embedding>>,
}

impl Remembered {
    pub fn new(model: Arc<dyn Embedder>) -> Self {
        Self {
            model,
            queries: Mutex::default(),
        }
    }

    fn known(&self, text: &str) -> Option<Embedding> {
        let queries = self.queries.lock().unwrap_or_else(PoisonError::into_inner);
        queries.get(text).cloned()
    }
}

#[async_trait]
impl Embedder for Remembered {
    fn info(&self) -> &ModelInfo {
        self.model.info()
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        let texts: Option<Vec<String>> = inputs
            .iter()
            .map(|input| match input {
                EmbedInput::Text(text) => Some(text.clone()),
                EmbedInput::Tokens(_) => None,
            })
            .collect();
        let (Some(texts), Role::Query) = (texts, role) else {
            return self.model.embed(inputs, role).await;
        };
        let new: Vec<String> = texts
            .iter()
            .filter(|text| self.known(text).is_none())
            .cloned()
            .collect();
        if !new.is_empty() {
            let inputs = new.iter().cloned().map(EmbedInput::Text).collect();
            let made = self.model.embed(inputs, role).await?;
            let mut queries = self.queries.lock().unwrap_or_else(PoisonError::into_inner);
            queries.extend(new.into_iter().zip(made));
        }
        texts
            .iter()
            .map(|text| self.known(text))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| ModelError::Failed("the model gave too few vectors".to_owned()))
    }

    fn limits(&self) -> CallLimits {
        self.model.limits()
    }

    fn count_tokens(&self, text: &str) -> Option<usize> {
        self.model.count_tokens(text)
    }
}
