"""What the event loop does itself is bounded: of client-sized bodies, other threads read a piece at a time."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from cohabit.server.frontend import tokenizers
from cohabit.server.grpc import api as grpc_api
from cohabit.server.http import api, generate, openai
from cohabit.server.protocol import embedding, json_body, tensors
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import MIB, Ports, identity, running
from tests.transport.test_embeddings import make_tokenizer, text_model

QUICK_BYTES = 64 << 10
PIECE_BYTES = 2 * QUICK_BYTES
"""A piece is cut at the first comma after its size."""


def size_of(arguments: tuple[Any, ...]) -> int:
    """Bytes of what a function is given to read."""
    total = 0
    for argument in arguments:
        if isinstance(argument, bytes | memoryview | msgspec.Raw):
            total += len(memoryview(argument))
        elif isinstance(argument, ModelInferRequest):
            total += argument.ByteSize()
        elif isinstance(argument, list | tuple) and argument and isinstance(argument[0], str):
            total += sum(map(len, argument))
    return total


class Reading:
    """What was read on which thread, by function."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []
        self.loop = 0
        """The event loop's thread."""

    def noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, size_of(arguments), threading.get_ident() == self.loop))
            return function(*arguments, **options)

        return note


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    found = Reading()
    for module, name in (
        (api, "decode_request"),
        (generate, "decode_request"),
        (openai, "parse_json"),
        (openai, "texts_of"),
        (grpc_api, "described_bytes"),
        (grpc_api, "parse_request"),
        (grpc_api, "decode_request"),
        (json_body, "parse_json"),
        (tensors, "_array"),
        (tokenizers.LoadedTokenizer, "tokens"),
    ):
        monkeypatch.setattr(module, name, found.noted(f"{module.__name__}.{name}", getattr(module, name)))
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = tmp_path_factory.mktemp("texts")
    make_tokenizer(repository / "mean" / "tokenizer.json")
    models = (text_model("mean"), identity("wide", shape=(1 << 18, 1)))
    with running(*models, repository=repository, max_body_bytes=16 * MIB) as ports:
        yield ports


def json_of(data: bytes, more: bytes = b"") -> bytes:
    head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,262144,1],"data":[%b]}]%b}'
    return head % (data, more)


def fill(item: bytes, nbytes: int) -> bytes:
    return (item + b",") * (nbytes // (len(item) + 1) - 1) + item


LONG = b",".join([b"1.2345678901234567890123e-5"] * (1 << 18))
INFER, GENERATE, EMBEDDINGS = "/v2/models/wide/infer", "/v2/models/wide/generate", "/v1/embeddings"
BODIES: dict[str, tuple[str, bytes]] = {
    "long numbers": (INFER, json_of(LONG)),
    "a number in each array": (INFER, json_of(b"[" + fill(b"[1]", 4 << 18) + b"]")),
    "empty arrays": (INFER, json_of(fill(b"[]", 7 * MIB))),
    "constants": (INFER, json_of(fill(b"NaN", 4 << 18))),
    "unread arrays": (INFER, json_of(b"1", b',"own":[%b]' % fill(b"[]", 7 * MIB))),
    "generate": (GENERATE, b'{"x":[[' + LONG + b"]]}"),
    "generate of arrays": (GENERATE, b'{"x":[' + fill(b"[1]", 7 * MIB) + b"]}"),
    "a text": (EMBEDDINGS, b'{"model":"mean","input":"%b"}' % (b"a " * (500 << 10))),
    "texts": (EMBEDDINGS, b'{"model":"mean","input":[%b]}' % fill(b'"%b"' % (b"a " * 3), 16 << 10)),
    "empty lists": (EMBEDDINGS, b'{"model":"mean","input":[%b]}' % fill(b"[]", MIB - 100)),
    "empty lists for no model": (EMBEDDINGS, b'{"model":"none","input":[%b]}' % fill(b"[]", MIB - 100)),
    "token ids": (EMBEDDINGS, b'{"model":"mean","input":[%b]}' % fill(b"1", MIB - 100)),
}


@pytest.mark.parametrize("kind", BODIES)
def test_the_event_loop_reads_no_large_body_and_threads_hold_the_interpreter_for_a_piece(
    server: Ports, reading: Reading, kind: str
) -> None:
    reading.loop = server.run(_thread())
    path, body = BODIES[kind]
    answer = ask(server, "POST", path, body)
    assert answer.status in (200, 400, 404, 413), answer.body[:200]
    assert reading.calls
    for name, nbytes, on_loop in reading.calls:
        assert not on_loop or nbytes <= QUICK_BYTES, name
        if name.endswith(("_array", "tokens")):
            assert nbytes <= PIECE_BYTES, name
    if kind.endswith("for no model"):
        assert answer.status == 404
        assert not any("texts_of" in name for name, *_ in reading.calls), "the model is looked up first"


async def _thread() -> int:
    return threading.get_ident()


@pytest.mark.parametrize("model", ["wide", "none"])
def test_grpc_reads_large_messages_on_other_threads_and_looks_the_model_up_first(
    server: Ports, reading: Reading, model: str
) -> None:
    reading.loop = server.run(_thread())
    message = ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="x", datatype="FP32", shape=[1, 1 << 18, 1])
    tensor.contents.fp32_contents.extend(np.ones(1 << 18, np.float32).tolist())
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        if model == "none":
            with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
                call(message.SerializeToString(), timeout=60)
            assert not reading.calls
            return
        call(message.SerializeToString(), timeout=60)
    assert {name for name, *_ in reading.calls} == {
        f"{grpc_api.__name__}.{name}" for name in ("described_bytes", "parse_request", "decode_request")
    }
    assert all(not on_loop for _, _, on_loop in reading.calls)


def test_typed_integers_are_counted_before_they_are_parsed(server: Ports, reading: Reading) -> None:
    message = ModelInferRequest(model_name="wide")
    tensor = message.inputs.add(name="x", datatype="INT64", shape=[1])
    tensor.contents.int64_contents.extend([1] * ((1 << 20) + 1))
    with (
        grpc.insecure_channel(server.grpc) as channel,
        pytest.raises(grpc.RpcError, match="send raw_input_contents"),
    ):
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message.SerializeToString(), timeout=60)
    assert not any("parse_request" in name for name, *_ in reading.calls)


def test_what_a_request_for_embeddings_may_have_is_limited(server: Ports) -> None:
    for given, part in (
        (b'"%b"' % (b"a" * 513), "input[0] has 513 characters, of which model 'mean' takes 512"),
        (b'["a","%b"]' % (b"a" * 513), "input[1] has 513 characters"),
        (b"[%b]" % fill(b"1", 2 * 300_001), "over 300000 token"),
        (b'["a","\xc3"]', "input is neither a text"),
        (b'"\\ud800"', "failed to parse the request JSON"),
        (b"[%b]" % fill(b"[1]", 4 * 5000), "over 2048 texts"),
        (b"[%b]" % fill(b'"a"', 4 * 5000), "over 2048 texts"),
    ):
        answer = ask(server, "POST", EMBEDDINGS, b'{"model":"mean","input":%b}' % given)
        assert answer.status == 400
        assert part in answer.json["error"]["message"]
    assert embedding.MOST_TOKENS == 300_000
