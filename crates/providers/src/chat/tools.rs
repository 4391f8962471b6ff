//! The tools that the model may call, and the format of its answer.

use std::collections::HashSet;

use ragstone_core::chat::{ChatError, ChatRequest};
use ragstone_core::collection::shorten;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::translate::{refuse, wrong};

#[derive(Debug)]
pub(super) struct Tools {
    pub(super) functions: Vec<Function>,
    pub(super) choice: Choice,
    /// Whether one answer may have several calls.
    pub(super) parallel: bool,
}

#[derive(Debug, Deserialize)]
pub(super) struct Function {
    pub(super) name: String,
    #[serde(default)]
    pub(super) description: Option<String>,
    /// The JSON Schema of its arguments, unchanged.
    #[serde(default)]
    pub(super) parameters: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    kind: String,
    function: Function,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    Auto,
    Never,
    /// Any one of them.
    Required,
    This(String),
}

#[derive(Debug)]
pub(super) enum Format {
    Text,
    /// Any JSON object.
    Json,
    /// JSON that matches this schema, as the caller wrote it.
    Schema(Box<RawValue>),
}

#[derive(Deserialize)]
struct FormatBody {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    json_schema: Option<SchemaBody>,
}

#[derive(Deserialize)]
struct SchemaBody {
    schema: Box<RawValue>,
}

pub(super) fn tools(request: &ChatRequest) -> Result<Tools, ChatError> {
    let options = request.options();
    let functions: Vec<Function> = match request.option_as_sent("tools") {
        None => Vec::new(),
        Some(text) => serde_json::from_str::<Vec<Box<RawValue>>>(text.get())
            .map_err(|_| wrong("tools", "a list"))?
            .iter()
            .enumerate()
            .map(|(index, tool)| function(index, tool))
            .collect::<Result<_, _>>()?,
    };
    let mut names = HashSet::new();
    if let Some(twice) = functions.iter().find(|function| !names.insert(&function.name)) {
        return Err(refuse(format!(
            "'tools' has the function '{}' more than once",
            shorten(&twice.name)
        )));
    }
    let choice = choice(options.get("tool_choice").unwrap_or(&Value::Null))?;
    match &choice {
        Choice::Required if functions.is_empty() => {
            Err(refuse("'tool_choice' is 'required' without 'tools'"))
        }
        Choice::This(name) if !names.contains(name) => Err(refuse(format!(
            "'tool_choice' names the function '{}', which is not in 'tools'",
            shorten(name)
        ))),
        _ => Ok(()),
    }?;
    Ok(Tools {
        functions,
        choice,
        parallel: options.get("parallel_tool_calls") != Some(&Value::Bool(false)),
    })
}

fn function(index: usize, tool: &RawValue) -> Result<Function, ChatError> {
    let is_object =
        |schema: &Option<Box<RawValue>>| schema.as_ref().is_none_or(|text| text.get().starts_with('{'));
    serde_json::from_str::<Tool>(tool.get())
        .ok()
        .filter(|tool| tool.kind == "function" && is_object(&tool.function.parameters))
        .map(|tool| tool.function)
        .ok_or_else(|| {
            refuse(format!(
                "'tools' at index {index} must be of the type 'function', with a 'name' and, optionally, 'parameters' as a JSON Schema"
            ))
        })
}

/// The description of the tool whose arguments are the answer.
pub(super) const ANSWER_TOOL: &str = "Takes the final answer, in full. Nothing else is shown to the user.";
const ANY_OBJECT: &str = r#"{"type": "object"}"#;

/// A name for it that no function of the caller uses.
pub(super) fn answer_tool_name(functions: &[Function]) -> String {
    let mut name = "answer".to_owned();
    while functions.iter().any(|function| function.name == name) {
        name.push('_');
    }
    name
}

pub(super) fn any_object() -> Result<Box<RawValue>, ChatError> {
    RawValue::from_string(ANY_OBJECT.to_owned()).map_err(|error| refuse(error.to_string()))
}

fn choice(given: &Value) -> Result<Choice, ChatError> {
    match given {
        Value::Null => Ok(Choice::Auto),
        Value::String(word) if word == "auto" => Ok(Choice::Auto),
        Value::String(word) if word == "none" => Ok(Choice::Never),
        Value::String(word) if word == "required" => Ok(Choice::Required),
        _ => match given.pointer("/function/name").and_then(Value::as_str) {
            Some(name) => Ok(Choice::This(name.to_owned())),
            None => Err(wrong(
                "tool_choice",
                "'none', 'auto', 'required' or a function by its name",
            )),
        },
    }
}

pub(super) fn format(request: &ChatRequest) -> Result<Format, ChatError> {
    let Some(text) = request.option_as_sent("response_format") else {
        return Ok(Format::Text);
    };
    let given: Option<FormatBody> = serde_json::from_str(text.get()).ok();
    let schema = |body: FormatBody| body.json_schema.map(|body| body.schema);
    match given {
        Some(body) if body.kind == "text" => Some(Format::Text),
        Some(body) if body.kind == "json_object" => Some(Format::Json),
        Some(body) if body.kind == "json_schema" => schema(body).map(Format::Schema),
        _ => None,
    }
    .ok_or_else(|| {
        wrong(
            "response_format",
            "of the type 'text', 'json_object', or 'json_schema' with a 'schema'",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn request(options: Value) -> ChatRequest {
        let mut body = options.as_object().unwrap().clone();
        body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
        ChatRequest::from_json(body).unwrap()
    }

    #[test]
    fn tools_are_functions() {
        let asked = request(json!({"tools": [
            {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {"type": "object"}, "strict": true}},
            {"type": "function", "function": {"name": "g", "parameters": null}}],
            "tool_choice": {"type": "function", "function": {"name": "g"}}, "parallel_tool_calls": false}));
        let found = tools(&asked).unwrap();
        assert_eq!(found.functions[0].description.as_deref(), Some("does f"));
        assert!(found.functions[1].parameters.is_none());
        assert_eq!((found.choice, found.parallel), (Choice::This("g".into()), false));
    }

    #[test]
    fn what_is_no_tool_or_format_is_refused_by_name() {
        let f = json!({"type": "function", "function": {"name": "f"}});
        for (given, named) in [
            (json!({"tools": [{"type": "function"}]}), "'tools' at index 0"),
            (
                json!({"tools": [f, {"type": "custom", "custom": {"name": "c"}}]}),
                "'tools' at index 1",
            ),
            (
                json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}),
                "'tools'",
            ),
            (json!({"tools": {}}), "'tools'"),
            (json!({"tools": [f, f]}), "more than once"),
            (json!({"tool_choice": "required"}), "'tool_choice'"),
            (json!({"tools": [f], "tool_choice": "sometimes"}), "'tool_choice'"),
            (
                json!({"tools": [f], "tool_choice": {"function": {"name": "g"}}}),
                "'g'",
            ),
        ] {
            let refusal = tools(&request(given)).unwrap_err().to_string();
            assert!(refusal.contains(named), "{refusal}");
        }
        for given in [
            json!({"type": "xml"}),
            json!("json_object"),
            json!({"type": "json_schema"}),
        ] {
            let refusal = format(&request(json!({"response_format": given}))).unwrap_err();
            assert!(refusal.to_string().contains("'response_format'"), "{refusal}");
        }
        for text in [json!(null), json!({"type": "text"})] {
            let format = format(&request(json!({"response_format": text})));
            assert!(matches!(format, Ok(Format::Text)));
        }
    }
}
