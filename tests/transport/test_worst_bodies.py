"""What the event loop does itself is bounded: of client-sized bodies, other threads read a piece at a time."""

import json
import random
import re
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
from cohabit.server.protocol import embedding, json_body, json_structure, tensors
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import MIB, Ports, identity, running
from tests.transport.test_embeddings import make_tokenizer, text_model

QUICK_BYTES = {grpc_api.__name__: 64 << 10}
"""What the event loop reads itself; 16 KiB elsewhere."""
PIECE_BYTES = 128 << 10
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
    "empty arrays": (INFER, json_of(fill(b"[]", 2 * MIB))),
    "constants": (INFER, json_of(fill(b"NaN", 4 << 18))),
    "unread arrays": (INFER, json_of(b"1", b',"own":[%b]' % fill(b"[]", 2 * MIB))),
    "generate": (GENERATE, b'{"x":[[' + LONG + b"]]}"),
    "generate of arrays": (GENERATE, b'{"x":[' + fill(b"[1]", 2 * MIB) + b"]}"),
    "a text": (EMBEDDINGS, b'{"model":"mean","input":"%b"}' % (b"a " * (500 << 10))),
    "texts": (EMBEDDINGS, b'{"model":"mean","input":[%b]}' % fill(b'"%b"' % (b"a " * 3), 16 << 10)),
    "empty lists": (EMBEDDINGS, b'{"model":"mean","input":[%b]}' % fill(b"[]", MIB - 100)),
    "token ids for no model": (EMBEDDINGS, b'{"model":"none","input":[%b]}' % fill(b"1", MIB - 100)),
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
        assert not on_loop or nbytes <= QUICK_BYTES.get(name.rpartition(".")[0], 16 << 10), name
        if name.endswith(("_array", "tokens")):
            assert nbytes <= PIECE_BYTES, name
    if kind.endswith("for no model"):
        assert answer.status == 404
        assert not any("texts_of" in name for name, *_ in reading.calls), "the model is looked up first"


ITEMS = [b"[]", b"{}", b"[[]]", b'{"":[]}', b'{"":{}}', b'""', b'"\\""', b"1", b"null", b"[1,[2]]", b"[", b'{"a":']
FIELDS: dict[str, list[bytes]] = {
    "/v1/chat/completions": [
        b'{"model":"none","messages":[{"role":"user","content":"a"}],"%b":[%%b]}' % name
        for name in (b"tools", b"stop", b"own")
    ]
    + [
        b'{"model":"none","messages":[%b]}',
        b'{"model":"none","messages":[{"role":"user","content":[%b]}]}',
        b'{"model":"none","messages":[{"role":"user","content":"a"}],"response_format":{"a":[%b]}}',
    ],
    "/v1/completions": [b'{"model":"none","prompt":[%b]}', b'{"model":"none","prompt":"a","stop":[%b]}'],
    EMBEDDINGS: [b'{"model":"none","input":[%b]}', b'{"model":"none","input":"a","parameters":{"a":[%b]}}'],
    INFER: [
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%b],"data":[1]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,262144,1],"data":[%b]}]}',
        b'{"inputs":[%b]}',
        b'{"inputs":[],"outputs":[%b]}',
        b'{"inputs":[],"own":{"a":[%b]}}',
        b'{"inputs":[],"parameters":{"priority":[%b]}}',
    ],
    GENERATE: [b'{"x":[%b]}', b'{"x":1,"parameters":[%b]}', b'{"x":1,"own":[%b]}'],
    "/v2/trace/setting": [b'{"trace_level":[%b]}'],
    "/v2/logging": [b'{"log_info":[%b]}'],
    "/v2/repository/models/none/load": [b'{"parameters":{"config":[%b]}}'],
}
"""Places of a client's items, by path."""
STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')


@pytest.mark.parametrize("path", FIELDS)
def test_no_body_makes_a_parser_build_many_objects_at_once_or_read_for_long(
    server: Ports, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = list[tuple[int, int]]()
    decode = msgspec.json.decode

    def noted(text: Any, **options: Any) -> Any:
        bare = STRING.sub(b"", bytes(text))
        parsed.append((len(text), bare.count(b"[") + bare.count(b"{")))
        return decode(text, **options)

    monkeypatch.setattr(json_body.msgspec.json, "decode", noted)
    size = {"/v2/trace/setting": 60 << 10, "/v2/logging": 60 << 10}.get(path, MIB - 200)
    for field in FIELDS[path]:
        for item in ITEMS:
            answer = ask(server, "POST", path, field % fill(item, size))
            assert answer.status in (400, 404, 501), (field, item)
    assert all(containers <= 1 << 14 for _, containers in parsed)
    if path in (INFER, GENERATE):
        assert max(nbytes for nbytes, _ in parsed) <= 256 << 10


@pytest.mark.parametrize("seed", range(40))
def test_json_is_counted_as_a_parser_reads_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in strings, and wherever pieces end."""
    draws = random.Random(seed)
    monkeypatch.setattr(json_structure, "PIECE_BYTES", draws.choice([1, 2, 7, 64, 1000]))
    monkeypatch.setattr(json_structure, "_LONG_BYTES", 12)
    strings = ["", '"', "\\", '\\"', "a[b", "{,:", "\\\\\\", "é\n", ' ]"', "x" * 30]

    def drawn(depth: int) -> Any:
        match draws.randrange(5 if depth else 2):
            case 0:
                return draws.choice(strings)
            case 1:
                return draws.choice([1, -2.5, None, True])
            case 2:
                return [draws.random() for _ in range(draws.randrange(9))]
            case 3:
                return [drawn(depth - 1) for _ in range(draws.randrange(4))]
            case _:
                return {draws.choice(strings) + str(n): drawn(depth - 1) for n in range(draws.randrange(4))}

    value = {"a": drawn(5), "b": drawn(4)}
    text = json.dumps(value, indent=draws.choice([None, 1]), ensure_ascii=draws.random() < 0.5).encode()
    keys, strings_, containers = counted(value)
    assert json_structure.counts_of(text) == json_structure.Counts(keys, keys + strings_, containers)
    for array in json_structure.long_arrays(text):
        numbers = text[array]
        assert json.loads(json_structure.without_space(numbers)) == json.loads(numbers)
        assert b'"' not in numbers
    cut = bytearray(text)
    for array in reversed(json_structure.long_arrays(text)):
        cut[array] = b"null"
    json.loads(cut)


def counted(value: Any) -> tuple[int, int, int]:
    """Keys, strings that are values, and containers."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [counted(part) for part in (value.values() if isinstance(value, dict) else value)]
    keys, strings, containers = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0, 0)
    return keys + len(value) * isinstance(value, dict), strings, containers + 1


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 256])
@pytest.mark.parametrize("text", [b"[1 2]", b"[1,2\t \n3]", b"[1, - 2]", b"[true false]", b"[1 .5]"])
def test_white_space_does_not_join_values(text: bytes, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_structure, "PIECE_BYTES", piece_bytes)
    with pytest.raises(ValueError, match="without a comma"):
        json_structure.without_space(text)
    assert json_structure.without_space(b" [ 1 ,\n [ 2 ] , -3e5\t] ") == b"[1,[2],-3e5]"


def test_a_large_body_is_read_as_a_small_one_is(server: Ports) -> None:
    """Tensors of any notation between other fields; what only looks like an array, and errors in it."""
    numbers = [float(n) for n in range(1 << 18)]
    head = '{"id":"[1,2]","parameters":{"own":"\\\\\\"["},'
    head += '"inputs":[{"name":"x","datatype":"FP32","shape":[1,262144,1],"data":'
    for data in (json.dumps(numbers), json.dumps([[[n] for n in numbers]], indent=1)):
        answer = ask(server, "POST", INFER, f"{head}{data}}}]}}".encode())
        assert answer.status == 200, answer.body[:200]
        assert answer.json["outputs"][0]["data"] == numbers
        assert answer.json["id"] == "[1,2]"
    constants = json.dumps(numbers).replace("[0.0", "[NaN").replace("9.0]", "-Inf ]")
    assert "NaN" in ask(server, "POST", INFER, f"{head}{constants}}}]}}".encode()).body[:2000].decode()
    for wrong, part in (
        (json.dumps(numbers[:-1])[:-1] + ",]", "does not fit FP32"),
        (json.dumps(numbers).replace(", 7.0", " 7.0"), "two values without a comma"),
        (json.dumps(numbers).replace("7.0", "[7.0]", 1), "nested unevenly"),
        (json.dumps(numbers).replace("7.0", "{}", 1), "does not fit FP32"),
        (json.dumps(numbers)[:-1] + "}", "does not fit FP32"),
    ):
        answer = ask(server, "POST", INFER, f"{head}{wrong}}}]}}".encode())
        assert (answer.status, part in answer.error) == (400, True), answer.error


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
        (b'"%b"' % (b"a" * 513), "input[0] has 513 characters; model 'mean' takes at most 512"),
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
