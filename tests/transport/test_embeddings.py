"""OpenAI's endpoints: texts in, vectors out, through the path of an inference request."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.ipc.catalog import ModelEntry, ModelState
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.triton.model_config import ModelConfig
from tests.support.server.server_http import Answer, ask
from tests.support.server.transport_fakes import FakeModel, Ports, identity, running, tensors

WIDTH, MOST, MOST_ROWS = 3, 8, 4
WORDS = {"[PAD]": 0, "[CLS]": 1, "a": 2, "cat": 3, "sleeps": 4, "[UNK]": 5}
TABLE = np.arange(1, 3 * len(WORDS) + 1, dtype=np.float32).reshape(-1, WIDTH) ** 0.5
TABLE[0] = 1e6  # a pooled padding would be seen


def states(input_ids: Array, attention_mask: Array | None = None) -> dict[str, Array]:
    return {"last_hidden_state": TABLE[input_ids]}


def text_model(name: str, mask: bool = True, vector: bool = False) -> FakeModel:
    """Takes 2 to 8 tokens in up to 4 rows; gives their rows of the table, or these rows' first as a vector."""
    names = ("input_ids", "attention_mask") if mask else ("input_ids",)
    inputs = tuple(TensorSpec(name, "INT64", (-1,), sizes=("s1",)) for name in names)
    outputs = tensors(("last_hidden_state", "FP32", (-1, WIDTH)))
    dynamic = DynamicShape((Dimension("s1", 0, 1, 1, 0, 2, MOST, (MOST,)),))
    function = states
    if vector:
        outputs = tensors(("sentence_embedding", "FP32", (WIDTH,)))
        function = lambda **given: {"sentence_embedding": TABLE[given["input_ids"]][:, 0]}  # noqa: E731
    return FakeModel(ModelInfo(name, 1, inputs, outputs, MOST_ROWS, dynamic=dynamic), function)


def make_tokenizer(path: Path) -> None:
    """Of a few words, with [CLS] in front; it pads to a fixed length and truncates, as files of real models do."""
    tokenizer = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 1)])
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(3)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))


def expected(*texts: list[int], first: bool = False) -> Array:
    means = np.stack([TABLE[ids[:1] if first else ids].mean(axis=0) for ids in texts])
    return np.asarray(means / np.linalg.norm(means, axis=1, keepdims=True))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = tmp_path_factory.mktemp("texts")
    for name in ("mean", "cls", "lasttoken", "max", "unmasked", "vector", "image"):
        make_tokenizer(repository / name / "tokenizer.json")
    (repository / "damaged_text").mkdir()
    (repository / "damaged_text" / "tokenizer.json").write_text("{}")
    (repository / "linked").mkdir()
    outside = tmp_path_factory.mktemp("outside") / "tokenizer.json"
    make_tokenizer(outside)
    (repository / "linked" / "tokenizer.json").symlink_to(outside)
    models = [text_model(name) for name in ("mean", "cls", "lasttoken", "max", "untold", "damaged_text", "linked")]
    models += [text_model("unmasked", mask=False), text_model("vector", vector=True), identity("image")]
    with running(*models, repository=repository) as ports:
        for name in ("cls", "lasttoken", "max"):
            config = ModelConfig()
            config.parameters["pooling"].string_value = name
            info = next(model.info for model in models if model.info.name == name)
            entry = ModelEntry(name, 1, ModelState.READY, info=info, config=config.SerializeToString())
            ports.engine.catalog.update(entry)
        yield ports


def embed(ports: Ports, model: str, given: Any, **more: Any) -> Answer:
    return ask(ports, "POST", "/v1/embeddings", json.dumps({"model": model, "input": given, **more}).encode())


def vectors(answer: Answer) -> Array:
    assert answer.status == 200, answer.body
    data = answer.json["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], np.float32)


def test_a_texts_vector_is_the_normalised_mean_of_its_tokens_states(texts: Ports) -> None:
    answer = embed(texts, "mean", "a cat sleeps")
    assert np.allclose(vectors(answer), expected([1, 2, 3, 4]), atol=1e-6)
    assert {key: answer.json[key] for key in ("object", "model", "usage")} == {
        "object": "list",
        "model": "mean",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }


def test_the_configuration_may_choose_the_first_tokens_state(texts: Ports) -> None:
    assert np.allclose(vectors(embed(texts, "cls", "a cat")), expected([1, 2, 3], first=True), atol=1e-6)


def test_the_configuration_may_choose_the_last_tokens_state_or_the_largest_values(texts: Ports) -> None:
    """Of each text alone, whatever the padding after it."""
    ids = ([1, 2], [1, 2, 3, 4])
    for name, pool in (("lasttoken", lambda rows: rows[-1]), ("max", lambda rows: rows.max(axis=0))):
        own = np.stack([pool(TABLE[list(tokens)]) for tokens in ids])
        own = own / np.linalg.norm(own, axis=1, keepdims=True)
        assert np.allclose(vectors(embed(texts, name, ["a", "a cat sleeps"])), own, atol=1e-6)


def test_a_model_that_pools_itself_is_taken_at_its_word(texts: Ports) -> None:
    assert np.allclose(vectors(embed(texts, "vector", ["a", "cat"])), expected([1], [1]), atol=1e-6)


def test_texts_of_a_request_are_inferred_together_and_padding_is_not_pooled(texts: Ports) -> None:
    model = texts.engine.models[("mean", 1)]  # type: ignore[index]
    model.requests.clear()
    found = vectors(embed(texts, "mean", ["a", "cat sleeps", "a a a a a", "sleeps", "a cat"]))
    ids = ([1, 2], [1, 3, 4], [1, 2, 2, 2, 2, 2], [1, 4], [1, 2, 3])
    assert np.allclose(found, expected(*ids), atol=1e-6)
    assert [request.inputs["input_ids"].shape for request in model.requests] == [(4, 6), (1, 3)]
    assert model.requests[1].inputs["attention_mask"].tolist() == [[1, 1, 1]]


def test_without_a_mask_only_texts_of_one_length_share_a_batch(texts: Ports) -> None:
    model = texts.engine.models[("unmasked", 1)]  # type: ignore[index]
    model.requests.clear()
    found = vectors(embed(texts, "unmasked", ["a", "cat", "a cat", "sleeps"]))
    assert np.allclose(found, expected([1, 2], [1, 3], [1, 2, 3], [1, 4]), atol=1e-6)
    assert [request.batch for request in model.requests] == [2, 1, 1]


def test_token_ids_are_taken_as_they_are(texts: Ports) -> None:
    assert np.allclose(vectors(embed(texts, "mean", [2, 3])), expected([2, 3]), atol=1e-6)
    assert np.allclose(vectors(embed(texts, "mean", [[2, 3], [4]])), expected([2, 3], [4]), atol=1e-6)


def test_texts_that_are_too_long_are_cut_where_that_is_asked_for(texts: Ports) -> None:
    found = vectors(embed(texts, "mean", ["a " * 8, "cat"], truncate=True))
    assert np.allclose(found, expected([1, *[2] * 7], [1, 3]), atol=1e-6)


def test_base64_has_the_same_numbers(texts: Ports) -> None:
    answer = embed(texts, "mean", "a cat", encoding_format="base64", dimensions=WIDTH, user="someone")
    found = np.frombuffer(base64.b64decode(answer.json["data"][0]["embedding"]), "<f4")
    assert found.tolist() == vectors(embed(texts, "mean", "a cat"))[0].tolist()


@pytest.mark.parametrize(
    ("model", "given", "more", "status", "part"),
    [
        ("mean", "a", {"dimensions": 2}, 400, "dimensions is 2, the embeddings of model 'mean' have 3"),
        ("mean", "a", {"encoding_format": "hex"}, 400, "encoding_format"),
        ("mean", [], {}, 400, "input has 0 texts, it can have 1 to 2048"),
        ("mean", ["a"] * 2049, {}, 400, "input has 2049 texts"),
        ("mean", [["a"]], {}, 400, "input"),
        ("mean", ["a", 2], {}, 400, "input[1] is a number among texts"),
        ("mean", [[]], {}, 400, "input[0] has no tokens"),
        ("mean", [[-1]], {}, 400, "input[0] has a number that is not a token id"),
        ("mean", "a " * 8, {}, 400, "a text has 9 tokens, model 'mean' takes at most 8"),
        ("unmasked", [[2]], {}, 400, "takes 2: it has no input attention_mask"),
        ("mean", "a", {"parameters": {"timeout": -1}}, 400, "'timeout'"),
        ("untold", "a", {}, 400, "has no tokenizer.json in its folder"),
        ("linked", "a", {}, 400, "has no tokenizer.json in its folder"),
        ("image", "a", {}, 400, "makes no embeddings of texts"),
        ("damaged_text", "a", {}, 501, "its tokenizer.json cannot be read"),
        ("nope", "a", {}, 404, "'nope' is not found"),
        ("mean", "a" * (1 << 20), {}, 413, "send fewer texts"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_an_error_in_openais_form(
    texts: Ports, model: str, given: Any, more: dict[str, Any], status: int, part: str
) -> None:
    answer = embed(texts, model, given, **more)
    error = answer.json["error"]
    assert (answer.status, part in error["message"]) == (status, True), error
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert error["param"] is None
    assert error["code"] == {404: "model_not_found", 413: "payload_too_large", 501: "unsupported"}.get(
        status, error["code"]
    )


def test_errors_of_the_port_itself_have_openais_form_too(texts: Ports) -> None:
    for method, path in (("GET", "/v1/embeddings"), ("GET", "/v1/nothing")):
        answer = ask(texts, method, path)
        assert answer.json["error"]["type"] == "invalid_request_error", answer.body
    assert isinstance(ask(texts, "GET", "/v2/nothing").json["error"], str)


def test_the_models_that_take_texts_are_listed(texts: Ports) -> None:
    listed = ask(texts, "GET", "/v1/models").json
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == [
        "cls",
        "damaged_text",
        "lasttoken",
        "max",
        "mean",
        "unmasked",
        "vector",
    ]
    assert ask(texts, "GET", "/v1/models/mean").json == listed["data"][4]
    assert ask(texts, "GET", "/v1/models/image").json["error"]["code"] == "model_not_found"


def test_another_tokenizer_in_the_folder_is_used_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "mean" / "tokenizer.json"
    make_tokenizer(path)
    with running(text_model("mean"), repository=tmp_path) as ports:
        assert np.allclose(vectors(embed(ports, "mean", "a cat")), expected([1, 2, 3]), atol=1e-6)
        path.write_text(path.read_text().replace('"cat": 3', '"cat": 4').replace('"sleeps": 4', '"sleeps": 3'))
        assert np.allclose(vectors(embed(ports, "mean", "a cat")), expected([1, 2, 4]), atol=1e-6)
