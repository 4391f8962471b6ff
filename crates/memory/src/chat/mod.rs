//! Chat with context: adds items retrieved for the user's message to the system prompt.

mod render;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use serde_json::Value;

pub use render::HEADING;

use crate::{Rag, Retrieval, RetrievedItem};

/// The part of a long message that retrieval reads. Embedding models read no more than this.
const MAX_QUERY_CHARS: usize = 8_000;

#[derive(Debug, Clone)]
pub struct ContextOptions {
    /// The most tokens that the section adds to the prompt.
    pub token_budget: usize,
    /// Retrieval that takes longer is abandoned, and the chat continues without context.
    pub deadline: Duration,
}

impl Default for ContextOptions {
    fn default() -> Self {
        Self {
            token_budget: 2_000,
            deadline: Duration::from_secs(2),
        }
    }
}

/// A chat model that adds context from memory to every call.
///
/// Retrieval never fails a call and never delays it beyond its deadline: without a result the request
/// stays as it is.
pub struct ContextAwareModelAdapter {
    model: Arc<dyn ChatModel>,
    rag: Arc<Rag>,
    options: ContextOptions,
}

/// A request with its context.
#[derive(Debug)]
pub struct PreparedChat {
    pub request: ChatRequest,
    /// The items of the context, in the order of the prompt.
    pub sources: Vec<ContextSource>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextSource {
    pub collection: String,
    pub id: String,
}

impl ContextAwareModelAdapter {
    pub fn new(model: Arc<dyn ChatModel>, rag: Arc<Rag>, options: ContextOptions) -> Self {
        Self { model, rag, options }
    }

    /// Adds the context. With a session, entries of other sessions are left out.
    pub async fn prepare(&self, mut request: ChatRequest, session_key: Option<&str>) -> PreparedChat {
        let found = self.retrieve(&request, session_key).await;
        let count = |text: &str| render::count_tokens(self.rag.embedder(), text);
        let Some(section) = render::section(&found, self.options.token_budget, count) else {
            return PreparedChat {
                request,
                sources: Vec::new(),
            };
        };
        request.append_to_system(&section.text);
        PreparedChat {
            request,
            sources: section.sources,
        }
    }

    async fn retrieve(&self, request: &ChatRequest, session_key: Option<&str>) -> Vec<RetrievedItem> {
        let Some(text) = request.last_user_text() else {
            return Vec::new();
        };
        let retrieval = Retrieval {
            query: text.chars().take(MAX_QUERY_CHARS).collect(),
            session_key: session_key.map(str::to_owned),
            ..Retrieval::default()
        };
        let started = std::time::Instant::now();
        // Not even a defect of retrieval may cost the caller the answer.
        let retrieving = AssertUnwindSafe(self.rag.retrieve(&retrieval)).catch_unwind();
        let outcome = tokio::time::timeout(self.options.deadline, retrieving).await;
        metrics::histogram!("ragstone_context_seconds").record(started.elapsed().as_secs_f64());
        match outcome {
            Ok(Ok(Ok(retrieved))) => retrieved.found,
            Ok(Ok(Err(error))) => {
                tracing::warn!(%error, "no context for this chat: retrieval failed");
                Vec::new()
            }
            Ok(Err(_)) => {
                tracing::error!("no context for this chat: retrieval panicked");
                Vec::new()
            }
            Err(_) => {
                let ms = self.options.deadline.as_millis();
                tracing::warn!(ms, "no context for this chat: retrieval took too long");
                Vec::new()
            }
        }
    }
}

#[async_trait]
impl ChatModel for ContextAwareModelAdapter {
    fn provider(&self) -> &str {
        self.model.provider()
    }

    fn model(&self) -> &str {
        self.model.model()
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        let prepared = self.prepare(request, None).await;
        self.model.complete(prepared.request).await
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let prepared = self.prepare(request, None).await;
        self.model.stream(prepared.request).await
    }
}
