"""The official OpenAI client against /v1/embeddings. Arguments: base URL, API key."""

import sys

import openai

base_url, key = sys.argv[1:3]
client = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0)


def cosine(a, b):
    dot = lambda x, y: sum(p * q for p, q in zip(x, y))
    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


# The client asks for base64 unless told otherwise, and decodes it itself.
answer = client.embeddings.create(model="tiny", input=["fox", "dog"])
assert answer.model == "tiny", answer
assert [item.index for item in answer.data] == [0, 1]
assert all(len(item.embedding) == 32 for item in answer.data)
assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0
default = answer.data[0].embedding

plain = client.embeddings.create(model="tiny", input="fox", encoding_format="float").data[0].embedding
assert cosine(default, plain) > 0.999999

short = client.embeddings.create(model="tiny", input="fox", dimensions=4).data[0].embedding
assert len(short) == 4 and cosine(short, plain[:4]) > 0.999999

tokens = client.embeddings.create(model="tiny", input=[[5, 6], [7]])
assert len(tokens.data) == 2
single = client.embeddings.create(model="tiny", input=[5, 6])
assert cosine(single.data[0].embedding, tokens.data[0].embedding) > 0.999999

many = client.embeddings.create(model="tiny", input=[f"text {n}" for n in range(100)])
assert len(many.data) == 100

assert [model.id for model in client.models.list()] == ["tiny"]

for error, says, call in [
    (openai.NotFoundError, "not loaded", lambda: client.embeddings.create(model="no-such-model", input="x")),
    (openai.BadRequestError, "'dimensions'", lambda: client.embeddings.create(model="tiny", input="x", dimensions=1000)),
    (
        openai.AuthenticationError,
        "API key",
        lambda: client.with_options(api_key="wrong").embeddings.create(model="tiny", input="x"),
    ),
]:
    try:
        call()
    except error as raised:
        assert says in raised.message and says in raised.body["message"], raised
    else:
        raise AssertionError(f"{error.__name__} was not raised")

print("done")
