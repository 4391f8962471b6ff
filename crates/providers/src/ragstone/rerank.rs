//! Reranking by the service's cross-encoder.

use ragstone_core::backend::{BackendError, RankedText};
use serde_json::Value;

use super::RagstoneClient;
use super::wire::{RerankBody, RerankDocument, RerankedBody};
use crate::http::{Call, Repeat};

impl RagstoneClient {
    /// Checks that the service has a cross-encoder, and ranks the texts with it. Logs failures.
    pub(super) async fn rerank_texts(
        &self,
        query: &str,
        texts: &[&str],
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError> {
        let ranked = match self.check_reranker().await {
            Ok(()) if texts.is_empty() => return Ok(Vec::new()),
            Ok(()) => self.scores(query, texts, top_k).await,
            Err(error) => Err(error),
        };
        if let Err(error) = &ranked {
            let service = self.client.service();
            tracing::error!(service, %error, documents = texts.len(), "reranking failed");
        }
        ranked
    }

    async fn check_reranker(&self) -> Result<(), BackendError> {
        let report = self.report().await?;
        if report.get("status").and_then(Value::as_str) == Some("unhealthy") {
            let service = self.client.service();
            return Err(BackendError::Unsupported(format!(
                "service '{service}' reports that it is unhealthy"
            )));
        }
        if !report.contains_key("cross_encoder") {
            return Err(BackendError::NoReranker);
        }
        Ok(())
    }

    async fn scores(
        &self,
        query: &str,
        texts: &[&str],
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError> {
        let documents = texts.iter().enumerate().map(|(index, text)| RerankDocument {
            id: index.to_string(),
            text,
        });
        let body = RerankBody {
            query,
            documents: documents.collect(),
            top_k: (top_k < texts.len()).then_some(top_k),
        };
        let call = Call::post("rerank").json(&body).repeat(Repeat::Read);
        let RerankedBody { mut reranked } = self.client.call_json(call).await?;
        let expected = top_k.min(texts.len());
        // A server that does not know `top_k` ranks them all.
        reranked.truncate(expected);
        if reranked.len() != expected {
            let reason = format!("it ranked {} of {expected} documents", reranked.len());
            return Err(self.client.bad_answer(reason).into());
        }
        let mut pending = vec![true; texts.len()];
        reranked
            .iter()
            .map(|entry| {
                let index = entry.id.parse::<usize>().ok();
                match index.and_then(|index| Some((index, pending.get_mut(index)?))) {
                    Some((index, pending)) if *pending && entry.score.is_finite() => {
                        *pending = false;
                        let score = entry.score;
                        Ok(RankedText { index, score })
                    }
                    _ => {
                        let reason = "it ranked a document that was not sent, or one twice";
                        Err(self.client.bad_answer(reason).into())
                    }
                }
            })
            .collect()
    }
}
