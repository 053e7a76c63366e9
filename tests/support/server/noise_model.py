"""A language model of random logits, with tokenizers of several kinds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from cohabit.planner.shapes import Dimension, DynamicShape
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from tests.support.server.transport_fakes import FakeModel, Ports, running, tensors

CONTEXT = 6000
CORPUS = [
    '{"name": "Ada Lövelace", "age": 36, "tags": ["a", "b"]}',
    "The quick brown fox\njumps over 東京 😀",
    "true",
]


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
    """A language model of random logits, which says the tokens of a script first, as far as it may."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Models often have more logits than their tokenizers have tokens.
        self.tokenizer, self.vocabulary = tokenizer, tokenizer.get_vocab_size() + 13
        self.script: list[int] = []
        self.steps = 0
        dynamic = DynamicShape((Dimension("t", 0, 1, 1, 0, 1, CONTEXT, (CONTEXT,)),))
        inputs = (TensorSpec("input_ids", "INT64", (-1,), sizes=("t",)),)
        outputs = tensors(("logits", "FP32", (self.vocabulary,)))
        info = ModelInfo("lm", 1, inputs, outputs, 8, dynamic=dynamic, sequences=True, context=CONTEXT)
        self.model = FakeModel(info, self.answer)

    def say(self, text: str) -> None:
        """Begin the next text with this one."""
        self.script, self.steps = self.tokenizer.encode(text, add_special_tokens=False).ids, 0

    def answer(self, input_ids: Array) -> dict[str, Array]:
        seed = [int(input_ids[0, -1]), self.steps]
        logits = np.random.default_rng(seed).normal(size=(1, self.vocabulary)).astype(np.float32)
        if self.steps < len(self.script):
            logits[0, self.script[self.steps]] = 50
        self.steps += 1
        return {"logits": logits}


@contextmanager
def served(folder: Path, tokenizer: Tokenizer, template: str | None = None) -> Iterator[tuple[Ports, Noise]]:
    """Serve the model "lm" on free ports."""
    (folder / "lm").mkdir()
    document = {"stop_ids": [tokenizer.token_to_id("<end>")], "chat_template": template}
    (folder / "lm" / "generation.json").write_text(json.dumps(document))
    tokenizer.save(str(folder / "lm" / "tokenizer.json"))
    noise = Noise(tokenizer)
    with running(noise.model, repository=folder) as ports:
        yield ports, noise


def word_level() -> Tokenizer:
    """Tokens with spaces between them."""
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "{": 1, "}": 2, "a": 3}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer
