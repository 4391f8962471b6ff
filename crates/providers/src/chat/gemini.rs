//! The generateContent API of Google's Gemini.

use async_trait::async_trait;
use futures::StreamExt;
use ragstone_core::Metadata;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use ragstone_core::collection::shorten;
use serde_json::{Value, json};

use super::sse;
use super::translate::{self, AnswerHead, Speaker, Usage, refuse};
use crate::http::{Call, ServiceClient};
use crate::model_name::in_google_path;

/// Options of the OpenAI API that this one has under another name.
const RENAMED: [(&str, &str); 3] = [
    ("seed", "seed"),
    ("presence_penalty", "presencePenalty"),
    ("frequency_penalty", "frequencyPenalty"),
];

#[derive(Debug)]
pub(super) struct GeminiChat {
    pub(super) client: ServiceClient,
    pub(super) model: String,
}

impl GeminiChat {
    fn path(&self, request: &ChatRequest, method: &str) -> Result<String, ChatError> {
        let model = request.model.as_ref().unwrap_or(&self.model);
        let path = in_google_path(model)
            .map_err(|expected| refuse(format!("'model' is '{}': {expected}", shorten(model))))?;
        Ok(format!("{path}:{method}"))
    }

    fn body(&self, request: &ChatRequest) -> Result<Value, ChatError> {
        let provider = self.client.service();
        let sampling = translate::sampling(request.options(), &RENAMED.map(|(from, _)| from), provider)?;
        let turns = translate::turns(request, provider)?;
        let contents: Vec<Value> = turns
            .turns
            .iter()
            .map(|(speaker, text)| {
                let role = match speaker {
                    Speaker::User => "user",
                    Speaker::Assistant => "model",
                };
                json!({"role": role, "parts": [{"text": text}]})
            })
            .collect();
        let mut generation = Metadata::new();
        if let Some(tokens) = sampling.max_tokens {
            generation.insert("maxOutputTokens".into(), tokens.into());
        }
        if let Some(temperature) = sampling.temperature {
            generation.insert("temperature".into(), temperature.into());
        }
        if let Some(top_p) = sampling.top_p {
            generation.insert("topP".into(), top_p.into());
        }
        if !sampling.stop.is_empty() {
            generation.insert("stopSequences".into(), sampling.stop.into());
        }
        for (from, to) in RENAMED {
            if let Some(value) = sampling.others.get(from) {
                generation.insert(to.into(), value.clone());
            }
        }
        let mut body = json!({"contents": contents, "generationConfig": generation});
        if !turns.system.is_empty() {
            body["systemInstruction"] = json!({"parts": [{"text": turns.system}]});
        }
        Ok(body)
    }
}

/// What one answer, or one piece of a streamed one, says.
struct Piece {
    text: String,
    finish_reason: Option<&'static str>,
    usage: Option<Usage>,
}

fn read(answer: &Value, client: &ServiceClient) -> Result<Piece, ChatError> {
    if let Some(message) = sse::error_in(answer) {
        return Err(client.bad_answer(message).into());
    }
    let blocked = answer.pointer("/promptFeedback/blockReason").is_some();
    let text = answer
        .pointer("/candidates/0/content/parts")
        .and_then(Value::as_array)
        .map(|parts| {
            parts
                .iter()
                .filter(|part| part.get("thought").is_none_or(|thought| *thought == false))
                .filter_map(|part| part.get("text").and_then(Value::as_str))
                .collect()
        })
        .unwrap_or_default();
    let finish_reason = match answer
        .pointer("/candidates/0/finishReason")
        .and_then(Value::as_str)
    {
        _ if blocked => Some("content_filter"),
        None | Some("FINISH_REASON_UNSPECIFIED") => None,
        Some("STOP") => Some("stop"),
        Some("MAX_TOKENS") => Some("length"),
        Some(_) => Some("content_filter"),
    };
    let count = |name: &str| {
        answer
            .pointer(&format!("/usageMetadata/{name}"))
            .and_then(Value::as_u64)
    };
    let usage = count("promptTokenCount").map(|prompt| Usage {
        prompt,
        completion: count("candidatesTokenCount").unwrap_or(0) + count("thoughtsTokenCount").unwrap_or(0),
    });
    Ok(Piece {
        text,
        finish_reason,
        usage,
    })
}

#[async_trait]
impl ChatModel for GeminiChat {
    fn provider(&self) -> &str {
        self.client.service()
    }

    fn model(&self) -> &str {
        &self.model
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        let call = Call::post(self.path(&request, "generateContent")?).json(&self.body(&request)?);
        let answer: Value = self.client.call_json(call).await?;
        let piece = read(&answer, &self.client)?;
        let reason = piece
            .finish_reason
            .ok_or_else(|| self.client.bad_answer("it has no finished candidate"))?;
        let model = request.model.as_deref().unwrap_or(&self.model);
        let id = answer
            .get("responseId")
            .and_then(Value::as_str)
            .unwrap_or_default();
        Ok(AnswerHead::new(id, model).completion(&piece.text, reason, piece.usage.unwrap_or_default()))
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let call = Call::post(self.path(&request, "streamGenerateContent")?)
            .query("alt", "sse")
            .json(&self.body(&request)?);
        let bytes = self.client.open(call).await?;
        let client = self.client.clone();
        let head = AnswerHead::new("", request.model.as_deref().unwrap_or(&self.model));
        let wants_usage = translate::wants_usage(request.options());
        let (mut usage, mut finished) = (Usage::default(), false);
        let first = head.first_chunk();
        let events = sse::events(bytes, self.client.clone())
            .map(Some)
            .chain(futures::stream::once(async { None }));
        let chunks = events.flat_map(move |event| {
            let mut chunks: Vec<Result<Value, ChatError>> = Vec::new();
            match event {
                Some(event) => match event
                    .and_then(|event| sse::json(&client, &event))
                    .and_then(|data| read(&data, &client))
                {
                    Ok(piece) => {
                        usage = piece.usage.unwrap_or(usage);
                        if !piece.text.is_empty() {
                            chunks.push(Ok(head.text_chunk(&piece.text)));
                        }
                        if let Some(reason) = piece.finish_reason {
                            finished = true;
                            chunks.push(Ok(head.last_chunk(reason)));
                        }
                    }
                    Err(error) => chunks.push(Err(error)),
                },
                None if !finished => chunks.push(Err(client
                    .bad_answer("the stream ended before the answer did")
                    .into())),
                None if wants_usage => chunks.push(Ok(head.usage_chunk(usage))),
                None => {}
            }
            futures::stream::iter(chunks)
        });
        Ok(sse::until_error(
            futures::stream::once(async { Ok(first) }).chain(chunks),
        ))
    }
}
