//! Anthropic's Messages API.

mod stream;

use std::collections::{BTreeSet, HashMap};

use async_trait::async_trait;
use ragstone_core::Metadata;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::Delivery;
use super::answer::{self, AnswerHead, ChatUsage, Said};
use super::tools::{self, Choice, Format, Tools};
use super::translate::{self, refuse};
use super::turns::{Arguments, ChatTurn, Image, Part, Speaker, Turns, turns};
use crate::http::{Call, ServiceClient};

const API_VERSION: &str = "2023-06-01";
/// The API requires a limit; this is the default.
const DEFAULT_MAX_TOKENS: u64 = 4096;
/// The image types that the API accepts.
const IMAGES: [&str; 4] = ["image/jpeg", "image/png", "image/gif", "image/webp"];

#[derive(Debug)]
pub(super) struct AnthropicChat {
    pub(super) client: ServiceClient,
    pub(super) model: String,
}

/// The body of the request. Schemas stay as the caller wrote them: the model follows the order of their
/// keys.
#[derive(Serialize)]
struct Body {
    #[serde(flatten)]
    fields: Metadata,
    messages: Vec<WireMessage>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<AnthropicTool>,
}

#[derive(Serialize)]
struct WireMessage {
    role: &'static str,
    content: AnthropicContent,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AnthropicContent {
    Text(String),
    Blocks(Vec<WireBlock>),
}

#[derive(Serialize)]
#[serde(untagged)]
enum WireBlock {
    Plain(Value),
    Call {
        #[serde(rename = "type")]
        kind: &'static str,
        id: String,
        name: String,
        input: Arguments,
    },
}

#[derive(Serialize)]
struct AnthropicTool {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    input_schema: Box<RawValue>,
}

/// A request in the format of this API.
struct Translated {
    call: Call,
    /// The tool whose arguments are the answer.
    answer_tool: Option<String>,
}

impl AnthropicChat {
    fn translate(&self, request: &ChatRequest, delivery: Delivery) -> Result<Translated, ChatError> {
        let provider = self.client.service();
        let sampling = translate::sampling(request.options(), &[], provider)?;
        if sampling.temperature.is_some_and(|t| t > 1.0) {
            return Err(refuse(format!(
                "'temperature' must be at most 1 for provider '{provider}'"
            )));
        }
        let turns = turns(request, provider)?;
        let mut fields = Metadata::new();
        let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        set(
            "model",
            request.model.as_ref().unwrap_or(&self.model).as_str().into(),
        );
        let ids = wire_ids(&turns);
        let messages = turns.turns.iter().map(|turn| message(turn, &ids, provider));
        let messages = messages.collect::<Result<Vec<_>, _>>()?;
        let offered = AnthropicTools::new(tools::tools(request)?, tools::format(request)?, &turns)?;
        set(
            "max_tokens",
            sampling.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS).into(),
        );
        set("stream", (delivery == Delivery::Streamed).into());
        if !turns.system.is_empty() {
            set("system", turns.system.into());
        }
        if let Some(temperature) = sampling.temperature {
            set("temperature", temperature.into());
        }
        if let Some(top_p) = sampling.top_p {
            set("top_p", top_p.into());
        }
        if !sampling.stop.is_empty() {
            set("stop_sequences", sampling.stop.into());
        }
        if let Some(choice) = offered.choice {
            set("tool_choice", choice);
        }
        let body = Body {
            fields,
            messages,
            tools: offered.tools,
        };
        Ok(Translated {
            call: super::paid("messages")
                .header("anthropic-version", API_VERSION)
                .json(&body),
            answer_tool: offered.answer_tool,
        })
    }
}

/// The tools of the request, and which of them the model has to call.
struct AnthropicTools {
    tools: Vec<AnthropicTool>,
    choice: Option<Value>,
    answer_tool: Option<String>,
}

impl AnthropicTools {
    /// Not all models have a JSON mode. A tool that takes the answer as its arguments replaces it, unless
    /// the caller requires a call of another tool.
    fn new(tools: Tools, format: Format, turns: &Turns) -> Result<Self, ChatError> {
        let answer_schema = match format {
            Format::Text => None,
            _ if matches!(tools.choice, Choice::Required | Choice::This(_)) => None,
            Format::Json => Some(tools::any_object()?),
            Format::Schema(schema) => Some(schema),
        };
        let answer_tool = answer_schema
            .as_ref()
            .map(|_| tools::answer_tool_name(&tools.functions));
        let mut offered = Vec::with_capacity(tools.functions.len() + 1);
        for function in tools.functions {
            offered.push(AnthropicTool {
                name: function.name,
                description: function.description,
                input_schema: function.parameters.map_or_else(tools::any_object, Ok)?,
            });
        }
        let mut choice = match (&answer_tool, tools.choice) {
            (None, _) if offered.is_empty() => None,
            (None, Choice::Auto) if tools.parallel => None,
            (None, Choice::Auto) => Some(json!({"type": "auto"})),
            (None, Choice::Never) => Some(json!({"type": "none"})),
            (None, Choice::Required) => Some(json!({"type": "any"})),
            (None, Choice::This(name)) => Some(json!({"type": "tool", "name": name})),
            (Some(_), Choice::Auto) if !offered.is_empty() => Some(json!({"type": "any"})),
            (Some(name), _) => Some(json!({"type": "tool", "name": name, "disable_parallel_tool_use": true})),
        };
        if let Some(choice) = choice.as_mut().filter(|choice| choice["type"] != "none")
            && !tools.parallel
        {
            choice["disable_parallel_tool_use"] = true.into();
        }
        if let (Some(name), Some(input_schema)) = (&answer_tool, answer_schema) {
            offered.push(AnthropicTool {
                name: name.clone(),
                description: Some(tools::ANSWER_TOOL.to_owned()),
                input_schema,
            });
        }
        if offered.is_empty() {
            // The API requires the tools of earlier calls, even if none may be called now.
            let called: BTreeSet<&str> = turns.calls().map(|call| call.name.as_str()).collect();
            for name in called {
                offered.push(AnthropicTool {
                    name: name.to_owned(),
                    description: None,
                    input_schema: tools::any_object()?,
                });
            }
            choice = (!offered.is_empty()).then(|| json!({"type": "none"}));
        }
        Ok(Self {
            tools: offered,
            choice,
            answer_tool,
        })
    }
}

/// The id of each call, by its number. Ids that the API refuses, or that occur twice, are replaced.
fn wire_ids(turns: &Turns) -> Vec<String> {
    let mut seen = HashMap::new();
    for call in turns.calls() {
        *seen.entry(call.id.as_str()).or_insert(0) += 1;
    }
    let is_plain = |id: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        !id.is_empty() && id.bytes().all(plain)
    };
    turns
        .calls()
        .map(|call| match seen.get(call.id.as_str()) {
            Some(1) if is_plain(&call.id) => call.id.clone(),
            _ => format!("ragstone_{}", call.number),
        })
        .collect()
}

fn message(turn: &ChatTurn, ids: &[String], provider: &str) -> Result<WireMessage, ChatError> {
    let role = match turn.speaker {
        Speaker::User => "user",
        Speaker::Assistant => "assistant",
    };
    let content = if let [Part::Text(text)] = turn.parts.as_slice() {
        AnthropicContent::Text(text.clone())
    } else {
        let blocks = turn.parts.iter().map(|part| block(part, ids, provider));
        AnthropicContent::Blocks(blocks.collect::<Result<_, _>>()?)
    };
    Ok(WireMessage { role, content })
}

fn block(part: &Part, ids: &[String], provider: &str) -> Result<WireBlock, ChatError> {
    let id = |number: usize| ids.get(number).cloned().unwrap_or_default();
    let plain = match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Image(Image::Inline { media_type, base64 }) if IMAGES.contains(&media_type.as_str()) => {
            json!({"type": "image", "source": {"type": "base64", "media_type": media_type, "data": base64}})
        }
        Part::Image(Image::Link(url)) if url.starts_with("https://") => {
            json!({"type": "image", "source": {"type": "url", "url": url}})
        }
        Part::Image(_) => {
            return Err(refuse(format!(
                "'image_url' must be an https address, or a JPEG, PNG, GIF or WebP as a data URL, for provider '{provider}'"
            )));
        }
        Part::Call(call) => {
            return Ok(WireBlock::Call {
                kind: "tool_use",
                id: id(call.number),
                name: call.name.clone(),
                input: call.arguments.clone(),
            });
        }
        Part::Result { number, text, .. } => {
            json!({"type": "tool_result", "tool_use_id": id(*number), "content": text})
        }
    };
    Ok(WireBlock::Plain(plain))
}

fn finish_reason(stop_reason: Option<&str>, calls: usize) -> &'static str {
    match stop_reason {
        Some("max_tokens" | "model_context_window_exceeded") => "length",
        Some("refusal") => "content_filter",
        Some("tool_use") if calls > 0 => "tool_calls",
        _ => "stop",
    }
}

fn text(value: &Value, path: &str) -> String {
    value
        .pointer(path)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

fn count(value: &Value, path: &str) -> Option<u64> {
    value.pointer(path).and_then(Value::as_u64)
}

/// The fields of an answer that are used.
#[derive(Deserialize)]
struct AnthropicResponse {
    #[serde(default)]
    id: String,
    #[serde(default)]
    model: String,
    content: Option<Vec<AnthropicBlock>>,
    #[serde(default)]
    stop_reason: Option<String>,
    #[serde(default)]
    usage: Value,
}

#[derive(Deserialize)]
struct AnthropicBlock {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    id: String,
    #[serde(default)]
    name: String,
    /// As the model wrote it.
    #[serde(default)]
    input: Option<Box<RawValue>>,
}

/// The text and the calls of an answer. The arguments of the answer tool replace any text.
fn said(blocks: Vec<AnthropicBlock>, answer_tool: Option<&str>) -> Said {
    let mut said = Said::default();
    let mut answer = None;
    for block in blocks {
        if block.kind != "tool_use" {
            said.text.push_str(block.text.as_deref().unwrap_or_default());
            continue;
        }
        let arguments = block
            .input
            .map_or_else(|| "{}".to_owned(), |input| input.get().to_owned());
        if answer_tool == Some(block.name.as_str()) {
            answer.get_or_insert(arguments);
        } else {
            said.calls.push(answer::ToolCall {
                id: block.id,
                name: block.name,
                arguments,
                signature: None,
            });
        }
    }
    said.text = answer.unwrap_or(said.text);
    said
}

#[async_trait]
impl ChatModel for AnthropicChat {
    fn provider(&self) -> &str {
        self.client.service()
    }

    fn model(&self) -> &str {
        &self.model
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        let Translated { call, answer_tool } = self.translate(&request, Delivery::Whole)?;
        let answer: AnthropicResponse = self.client.call_json(call).await?;
        let blocks = answer
            .content
            .ok_or_else(|| self.client.bad_answer("it has no 'content'"))?;
        let said = said(blocks, answer_tool.as_deref());
        let usage = ChatUsage {
            prompt: count(&answer.usage, "/input_tokens").unwrap_or(0),
            completion: count(&answer.usage, "/output_tokens").unwrap_or(0),
        };
        let head = AnswerHead::new(&answer.id, &answer.model);
        let reason = finish_reason(answer.stop_reason.as_deref(), said.calls.len());
        Ok(head.completion(&said, reason, usage))
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let Translated { call, answer_tool } = self.translate(&request, Delivery::Streamed)?;
        let bytes = self.client.open(call).await?;
        let model = request.model.as_deref().unwrap_or(&self.model);
        let wants_usage = translate::wants_usage(request.options());
        Ok(stream::chunks(
            bytes,
            stream::StreamProgress::new(self.client.clone(), model, answer_tool, wants_usage),
        ))
    }
}
