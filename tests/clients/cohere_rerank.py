"""The official Cohere client, versions 1 and 2, against /v1/rerank and /v2/rerank. Arguments: base URL, API key."""

import sys

import cohere
from cohere.core.api_error import ApiError

base_url, key = sys.argv[1:3]
texts = ["The quick brown fox jumps over the lazy dog.", "Numbers such as 3.14159 occur in texts.", "vectors"]
orders = []

for client in [cohere.Client(api_key=key, base_url=base_url), cohere.ClientV2(api_key=key, base_url=base_url)]:
    answer = client.rerank(model="any-name", query="which animal jumps?", documents=texts)
    assert len(answer.results) == 3, answer
    scores = [result.relevance_score for result in answer.results]
    assert scores == sorted(scores, reverse=True), scores
    assert sorted(result.index for result in answer.results) == [0, 1, 2]
    orders.append([(result.index, result.relevance_score) for result in answer.results])

    assert answer.meta.tokens.input_tokens > 30, answer.meta

    top = client.rerank(model="any-name", query="which animal jumps?", documents=texts, top_n=1)
    assert [result.index for result in top.results] == [orders[-1][0][0]]

    try:
        client.rerank(model="any-name", query="", documents=texts)
    except ApiError as error:
        assert error.status_code == 400 and "'query'" in error.body["detail"], error
        if isinstance(client, cohere.ClientV2):
            assert error.body["message"] == error.body["detail"], error
    else:
        raise AssertionError("an empty query was accepted")

assert orders[0] == orders[1], orders
print("done")
