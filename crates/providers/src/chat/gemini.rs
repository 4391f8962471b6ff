//! Google Gemini's generateContent API.

use async_trait::async_trait;
use futures::StreamExt;
use ragstone_core::Metadata;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use ragstone_core::collection::shorten;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::answer::{self, AnswerHead, ChatUsage, Said};
use super::sse;
use super::tools::{self, Choice, Format, Tools};
use super::translate::{self, refuse};
use super::turns::{Arguments, ChatTurn, Image, Part, Speaker, turns};
use crate::http::ServiceClient;
use crate::model_name::in_google_path;

/// Options of the OpenAI API that have another name here.
const RENAMED: [(&str, &str); 3] = [
    ("seed", "seed"),
    ("presence_penalty", "presencePenalty"),
    ("frequency_penalty", "frequencyPenalty"),
];

/// Newer models require the thought signature of a call. The API accepts this value from callers who lost
/// it, or have a call of another model.
const NO_SIGNATURE: &str = "skip_thought_signature_validator";

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

    /// The body of the request, and the tool whose arguments are the answer.
    fn body(&self, request: &ChatRequest) -> Result<(Body, Option<String>), ChatError> {
        let provider = self.client.service();
        let sampling = translate::sampling(request.options(), &RENAMED.map(|(from, _)| from), provider)?;
        let turns = turns(request, provider)?;
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
        let GeminiTools {
            tools,
            calling,
            format,
            answer_tool,
        } = GeminiTools::new(tools::tools(request)?, tools::format(request)?)?;
        let mut schema = None;
        if !matches!(format, Format::Text) {
            generation.insert("responseMimeType".into(), "application/json".into());
        }
        if let Format::Schema(given) = format {
            schema = Some(given);
        }
        let mut fields = Metadata::new();
        let model = request.model.as_ref().unwrap_or(&self.model);
        let contents = turns.turns.iter().map(|turn| contents(turn, model, provider));
        let contents = contents.collect::<Result<Vec<_>, _>>()?;
        if !turns.system.is_empty() {
            let parts = json!({"parts": [{"text": turns.system}]});
            fields.insert("systemInstruction".into(), parts);
        }
        if let Some(calling) = calling {
            let config = json!({ "functionCallingConfig": calling });
            fields.insert("toolConfig".into(), config);
        }
        let body = Body {
            fields,
            contents: contents.into_iter().flatten().collect(),
            generation: Generation {
                fields: generation,
                schema,
            },
            tools,
        };
        Ok((body, answer_tool))
    }
}

/// The tools of the request, which of them the model has to call, and the format of its answer.
struct GeminiTools {
    tools: Vec<ToolBox>,
    calling: Option<Value>,
    format: Format,
    answer_tool: Option<String>,
}

impl GeminiTools {
    /// Few models accept tools together with an answer format. With both, a tool that takes the answer
    /// as its arguments replaces the format. If a tool has to be called there is no answer, and if none
    /// may be called no tools are sent.
    fn new(tools: Tools, mut format: Format) -> Result<Self, ChatError> {
        let Tools {
            mut functions,
            choice,
            ..
        } = tools;
        let mut answer_tool = None;
        if !matches!(format, Format::Text) && !functions.is_empty() {
            match choice {
                Choice::Never => functions.clear(),
                Choice::Required | Choice::This(_) => format = Format::Text,
                Choice::Auto => {
                    let name = tools::answer_tool_name(&functions);
                    let schema = match std::mem::replace(&mut format, Format::Text) {
                        Format::Schema(schema) => schema,
                        _ => tools::any_object()?,
                    };
                    functions.push(tools::Function {
                        name: name.clone(),
                        description: Some(tools::ANSWER_TOOL.to_owned()),
                        parameters: Some(schema),
                    });
                    answer_tool = Some(name);
                }
            }
        }
        let calling = match choice {
            _ if functions.is_empty() => None,
            Choice::Auto if answer_tool.is_some() => Some(json!({"mode": "ANY"})),
            Choice::Auto => None,
            Choice::Never => Some(json!({"mode": "NONE"})),
            Choice::Required => Some(json!({"mode": "ANY"})),
            Choice::This(name) => Some(json!({"mode": "ANY", "allowedFunctionNames": [name]})),
        };
        Ok(Self {
            tools: declarations(functions),
            calling,
            format,
            answer_tool,
        })
    }
}

/// The body of the request. Schemas stay as the caller wrote them: the model follows the order of their
/// keys.
#[derive(Serialize)]
struct Body {
    #[serde(flatten)]
    fields: Metadata,
    contents: Vec<GeminiContent>,
    #[serde(rename = "generationConfig")]
    generation: Generation,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tools: Vec<ToolBox>,
}

#[derive(Serialize)]
struct GeminiContent {
    role: &'static str,
    parts: Vec<WirePart>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WirePart {
    Plain(Value),
    #[serde(rename_all = "camelCase")]
    Call {
        function_call: WireCall,
        #[serde(skip_serializing_if = "Option::is_none")]
        thought_signature: Option<String>,
    },
}

#[derive(Serialize)]
struct WireCall {
    name: String,
    args: Arguments,
}

#[derive(Serialize)]
struct Generation {
    #[serde(flatten)]
    fields: Metadata,
    #[serde(rename = "responseJsonSchema", skip_serializing_if = "Option::is_none")]
    schema: Option<Box<RawValue>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ToolBox {
    function_declarations: Vec<Declaration>,
}

#[derive(Serialize)]
struct Declaration {
    name: String,
    /// The API requires one.
    description: String,
    #[serde(rename = "parametersJsonSchema", skip_serializing_if = "Option::is_none")]
    parameters: Option<Box<RawValue>>,
}

fn declarations(functions: Vec<tools::Function>) -> Vec<ToolBox> {
    let declared = functions.into_iter().map(|function| Declaration {
        description: function.description.unwrap_or_else(|| function.name.clone()),
        name: function.name,
        parameters: function.parameters,
    });
    let function_declarations: Vec<_> = declared.collect();
    match function_declarations.is_empty() {
        true => Vec::new(),
        false => vec![ToolBox {
            function_declarations,
        }],
    }
}

/// Whether a model requires thought signatures.
fn wants_signatures(model: &str) -> bool {
    !["gemini-1", "gemini-2"].iter().any(|old| model.contains(old))
}

/// A turn for the API, which separates the results of tools from what the user says.
fn contents(turn: &ChatTurn, model: &str, provider: &str) -> Result<Vec<GeminiContent>, ChatError> {
    let role = match turn.speaker {
        Speaker::User => "user",
        Speaker::Assistant => "model",
    };
    let is_result = |part: &Part| matches!(part, Part::Result { .. });
    turn.parts
        .chunk_by(|a, b| is_result(a) == is_result(b))
        .map(|parts| {
            let mut calls = 0;
            let parts = parts.iter().map(|part| match part {
                Part::Text(text) => Ok(WirePart::Plain(json!({"text": text}))),
                Part::Image(Image::Inline { media_type, base64 }) => Ok(WirePart::Plain(
                    json!({"inlineData": {"mimeType": media_type, "data": base64}}),
                )),
                Part::Image(Image::Link(_)) => Err(refuse(format!(
                    "'image_url' must be a data URL for provider '{provider}', which fetches no addresses"
                ))),
                Part::Call(call) => {
                    // Of several calls at once the first one carries it.
                    let none = (calls == 0 && wants_signatures(model)).then_some(NO_SIGNATURE);
                    calls += 1;
                    Ok(WirePart::Call {
                        function_call: WireCall {
                            name: call.name.clone(),
                            args: call.arguments.clone(),
                        },
                        thought_signature: call.signature.as_deref().or(none).map(str::to_owned),
                    })
                }
                Part::Result { name, text, .. } => Ok(WirePart::Plain(
                    json!({"functionResponse": {"name": name, "response": response(text)}}),
                )),
            });
            let parts = parts.collect::<Result<_, _>>()?;
            Ok(GeminiContent { role, parts })
        })
        .collect()
}

/// The API accepts objects only, and reads numbers as floating-point: other text stays text.
fn response(text: &str) -> Value {
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) if is_exact(&object) => object,
        Ok(value @ (Value::Array(_) | Value::Number(_))) if is_exact(&value) => json!({ "result": value }),
        _ => json!({ "result": text }),
    }
}

/// Whether all integers are exact as floating-point numbers.
fn is_exact(value: &Value) -> bool {
    const LARGEST: u64 = 1 << 53;
    match value {
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number <= LARGEST,
            (None, Some(number)) => number.unsigned_abs() <= LARGEST,
            (None, None) => number
                .as_f64()
                .is_some_and(|number| number.abs() <= LARGEST as f64),
        },
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

/// An answer, or one piece of a streamed one, as far as it is read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GeminiResponse {
    response_id: Option<String>,
    candidates: Option<Vec<Candidate>>,
    prompt_feedback: Option<Value>,
    usage_metadata: Option<Value>,
    error: Option<Value>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Candidate {
    content: Option<AnswerContent>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct AnswerContent {
    parts: Option<Vec<AnswerPart>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AnswerPart {
    text: Option<String>,
    thought: Option<bool>,
    thought_signature: Option<String>,
    function_call: Option<FunctionCall>,
}

#[derive(Deserialize)]
struct FunctionCall {
    #[serde(default)]
    name: String,
    /// As the model wrote them.
    args: Option<Box<RawValue>>,
}

/// The content of one answer, or of one piece of a streamed one.
struct Piece {
    said: Said,
    finish_reason: Option<&'static str>,
    usage: Option<ChatUsage>,
}

fn read(answer: GeminiResponse, client: &ServiceClient) -> Result<Piece, ChatError> {
    if let Some(message) = answer.error.as_ref().and_then(sse::error_message) {
        return Err(client.bad_answer(message).into());
    }
    let feedback = answer.prompt_feedback.as_ref();
    let blocked = feedback.is_some_and(|feedback| feedback.get("blockReason").is_some());
    let mut said = Said::default();
    let candidate = answer.candidates.unwrap_or_default().into_iter().next();
    let candidate = candidate.unwrap_or_default();
    let parts = candidate.content.and_then(|content| content.parts);
    for part in parts.into_iter().flatten() {
        if let Some(call) = part.function_call.filter(|call| !call.name.is_empty()) {
            said.calls.push(answer::ToolCall {
                id: String::new(),
                name: call.name,
                arguments: call
                    .args
                    .map_or_else(|| "{}".to_owned(), |args| args.get().to_owned()),
                signature: part.thought_signature,
            });
        } else if part.thought != Some(true) {
            said.text.push_str(part.text.as_deref().unwrap_or_default());
        }
    }
    let finish_reason = match candidate.finish_reason.as_deref() {
        _ if blocked => Some("content_filter"),
        None | Some("FINISH_REASON_UNSPECIFIED") => None,
        Some("STOP") => Some("stop"),
        Some("MAX_TOKENS") => Some("length"),
        Some(reason @ ("MALFORMED_FUNCTION_CALL" | "UNEXPECTED_TOOL_CALL")) => {
            return Err(client
                .bad_answer(format!("its call of a tool is invalid ({reason})"))
                .into());
        }
        Some(_) => Some("content_filter"),
    };
    let usage = answer.usage_metadata.unwrap_or_default();
    let count = |name: &str| usage.get(name).and_then(Value::as_u64);
    let usage = count("promptTokenCount").map(|prompt| ChatUsage {
        prompt,
        completion: count("candidatesTokenCount").unwrap_or(0) + count("thoughtsTokenCount").unwrap_or(0),
    });
    Ok(Piece {
        said,
        finish_reason,
        usage,
    })
}

/// The state of an answer while it is read. The API gives calls no ids and no finish reason of their own.
struct AnswerState {
    head: AnswerHead,
    answer_tool: Option<String>,
    /// The request allows only one call.
    one_call: bool,
    calls: usize,
    answered: bool,
    /// Text that is the answer only if the answer tool is not called.
    held_back: String,
}

impl AnswerState {
    fn new(head: AnswerHead, answer_tool: Option<String>, request: &ChatRequest) -> Self {
        Self {
            head,
            answer_tool,
            one_call: request.options().get("parallel_tool_calls") == Some(&Value::Bool(false)),
            calls: 0,
            answered: false,
            held_back: String::new(),
        }
    }

    /// Adds a piece; returns its text and its calls, with ids.
    fn take(&mut self, piece: Said) -> Said {
        let mut said = Said::default();
        if self.answer_tool.is_some() {
            self.held_back.push_str(&piece.text);
        } else {
            said.text = piece.text;
        }
        for mut call in piece.calls {
            if self.answer_tool.as_ref() == Some(&call.name) {
                if !self.answered {
                    said.text.push_str(&call.arguments);
                }
                self.answered = true;
            } else if self.calls == 0 || !self.one_call {
                call.id = format!("call-{}-{}", self.head.id, self.calls);
                self.calls += 1;
                said.calls.push(call);
            }
        }
        said
    }

    /// The rest of the text, and the finish reason.
    fn end(&mut self, reason: &'static str) -> (String, &'static str) {
        let rest = match self.answered {
            true => String::new(),
            false => std::mem::take(&mut self.held_back),
        };
        match reason {
            "stop" if self.calls > 0 => (rest, "tool_calls"),
            _ => (rest, reason),
        }
    }
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
        let (body, answer_tool) = self.body(&request)?;
        let call = super::paid(self.path(&request, "generateContent")?).json(&body);
        let answer: GeminiResponse = self.client.call_json(call).await?;
        let id = answer.response_id.clone().unwrap_or_default();
        let piece = read(answer, &self.client)?;
        let reason = piece
            .finish_reason
            .ok_or_else(|| self.client.bad_answer("it has no finished candidate"))?;
        let model = request.model.as_deref().unwrap_or(&self.model);
        let mut state = AnswerState::new(AnswerHead::new(&id, model), answer_tool, &request);
        let mut said = state.take(piece.said);
        let (rest, reason) = state.end(reason);
        said.text.push_str(&rest);
        Ok(state
            .head
            .completion(&said, reason, piece.usage.unwrap_or_default()))
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let (body, answer_tool) = self.body(&request)?;
        let call = super::paid(self.path(&request, "streamGenerateContent")?)
            .query("alt", "sse")
            .json(&body);
        let bytes = self.client.open(call).await?;
        let client = self.client.clone();
        let head = AnswerHead::new("", request.model.as_deref().unwrap_or(&self.model));
        let wants_usage = translate::wants_usage(request.options());
        let mut state = AnswerState::new(head.clone(), answer_tool, &request);
        let mut usage = ChatUsage::default();
        // Some models state a reason in every piece: only the last one counts, at the end.
        let mut reason = None;
        let first = head.first_chunk();
        let events = sse::events(bytes, self.client.clone())
            .map(Some)
            .chain(futures::stream::once(async { None }));
        let chunks = events.flat_map(move |event| {
            let mut chunks: Vec<Result<Value, ChatError>> = Vec::new();
            match event {
                Some(event) => match event
                    .and_then(|event| sse::json(&client, &event))
                    .and_then(|answer| read(answer, &client))
                {
                    Ok(piece) => {
                        usage = piece.usage.unwrap_or(usage);
                        let already = state.calls;
                        let said = state.take(piece.said);
                        reason = piece.finish_reason.or(reason);
                        if !said.text.is_empty() {
                            chunks.push(Ok(head.text_chunk(&said.text)));
                        }
                        for (number, call) in said.calls.iter().enumerate() {
                            chunks.push(Ok(head.call_chunk(already + number, call)));
                        }
                    }
                    Err(error) => chunks.push(Err(error)),
                },
                None => match reason {
                    Some(reason) => {
                        let (rest, reason) = state.end(reason);
                        if !rest.is_empty() {
                            chunks.push(Ok(head.text_chunk(&rest)));
                        }
                        chunks.push(Ok(head.last_chunk(reason)));
                        chunks.extend(wants_usage.then(|| Ok(head.usage_chunk(usage))));
                    }
                    None => chunks.push(Err(client
                        .bad_answer("the stream ended before the answer did")
                        .into())),
                },
            }
            futures::stream::iter(chunks)
        });
        Ok(sse::until_error(
            futures::stream::once(async { Ok(first) }).chain(chunks),
        ))
    }
}
