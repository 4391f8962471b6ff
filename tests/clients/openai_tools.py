"""The official OpenAI client calling tools and asking for structured answers. Arguments: base URL."""

import json
import sys

import openai
import pydantic

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
tools = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


class Sum(pydantic.BaseModel):
    sum: int


def converse(create):
    """Calls tools until the model has its answer, as agents do."""
    messages = [{"role": "user", "content": "What is 17 and 25?"}]
    for _ in range(3):
        message, reason = create(messages)
        messages.append(message)
        if reason != "tool_calls":
            return message["content"]
        for call in message["tool_calls"]:
            numbers = json.loads(call["function"]["arguments"])
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError("no answer")


def whole(messages):
    choice = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0]
    return choice.message.model_dump(exclude_none=True), choice.finish_reason


def streamed(messages):
    with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
        choice = stream.get_final_completion().choices[0]
    message = choice.message.model_dump(exclude_none=True)
    message.pop("parsed", None)
    for call in message.get("tool_calls", []):
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)
    return message, choice.finish_reason


for create in (whole, streamed):
    answer = converse(create)
    assert answer == "It is 42.", (create.__name__, answer)

parsed = client.chat.completions.parse(
    model="m", messages=[{"role": "user", "content": "What is 17 and 25, in JSON?"}], response_format=Sum
)
assert parsed.choices[0].message.parsed == Sum(sum=42), parsed
print("done")
