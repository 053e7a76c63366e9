"""Reranking: a query and documents in, scores out, through the path of an inference request."""

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import BertProcessing, RobertaProcessing, TemplateProcessing

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from tests.support.server.server_http import Answer, ask
from tests.support.server.transport_fakes import FakeModel, Ports, identity, running, tensors

MOST, MOST_ROWS = 12, 4
WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "cat": 4, "sleeps": 5, "rates": 6, "rise": 7}
NAMES = ("input_ids", "attention_mask", "token_type_ids")
SPECIAL = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]


def word_tokenizer(processor: Any) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def logits(input_ids: Array, attention_mask: Array, token_type_ids: Array) -> dict[str, Array]:
    """A number that depends on each token's place and type."""
    places = np.arange(1, input_ids.shape[1] + 1)
    of_each = np.sin(input_ids * places + 5 * token_type_ids) * attention_mask
    return {"logits": of_each.sum(1, keepdims=True).astype(np.float32)}


def expected(query: str, document: str, most: int | None = None) -> float:
    first, second = ([WORDS[word] for word in text.split()] for text in (query, document))
    while most is not None and len(first) + len(second) + 3 > most:
        (first if len(first) > len(second) else second).pop()
    ids = [1, *first, 2, *second, 2]
    types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    row = logits(np.array([ids]), np.ones((1, len(ids))), np.array([types]))["logits"][0, 0]
    return float(1 / (1 + np.exp(-row)))


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = tmp_path_factory.mktemp("rerank")
    tokenizer = word_tokenizer(PROCESSORS[0])
    for name in ("ranker", "image"):
        (repository / name).mkdir()
        tokenizer.save(str(repository / name / "tokenizer.json"))
    inputs = tuple(TensorSpec(name, "INT64", (-1,), sizes=("s1",)) for name in NAMES)
    dynamic = DynamicShape((Dimension("s1", 0, 1, 1, 0, 2, MOST, (MOST,)),))
    info = ModelInfo("ranker", 1, inputs, tensors(("logits", "FP32", (1,))), MOST_ROWS, dynamic=dynamic)
    with running(FakeModel(info, logits), identity("image"), repository=repository) as found:
        yield found


def rerank(ports: Ports, **body: Any) -> Answer:
    return ask(ports, "POST", "/v1/rerank", json.dumps({"model": "ranker", **body}).encode())


PROCESSORS = (
    TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIAL),
    TemplateProcessing(single="$A [SEP]", pair="$A [SEP] $B", special_tokens=SPECIAL),
    BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
    None,
)


@pytest.mark.parametrize("processor", PROCESSORS, ids=["pair", "bare", "bert", "roberta", "none"])
def test_texts_and_pairs_are_cut_as_the_package_cuts_them(processor: Any) -> None:
    draws = random.Random(0)
    tokenizer, cutting = (word_tokenizer(processor) for _ in range(2))
    loaded = LoadedTokenizer(tokenizer, 0)

    def text() -> str:
        return " ".join(draws.choices([word for word in WORDS if word[0] != "["], k=draws.randint(0, 9)))

    for most in range(4, 16):
        cutting.enable_truncation(most)
        first, others = text(), [text() for _ in range(9)]
        expected_pairs = cutting.encode_batch([(first, other) for other in others])
        found = loaded.pairs([first] * len(others), others, most)
        assert [ids.tolist() for ids, _ in found] == [one.ids for one in expected_pairs]
        assert [types.tolist() for _, types in found] == [one.type_ids for one in expected_pairs]
        for adds_special in (True, False):
            cut = loaded.tokens(others, adds_special=adds_special, most=most)
            if adds_special:
                assert [ids.tolist() for ids in cut] == [one.ids for one in cutting.encode_batch(others)]
            assert max(map(len, cut)) <= most


@pytest.mark.parametrize("seed", range(10))
def test_documents_are_in_the_order_of_their_scores(ports: Ports, seed: int) -> None:
    draws = random.Random(seed)
    words = [word for word in WORDS if not word.startswith("[")]

    def text() -> str:
        return " ".join(draws.choices(words, k=draws.randint(1, 4)))

    query, documents = text(), [text() for _ in range(draws.randint(1, 11))]
    most = draws.choice([None, 1, 3, 50])
    answer = rerank(ports, query=query, documents=documents, return_documents=True, top_n=most)
    assert answer.status == 200, answer.body
    scores = [expected(query, document) for document in documents]
    found = answer.json["results"]
    order = sorted(range(len(documents)), key=lambda n: -scores[n])[:most]
    assert [result["relevance_score"] for result in found] == pytest.approx([scores[n] for n in order], abs=1e-6)
    for result in found:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-6)
        assert result["document"] == {"text": documents[result["index"]]}
    tokens = sum(len(query.split()) + len(document.split()) + 3 for document in documents)
    assert answer.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_pairs_that_are_too_long_are_cut_where_that_is_asked_for(ports: Ports) -> None:
    query, documents = "a cat", ["sleeps " * 30, "rates rise"]
    refused = rerank(ports, query=query, documents=documents)
    assert (refused.status, "a text has 35 tokens, model 'ranker' takes at most 12" in refused.body.decode()) == (
        400,
        True,
    )
    answer = rerank(ports, query=query, documents=documents, truncate=True)
    scores = {result["index"]: result["relevance_score"] for result in answer.json["results"]}
    assert scores == pytest.approx({n: expected(query, documents[n], MOST) for n in range(2)}, abs=1e-6)
    assert rerank(ports, query=query, documents=documents).status == 400, "the next request is not cut"


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents has 0 texts"),
        ({"query": "a", "documents": ["a"] * 2049}, "documents has 2049 texts"),
        ({"query": "a", "documents": [[1, 2]]}, "documents are token ids; send texts"),
        ({"query": "a", "documents": [{"text": "a"}]}, "documents is neither a text nor a list of texts"),
        ({"query": "a " * 1000, "documents": ["a"]}, "the query has 2000 characters"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": ["a"], "model": "image"}, "model 'image' ranks no documents: it needs"),
    ],
)
def test_what_cannot_be_ranked_is_an_error_in_openais_form(ports: Ports, body: dict[str, Any], part: str) -> None:
    answer = rerank(ports, **body)
    assert (answer.status, part in answer.json["error"]["message"]) == (400, True), answer.body


def test_a_model_that_ranks_is_listed_among_those_that_take_texts(ports: Ports) -> None:
    assert [model["id"] for model in ask(ports, "GET", "/v1/models").json["data"]] == ["ranker"]
