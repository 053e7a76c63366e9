"""Tokenizers as entries and as steps of ensembles: the token ids of the package itself, and texts that are refused."""

import asyncio
import json
import os
import random
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import EnsembleSource, Unloadable
from tests.support.server.clients import Client, connect
from tests.support.server.ensembles import config_text, put, step, tensor
from tests.support.server.server_fakes import FakeServable, Running, running, serving, tensors, write_repository
from tests.support.server.server_http import HEADER_LENGTH, Answer, ask

pytestmark = pytest.mark.process

MOST, STEP = 12, 4
"""The models take lengths of 4, 8 and 12 tokens."""
WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "cat": 4, "sleeps": 5, "rates": 6, "rise": 7, "größer": 8}
PLAIN = [word for word in WORDS if word[0] != "["]
SPECIAL = [(name, WORDS[name]) for name in ("[CLS]", "[SEP]")]
IDS, MASK, TYPES = NAMES = ("input_ids", "attention_mask", "token_type_ids")


def package() -> Tokenizer:
    made = Tokenizer(WordLevel(WORDS, unk_token="[PAD]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIAL
    )
    return made


def encoder(name: str, *inputs: str) -> FakeServable:
    """A model whose answer depends on all of its inputs."""
    specs = tuple(TensorSpec(own, "INT64", (-1,), sizes=("4*s1",)) for own in inputs)
    dynamic = DynamicShape((Dimension("s1", 0, 1, STEP, 0, STEP, MOST, (MOST,)),))
    info = ModelInfo(name, 1, specs, tensors(("sum", "FP32", (1,))), 8, dynamic=dynamic)
    return FakeServable(info, total)


def total(**arrays: Array) -> dict[str, Array]:
    parts = [
        np.sin((1.0 + NAMES.index(name)) * array).sum(1, keepdims=True) for name, array in sorted(arrays.items())
    ]
    return {"sum": np.sum(parts, 0).astype(np.float32)}


def tokens_config(
    *outputs: str, length: int = -1, most_batch: int = 8, texts: Sequence[str] = ("text",), more: str = ""
) -> str:
    dims = "1" if most_batch else "-1"
    sizes = str(length) if most_batch else f"-1, {length}"
    inputs = "".join(tensor("input", name, "STRING", dims) for name in texts)
    written = "".join(tensor("output", name, "INT64", sizes) for name in outputs)
    return f"backend: 'tokenizer' max_batch_size: {most_batch}\n{inputs}{written}{more}"


def cutting(value: str = "true") -> str:
    return f"parameters {{ key: 'truncate' value: {{ string_value: '{value}' }} }}"


TEXT = tensor("input", "TEXT", "STRING", "1")
SUM = tensor("output", "SUM", dims="1")
BOTH = {name: name for name in (IDS, MASK)}
TOKENIZERS = {
    "tokens": tokens_config(IDS, MASK),
    "cut_tokens": tokens_config(IDS, MASK, more=cutting()),
    "fixed_tokens": tokens_config(IDS, MASK, TYPES, length=10),
    "free_tokens": tokens_config(IDS, MASK, most_batch=0),
    "strict_tokens": tokens_config(IDS),
    "only_ids": tokens_config(IDS),
    "pair_tokens": tokens_config(*NAMES, texts=("query", "document")),
}
OF_TOKENS = TEXT + SUM + "".join(tensor("output", name, "INT64", "-1") for name in BOTH)
ENSEMBLES = {
    "embed": config_text(OF_TOKENS, step("tokens", {"text": "TEXT"}, BOTH), step("bert", BOTH, {"sum": "SUM"})),
    "cut": config_text(OF_TOKENS, step("cut_tokens", {"text": "TEXT"}, BOTH), step("bert", BOTH, {"sum": "SUM"})),
    "outer": config_text(TEXT + SUM, step("embed", {"TEXT": "TEXT"}, {"SUM": "SUM"})),
    "rank": config_text(
        TEXT + tensor("input", "DOC", "STRING", "1") + SUM,
        step("pair_tokens", {"query": "TEXT", "document": "DOC"}, {name: name for name in NAMES}),
        step("cross", {name: name for name in NAMES}, {"sum": "SUM"}),
    ),
}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = tmp_path_factory.mktemp("repository")
    loaded = serving(encoder("bert", IDS, MASK), encoder("cross", *NAMES))
    write_repository(repository, loaded)
    for name, text in (TOKENIZERS | ENSEMBLES).items():
        put(repository, name, text)
        if name in TOKENIZERS:
            package().save(str(repository / name / "tokenizer.json"))
    Tokenizer(WordLevel({"cat": 4}, unk_token="[UNK]")).save(str(repository / "strict_tokens" / "tokenizer.json"))
    with running(loaded, repository=repository, client_shm="on") as handle:
        yield handle


def texts_of(*texts: str | bytes, shape: Sequence[int] = (-1, 1)) -> Array:
    return np.array([t.encode() if isinstance(t, str) else t for t in texts], np.object_).reshape(shape)


def asked(client: Client, model: str, outputs: Sequence[str], **arrays: Array) -> dict[str, Array]:
    sent = [client.input(name, array, np_to_triton_dtype(array.dtype)) for name, array in arrays.items()]
    result = client.raw.infer(model, sent, outputs=[client.api.InferRequestedOutput(name) for name in outputs])
    return {name: result.as_numpy(name) for name in outputs}


def expected(texts: Sequence[Any], *, cut: int | None = None, length: int | None = None) -> dict[str, Array]:
    """Tokenize as the package does, padded to the next length that the models take."""
    made = package()
    if cut is not None:
        made.enable_truncation(cut)
    longest = max(len(one.ids) for one in made.encode_batch(list(texts)))
    made.enable_padding(pad_id=0, length=length or -(-longest // STEP) * STEP)
    encoded = made.encode_batch(list(texts))
    of_each = ((one.ids, one.attention_mask, one.type_ids) for one in encoded)
    return dict(zip(NAMES, map(np.array, zip(*of_each, strict=True)), strict=True))


def sentence(draws: random.Random, most: int) -> str:
    return " ".join(draws.choices([*PLAIN, "unknown"], k=draws.randint(1, most)))


@pytest.mark.parametrize("seed", range(8))
def test_an_ensemble_takes_texts_and_gives_what_its_model_makes_of_the_packages_tokens(
    client: Client, seed: int
) -> None:
    draws = random.Random(seed)
    texts = [sentence(draws, MOST - 2) for _ in range(1 + seed)]
    wanted = expected(texts)
    answer = asked(client, "embed", ["SUM", *BOTH], TEXT=texts_of(*texts))
    for name in BOTH:
        np.testing.assert_array_equal(answer[name], wanted[name])
    by_client = asked(client, "bert", ["sum"], **{name: wanted[name] for name in BOTH})["sum"]
    np.testing.assert_array_equal(answer["SUM"], by_client)
    np.testing.assert_array_equal(asked(client, "outer", ["SUM"], TEXT=texts_of(*texts))["SUM"], by_client)


@pytest.mark.parametrize("seed", range(4))
def test_texts_that_are_too_long_are_cut_as_the_package_cuts_them(client: Client, seed: int) -> None:
    texts = [sentence(random.Random(seed), 3 * MOST) for _ in range(8)]
    wanted = expected(texts, cut=MOST)
    for name, array in asked(client, "cut", list(BOTH), TEXT=texts_of(*texts)).items():
        np.testing.assert_array_equal(array, wanted[name])


@pytest.mark.parametrize("seed", range(4))
def test_pairs_of_texts_are_those_of_the_package(client: Client, seed: int) -> None:
    draws = random.Random(seed)
    pairs = [(sentence(draws, 4), sentence(draws, 5)) for _ in range(1 + seed)]
    wanted = expected(pairs)
    queries, documents = (texts_of(*column) for column in zip(*pairs, strict=True))
    by_client = asked(client, "cross", ["sum"], **wanted)["sum"]
    answer = asked(client, "rank", ["SUM"], TEXT=queries, DOC=documents)
    np.testing.assert_array_equal(answer["SUM"], by_client)


def test_a_tokenizer_is_an_entry_of_its_own(client: Client, own: Running) -> None:
    texts = ["a cat sleeps", "rates rise", "größer a a a a a"]
    wanted = expected(texts, length=10)
    for name, array in asked(client, "fixed_tokens", NAMES, text=texts_of(*texts)).items():
        np.testing.assert_array_equal(array, wanted[name])
    unbatched = asked(client, "free_tokens", [IDS], text=texts_of(*texts, shape=(3,)))[IDS]
    np.testing.assert_array_equal(unbatched, expected(texts, length=8)[IDS])
    options = {"as_json": True} if client.protocol == "grpc" else {}
    metadata = client.raw.get_model_metadata("tokens", **options)
    assert (metadata["platform"], metadata["inputs"][0]["datatype"]) == ("tokenizer", "BYTES")
    config = client.raw.get_model_config("tokens", **options)
    config = config.get("config", config)
    assert (config["backend"], config["input"][0]["data_type"]) == ("tokenizer", "TYPE_STRING")
    (stats,) = client.raw.get_inference_statistics("fixed_tokens", **options)["model_stats"]
    assert int(stats["inference_stats"]["success"]["count"]) >= 1


def infer_json(own: Running, **given: Any) -> Answer:
    body = {"inputs": [{"name": "TEXT", "datatype": "BYTES", **given}], "outputs": [{"name": IDS}]}
    return ask(own, "POST", "/v2/models/embed/infer", json.dumps(body).encode())


def test_each_form_of_texts_on_the_wire_is_read(own: Running) -> None:
    texts = ['a "cat"', "größer [rates] \\ rise"]
    wanted = expected(texts)[IDS].ravel().tolist()
    for data in (texts, [[text] for text in texts]):
        assert infer_json(own, shape=[2, 1], data=data).json["outputs"][0]["data"] == wanted
    one = expected(texts[:1])[IDS].ravel().tolist()
    for value in (texts[0], texts[:1], [texts[:1]]):
        sent = ask(own, "POST", "/v2/models/embed/generate", json.dumps({"TEXT": value}).encode())
        assert sent.json[IDS] == one
    raw = ask(own, "POST", "/v2/models/embed/infer", texts[0].encode(), {HEADER_LENGTH: "0"})
    assert struct.pack(f"<{len(one)}q", *one) in raw.body
    message = service_pb2.ModelInferRequest(model_name="embed")
    given = message.inputs.add(name="TEXT", datatype="BYTES", shape=[2, 1])
    given.contents.bytes_contents.extend(text.encode() for text in texts)
    with connect(own, "grpc").raw as grpc:
        stub: service_pb2_grpc.GRPCInferenceServiceStub = grpc._client_stub
        answer = stub.ModelInfer(message)
    ids = next(n for n, output in enumerate(answer.outputs) if output.name == IDS)
    assert np.frombuffer(answer.raw_output_contents[ids], np.int64).tolist() == wanted


def test_texts_and_tokens_are_in_shared_memory(client: Client) -> None:
    texts = ["a cat sleeps", "rates"]
    wanted, sent = expected(texts)[IDS], texts_of(*texts)
    key, packed = f"/cohabit-texts-{os.getpid()}", serialized(sent)
    handle = shm.create_shared_memory_region("texts", key, 1024)
    try:
        shm.set_shared_memory_region(handle, [np.frombuffer(packed, np.uint8)])
        client.raw.register_system_shared_memory("texts", key, 1024)
        asked_in = client.input_in("texts", "TEXT", [2, 1], "BYTES", len(packed))
        written = client.output_in("texts", IDS, wanted.nbytes, 512)
        client.raw.infer("embed", [asked_in], outputs=[written])
        np.testing.assert_array_equal(
            shm.get_contents_as_numpy(handle, np.int64, list(wanted.shape), offset=512), wanted
        )
    finally:
        client.raw.unregister_system_shared_memory("texts")
        shm.destroy_shared_memory_region(handle)


def serialized(texts: Array) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts.ravel())


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([b"a", b"\xff\xfe"], r"step 1 \('tokens'\): row 1 of input 'text' is not UTF-8"),
        (["a " * MOST], rf"step 1 \('tokens'\): a text has {MOST + 2} tokens, model 'bert' takes at most {MOST}"),
        (
            ["a" * 1000],
            r"step 1 \('tokens'\): row 0 of input 'text' has 1000 characters, at most 768 are tokenized",
        ),
        (["a"] * 9, "inference request batch-size must be <= 8 for 'embed'"),
    ],
)
def test_texts_that_cannot_be_tokenized_are_refused_by_step_and_tensor(
    client: Client, texts: list[str | bytes], message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        asked(client, "embed", ["SUM"], TEXT=texts_of(*texts))
    assert client.status(caught.value) in ("400", "INVALID_ARGUMENT")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": [1, 1], "data": [7]}, "data of input 'TEXT' is not an array of strings"),
        ({"shape": [1, 1], "data": [["a"], ["b"]]}, "data of input 'TEXT' is not nested like its shape [1, 1]"),
        ({"shape": [2, 1], "data": ["a", ["b"]]}, "data of input 'TEXT' is not nested like its shape [2, 1]"),
        ({"shape": [2, 1], "data": ["a"]}, "input 'TEXT' has 1 elements, but its shape [2, 1] takes 2"),
        ({"shape": [1, 1], "data": [[["a"]]]}, "data of input 'TEXT' is not an array of strings"),
        ({"shape": [1], "data": ["a"]}, "unexpected shape for input 'TEXT' for model 'embed'. Expected [-1, 1]"),
        ({"shape": [1, 1], "data": ["a"] * 2049}, "input 'TEXT' has 2049 elements, but its shape [1, 1] takes 1"),
        ({"shape": [1, 1], "data": ["a"] * 9000}, "input 'TEXT' has over 2048 elements of BYTES"),
        ({"shape": [1, 1], "data": [None]}, "data of input 'TEXT' is not an array of strings"),
        ({"shape": [1, 1], "data": ["\ud800"]}, "failed to parse the request JSON"),
        (
            {"shape": [1, 1], "datatype": "INT64", "data": [1]},
            "data-type is 'INT64', but model 'embed' expects 'BYTES'",
        ),
    ],
)
def test_json_that_is_no_texts_is_refused_by_tensor(own: Running, given: dict[str, Any], message: str) -> None:
    answer = infer_json(own, **given)
    assert answer.status == 400
    assert message in answer.error


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x01\0\0", "element 0 of input 'TEXT' is cut off"),
        (b"\x05\0\0\0abc", "element 0 of input 'TEXT' is cut off"),
        (b"\xff\xff\xff\xffabc", "element 0 of input 'TEXT' is cut off"),
        (b"\x01\0\0\0a\x01\0\0\0b", "input 'TEXT' has 2 elements, but its shape [1, 1] takes 1"),
        (b"\0\0\0\0" * 3000, "input 'TEXT' has 2049 elements, but its shape [1, 1] takes 1"),
        (b"", "input 'TEXT' has 0 elements, but its shape [1, 1] takes 1"),
        (b"a" * ((1 << 20) + 1), "input 'TEXT' has 1048577 bytes, BYTES takes 1048576 at most"),
    ],
)
def test_bytes_that_are_no_texts_are_refused_by_tensor(own: Running, body: bytes, message: str) -> None:
    parameters = {"binary_data_size": len(body)}
    given = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "parameters": parameters}
    header = json.dumps({"inputs": [given]}).encode()
    answer = ask(own, "POST", "/v2/models/embed/infer", header + body, {HEADER_LENGTH: str(len(header))})
    assert answer.status == 400
    assert message in answer.error


def test_texts_of_different_lengths_need_a_mask(client: Client) -> None:
    assert asked(client, "only_ids", [IDS], text=texts_of("a cat", "rates rise"))[IDS].shape == (2, 4)
    with pytest.raises(InferenceServerException, match="has no input attention_mask that would tell padding"):
        asked(client, "only_ids", [IDS], text=texts_of("a", "rates rise"))


def test_padding_is_counted_before_it_takes_memory(client: Client) -> None:
    """One long text would pad each of two thousand short ones to its length."""
    texts = texts_of("a cat " * 5000, *["a"] * 2000, shape=(2001,))
    with pytest.raises(InferenceServerException, match="2001 texts, padded to 10002 tokens, have over 300000"):
        asked(client, "free_tokens", [IDS], text=texts)


def test_a_text_that_the_package_cannot_split_is_refused(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="the texts cannot be tokenized: WordLevel"):
        asked(client, "strict_tokens", [IDS], text=texts_of("cat dog"))
    assert asked(client, "strict_tokens", [IDS], text=texts_of("cat"))[IDS].tolist() == [[4]]


def test_long_texts_are_tokenized_in_pieces_outside_the_event_loop(
    client: Client, own: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[int, int]] = []
    tokens = LoadedTokenizer.tokens

    def record(self: LoadedTokenizer, texts: Sequence[str], **options: Any) -> Any:
        pieces.append((threading.get_ident(), sum(map(len, texts))))
        return tokens(self, texts, **options)

    async def thread() -> int:
        return threading.get_ident()

    monkeypatch.setattr(LoadedTokenizer, "tokens", record)
    event_loop = asyncio.run_coroutine_threadsafe(thread(), own.loop).result(20)
    answer = asked(client, "free_tokens", [IDS], text=texts_of(*["a cat " * 2000] * 4, shape=(4,)))[IDS]
    assert answer.shape == (4, 4002)
    assert [size for _, size in pieces] == [12_000] * 4
    assert event_loop not in {on for on, _ in pieces}


def test_an_ensemble_waits_for_its_tokenizer_and_is_loaded_with_it(tmp_path: Path) -> None:
    loaded = serving(encoder("bert", IDS, MASK))
    write_repository(tmp_path, loaded)
    put(tmp_path, "embed", ENSEMBLES["embed"])
    put(tmp_path, "tokens", TOKENIZERS["tokens"])
    file = tmp_path / "tokens" / "tokenizer.json"
    package().save(str(file))
    with (
        running(loaded, repository=tmp_path, model_control="explicit", load_models=("embed",)) as handle,
        connect(handle, "http").raw as raw,
    ):
        client = Client("http", tritonclient.http, raw)
        wanted = asked(client, "embed", ["SUM"], TEXT=texts_of("a cat"))["SUM"]
        raw.unload_model("tokens")
        with pytest.raises(InferenceServerException, match=r"step 1 \('tokens'\) is not ready: unloaded"):
            asked(client, "embed", ["SUM"], TEXT=texts_of("a cat"))
        document = file.read_text()
        file.unlink()
        with pytest.raises(InferenceServerException, match=r"its folder has no file tokenizer\.json"):
            raw.load_model("tokens")
        file.write_text(document.replace('"cat": 4', '"cat": 5').replace('"sleeps": 5', '"sleeps": 4'))
        raw.load_model("tokens")
        np.testing.assert_array_equal(asked(client, "embed", ["SUM"], TEXT=texts_of("a sleeps"))["SUM"], wanted)
        file.write_text("{}")
        with pytest.raises(
            InferenceServerException, match=r"step 1 \('tokens'\): model 'tokens': its tokenizer.json"
        ):
            asked(client, "embed", ["SUM"], TEXT=texts_of("a cat"))


def reason_of(folder: Path, text: str, has_file: bool = True) -> str:
    """Return why a tokenizer is not served; empty if it is."""
    put(folder, "t", text)
    if has_file:
        package().save(str(folder / "t" / "tokenizer.json"))
    (found,) = scan(folder)
    return found.reason if isinstance(found, Unloadable) else ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tokens_config(*NAMES), ""),
        (tokens_config(*NAMES, length=5, texts=("a", "b"), more=cutting("false")), ""),
        (tokens_config(IDS, most_batch=0, length=7), ""),
        (tokens_config(IDS, texts=("a", "b", "c")), "a tokenizer takes a text, or two for pairs of texts; it has 3"),
        (tokens_config(IDS, texts=()), "there is no input"),
        (tokens_config(), "there is no output"),
        (tokens_config(IDS, IDS), "output 'input_ids' is there twice"),
        (tokens_config("ids"), "a tokenizer has no output 'ids'; it has input_ids, attention_mask, token_type_ids"),
        (tokens_config(IDS, more=cutting("maybe")), "parameter 'truncate': 'maybe' is neither true nor false"),
        (tokens_config(IDS, more="instance_group { count: 1 }"), "a tokenizer has no instance_group"),
        (tokens_config(IDS, more="platform: 'pytorch_pt2'"), "a tokenizer has no platform"),
        (tokens_config(IDS).replace("STRING", "INT64"), "input 'text' is TYPE_INT64; a tokenizer takes texts"),
        (tokens_config(IDS).replace("INT64", "FP32"), "output 'input_ids' is TYPE_FP32; it can be TYPE_INT64"),
        (tokens_config(IDS).replace("dims: [ 1 ]", "dims: [ 2 ]"), "input 'text' has dims [2]; they must be [1]"),
        (tokens_config(IDS).replace("dims: [ 1 ]", ""), "input 'text' has dims []; they must be [1]"),
        (tokens_config(IDS).replace("dims: [ -1 ]", "dims: [ -1, -1 ]"), "they must be [-1], or [N] for N tokens"),
        (tokens_config(IDS) + tensor("output", MASK, "INT64", "9"), "output 'attention_mask' has dims [9]"),
        (tokens_config(IDS).replace("INT64", "STRING"), "output 'input_ids' is TYPE_STRING; only tokenizers take"),
    ],
)  # fmt: skip
def test_a_wrong_tokenizer_is_refused_with_its_field_or_tensor(tmp_path: Path, text: str, reason: str) -> None:
    found = reason_of(tmp_path, text)
    assert reason in found
    assert bool(found) == bool(reason)


def test_a_tokenizer_needs_its_file_within_the_repository(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    missing = "config.pbtxt: backend 'tokenizer': its folder has no file tokenizer.json"
    assert reason_of(repository, tokens_config(IDS), has_file=False) == missing
    package().save(str(tmp_path / "outside.json"))
    link = repository / "t" / "tokenizer.json"
    link.symlink_to(tmp_path / "outside.json")
    assert "is a link that leads out of the repository" in reason_of(repository, tokens_config(IDS), has_file=False)
    link.unlink()
    (repository / "model" / "1").mkdir(parents=True)
    package().save(str(repository / "model" / "tokenizer.json"))
    link.symlink_to("../model/tokenizer.json")
    assert [found.name for found in scan(repository) if isinstance(found, EnsembleSource)] == ["t"]
