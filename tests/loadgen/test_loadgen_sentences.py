import json

import numpy as np
import pytest
from aiohttp import web
from fake_kserve import serving_app
from rich.console import Console

from cohabit.loadgen.errors import ModelRefused, UsageError
from cohabit.loadgen.sentences import EXAMPLES, embed, print_similarities, token_length

LENGTH = 12


async def metadata(request: web.Request) -> web.Response:
    if request.match_info["model"] != "minilm":
        return web.json_response({"error": "unknown model"}, status=404)
    inputs = [{"name": n, "datatype": "INT64", "shape": [-1, LENGTH]} for n in ("input_ids", "attention_mask")]
    return web.json_response({"name": "minilm", "inputs": inputs, "outputs": []})


async def count_tokens(request: web.Request) -> web.Response:
    """Answer as an embedding the number of tokens that the mask lets through, and 1."""
    body = await request.read()
    head = json.loads(body[: int(request.headers["Inference-Header-Content-Length"])])
    assert [i["name"] for i in head["inputs"]] == ["input_ids", "attention_mask"]
    ids, mask = np.frombuffer(body[-2 * 3 * LENGTH * 8 :], np.int64).reshape(2, 3, LENGTH)
    assert (ids[mask == 0] == 0).all()
    vectors = np.array([[float(n), 1.0] for n in mask.sum(axis=1)])
    output = {"name": "embedding", "datatype": "FP32", "shape": [3, 2], "data": vectors.ravel().tolist()}
    return web.json_response({"model_name": "minilm", "model_version": "1", "outputs": [output]})


def app() -> web.Application:
    app = web.Application()
    app.router.add_get("/v2/models/{model}", metadata)
    app.router.add_post("/v2/models/minilm/infer", count_tokens)
    return app


async def test_sentences_are_cut_and_padded_to_the_models_length() -> None:
    async with serving_app(app()) as url:
        vectors = await embed(url, "minilm", ["Hello.", "One two three.", "word " * 50])
    assert vectors.tolist() == [[4.0, 1.0], [6.0, 1.0], [LENGTH, 1.0]]


async def test_a_server_without_the_model_is_an_error() -> None:
    async with serving_app(app()) as url:
        with pytest.raises(UsageError, match="no model 'bert'"):
            await embed(url, "bert", EXAMPLES)


def test_a_model_that_takes_no_tokens_is_refused() -> None:
    image = {"name": "image", "datatype": "FP32", "shape": [-1, 3, 224, 224]}
    with pytest.raises(ModelRefused, match="resnet50: a sentence embedder takes input_ids"):
        token_length({"name": "resnet50", "inputs": [image]})


def test_the_matrix_shows_cosines(capsys: pytest.CaptureFixture[str]) -> None:
    print_similarities(["a", "b"], np.array([[2.0, 0.0], [3.0, 4.0]], np.float32), Console())
    printed = capsys.readouterr().out
    assert printed.count("1.000") == 2
    assert printed.count("0.600") == 2
