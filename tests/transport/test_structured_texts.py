"""Texts that follow schemas: from a model of random logits, through tokenizers of several kinds."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from tests.support.server.server_http import ask
from tests.support.server.transport_fakes import FakeModel, Ports, running, tensors

CONTEXT, MOST = 2000, 64
CORPUS = [
    '{"name": "Ada Lövelace", "age": 36, "tags": ["a", "b"]}',
    "The quick brown fox\njumps over 東京 😀",
    "true",
]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n", "😀"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "string", "pattern": "^[a-c]{1,3}$"},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        }
    },
}


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<end>", "[TOOL_CALLS]"]
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As of Llama 2 and Mistral."""
    pieces = ["<end>", "[TOOL_CALLS]", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(
        {letter for text in CORPUS for letter in text.replace(" ", "▁")} | set('abcdef:{}[],"0123456789')
    )
    merges = [("▁", "{"), ("▁", '"'), ('"', ":"), ("n", "a"), ("na", "m"), ("nam", "e"), ("▁", "1"), ("}", "}")]
    vocabulary = {piece: n for n, piece in enumerate([*pieces, *letters, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<end>", "[TOOL_CALLS]", "<unk>"])
    return tokenizer


def word_piece() -> Tokenizer:
    vocabulary = {
        word: n for n, word in enumerate(["<end>", "[UNK]", "a", "##b", "{", "}", '"', "##{", ".", "##."])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["<end>", "[UNK]"])
    return tokenizer


class Noise:
    """A language model of random logits, by the number of its tokens so far and the last one."""

    def __init__(self, vocabulary: int) -> None:
        dynamic = DynamicShape((Dimension("t", 0, 1, 1, 0, 1, MOST, (MOST,)),))
        inputs = (TensorSpec("input_ids", "INT64", (-1,), sizes=("t",)),)
        outputs = tensors(("logits", "FP32", (vocabulary,)))
        info = ModelInfo("lm", 1, inputs, outputs, 8, dynamic=dynamic, sequences=True, context=CONTEXT)
        self.vocabulary, self.steps = vocabulary, 0
        self.model = FakeModel(info, self.answer)

    def answer(self, input_ids: Array) -> dict[str, Array]:
        self.steps += 1
        seed = [int(input_ids[0, -1]), self.steps]
        return {"logits": np.random.default_rng(seed).normal(size=(1, self.vocabulary)).astype(np.float32)}


def served(tmp_path: Path, tokenizer: Tokenizer, template: str | None = None) -> Iterator[Ports]:
    folder = tmp_path / "lm"
    folder.mkdir()
    document = {"stop_ids": [tokenizer.token_to_id("<end>")], "chat_template": template}
    (folder / "generation.json").write_text(json.dumps(document))
    tokenizer.save(str(folder / "tokenizer.json"))
    # Models often have more logits than their tokenizers have tokens.
    with running(Noise(tokenizer.get_vocab_size() + 13).model, repository=tmp_path) as ports:
        yield ports


@pytest.fixture(params=[byte_level, byte_fallback])
def ports(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ports]:
    yield from served(tmp_path, request.param())


def completed(ports: Ports, **more: Any) -> Any:
    body = {"model": "lm", "prompt": "a: ", "max_tokens": 1500, "seed": 1, **more}
    return ask(ports, "POST", "/v1/completions", json.dumps(body).encode())


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


@pytest.mark.parametrize("schema", [PERSON, TREE], ids=["person", "tree"])
@pytest.mark.parametrize("more", [{}, {"temperature": 0}, {"top_p": 0.3}, {"logit_bias": {"5": 100}}], ids=str)
def test_texts_obey_their_schema(ports: Ports, schema: Any, more: dict[str, Any]) -> None:
    answer = completed(ports, n=4, **schema_of(schema), **more).json
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["text"]), schema)


def test_a_text_whose_schema_has_no_end_in_sight_ends_by_length(ports: Ports) -> None:
    (choice,) = completed(ports, max_tokens=3, **schema_of(PERSON)).json["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
        ({"guided_regex": r"[ab]{3}/\d\\\n\/x"}, r"[ab]{3}/[0-9]\\\n/x"),
        ({"guided_choice": ['say "no"', "東京/"]}, 'say "no"|東京/'),
        ({"guided_json": {"enum": [1, "x"]}}, '1|"x"'),
        ({"structured_outputs": {"regex": "x+y"}}, "x+y"),
        ({"structured_outputs": {"choice": ["x"]}}, "x"),
    ],
    ids=str,
)
def test_other_structures_are_obeyed(ports: Ports, field: dict[str, Any], pattern: str) -> None:
    (choice,) = completed(ports, **field).json["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["text"]), choice["text"]
