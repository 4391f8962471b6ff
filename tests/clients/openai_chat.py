"""The official OpenAI client against /v1/chat/completions. Arguments: base URL, API key."""

import asyncio
import sys

import openai

base_url, key = sys.argv[1:3]
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When is tea?"}]

client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
answer = client.chat.completions.create(model="stub-chat", messages=messages, temperature=0.5)
assert answer.choices[0].message.content == "Tea is at four.", answer
assert answer.choices[0].finish_reason == "stop" and answer.usage.total_tokens == 14, answer

chunks = list(client.chat.completions.create(model="stub-chat", messages=messages, stream=True))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
assert text == "Tea is at four." and chunks[-1].choices[0].finish_reason == "stop", chunks

raw = client.chat.completions.with_raw_response.create(model="stub-chat", messages=messages)
assert raw.parse().choices[0].message.role == "assistant"

try:
    client.chat.completions.create(model="stub-chat", messages=[])
except openai.BadRequestError as error:
    assert "messages" in error.response.text, error.response.text
else:
    raise AssertionError("a chat without messages was accepted")

try:
    openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0).chat.completions.create(
        model="stub-chat", messages=messages
    )
except openai.AuthenticationError:
    pass
else:
    raise AssertionError("a wrong key was accepted")


async def streamed():
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="stub-chat", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


assert asyncio.run(streamed()) == "Tea is at four."
print("done")
