"""Texts of token streams: all pieces together equal transformers' decoding, and tokens have names and bytes."""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cohabit.server.frontend.tokenizers import LoadedTokenizer
from cohabit.server.importing.folder_tokenizer import FolderTokenizer, entry_tokenizer

SPECIAL = ["<|end|>", "<|start|>"]
SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and runs away; isn't it fun?",
    "Grüße aus München: äöü ß € 你好世界 😀 \N{REPLACEMENT CHARACTER} naïve café",
]
STREAMS = 200


def trained(model: models.Model, trainer: trainers.Trainer, pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer = pre
    made.train_from_iterator(SENTENCES * 5, trainer)
    return made


def byte_level() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made = trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<tool>", special=False)])
    return made


def byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    """Llama's form: words begin with a visible space, and other characters are bytes."""
    parts = ["▁", "▁the", "the", "▁fox", "fox", "ü", "▁▁", ".", "▁ü", *"thefox"]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *parts]
    vocabulary = {name: n for n, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoder
    made.add_special_tokens(SPECIAL)
    return made


def llama() -> Tokenizer:
    strip = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made = byte_fallback(decoders.Sequence(strip))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


def gemma() -> Tokenizer:
    return byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Tokenizer:
    return byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>")
    made = trained(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    made.decoder = decoders.Metaspace()
    return made


def wordpiece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=[*SPECIAL, "[UNK]"])
    made = trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer())
    made.decoder = decoders.WordPiece()
    return made


def word_level() -> Tokenizer:
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL, "[UNK]"])
    return trained(models.WordLevel(unk_token="[UNK]"), trainer, pre_tokenizers.WhitespaceSplit())


def suffixes() -> Tokenizer:
    """CLIP's and GPT's form: the last token of a word has a suffix."""
    trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, end_of_word_suffix="</w>")
    made = trained(models.BPE(), trainer, pre_tokenizers.WhitespaceSplit())
    made.decoder = decoders.BPEDecoder()
    return made


KINDS = {
    made.__name__: made for made in (byte_level, llama, gemma, metaspace, unigram, wordpiece, word_level, suffixes)
}


@cache
def both(kind: str, cleans_up: bool = False) -> tuple[LoadedTokenizer, PreTrainedTokenizerFast]:
    made = KINDS[kind]()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=made, clean_up_tokenization_spaces=cleans_up, extra_special_tokens=SPECIAL
    )
    return LoadedTokenizer(made, 0), whole


def drawn(tokenizer: Tokenizer, draws: random.Random) -> list[int]:
    """A stream of any tokens, of texts' tokens, or of both; some are unknown to the tokenizer."""
    tokens: list[int] = []
    for _ in range(draws.randint(1, 6)):
        if draws.random() < 0.5:
            tokens += [draws.randrange(tokenizer.get_vocab_size() + 2) for _ in range(draws.randint(1, 30))]
        else:
            text = "".join(draws.choices(" ".join(SENTENCES), k=draws.randint(1, 30)))
            tokens += tokenizer.encode(text, add_special_tokens=False).ids
    return tokens


def streamed(loaded: LoadedTokenizer, prompt: Sequence[int], tokens: Sequence[int], cleans_up: bool = False) -> str:
    decoder = loaded.decoder(prompt, cleans_up=cleans_up)
    return "".join([*map(decoder.push, tokens), decoder.flush()])


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_pieces_equal_transformers_decoding(kind: str) -> None:
    loaded, whole = both(kind)
    for seed in range(STREAMS):
        tokens = drawn(loaded.tokenizer, random.Random(seed))
        assert streamed(loaded, [], tokens) == whole.decode(tokens, skip_special_tokens=True), (seed, tokens)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "word_level"])
def test_streamed_pieces_are_cleaned_up_as_transformers_does(kind: str) -> None:
    loaded, whole = both(kind, cleans_up=True)
    marks = [t for t in range(loaded.tokenizer.get_vocab_size()) if loaded.name(t).strip(" #▁") in list("',.?st")]
    for seed in range(STREAMS):
        draws = random.Random(seed)
        tokens = [
            t for token in drawn(loaded.tokenizer, draws) for t in (token, *draws.choices(marks or [token], k=2))
        ]
        found = streamed(loaded, [], tokens, cleans_up=True)
        assert found == whole.decode(tokens, skip_special_tokens=True), (seed, tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_continues_its_prompt_and_does_not_repeat_it(kind: str) -> None:
    """Also after prompts that end within a character: together they are the decoded text of all tokens."""
    loaded, whole = both(kind)
    for seed in range(STREAMS):
        draws = random.Random(seed)
        prompt, tokens = drawn(loaded.tokenizer, draws), drawn(loaded.tokenizer, draws)
        before = whole.decode(prompt, skip_special_tokens=True)
        text = whole.decode([*prompt, *tokens], skip_special_tokens=True)
        found = streamed(loaded, prompt, tokens)
        if text.startswith(before):
            assert found == text[len(before) :], (seed, prompt, tokens)
        else:  # the bytes at the prompt's end have become other characters
            assert text.endswith(found), (seed, prompt, tokens)
            assert len(found) <= len(text) - len(before.rstrip("\N{REPLACEMENT CHARACTER}")) + len(prompt)


def test_a_prompt_that_ends_in_a_replacement_character_is_not_repeated() -> None:
    loaded, _ = both("byte_level")
    prompt = loaded.tokenizer.encode("Hello there \N{REPLACEMENT CHARACTER}", add_special_tokens=False).ids
    more = loaded.tokenizer.encode(" fox", add_special_tokens=False).ids
    assert streamed(loaded, prompt, more) == " fox"
    half = loaded.tokenizer.encode("Hello 😀", add_special_tokens=False).ids
    assert streamed(loaded, half[:-1], [half[-1], *more]) == "😀 fox"


def test_text_is_sent_as_soon_as_its_characters_are_complete() -> None:
    loaded, _ = both("byte_level")
    ids = loaded.tokenizer.encode("a😀b", add_special_tokens=False).ids
    decoder = loaded.decoder([])
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces) == "a😀b"
    assert pieces[0] == "a"
    assert pieces[-2] == "😀"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "suffixes"])
def test_the_bytes_of_tokens_are_those_of_their_text(kind: str) -> None:
    loaded, _ = both(kind)
    for sentence in SENTENCES:
        ids = loaded.tokenizer.encode(sentence, add_special_tokens=False).ids
        found = b"".join(map(loaded.bytes_of, ids)).decode(errors="replace")
        assert found.removeprefix(" ") == loaded.decoded(ids).removeprefix(" ")


def test_tokens_have_different_names() -> None:
    loaded, _ = both("llama")
    names = [loaded.name(token) for token in range(loaded.tokenizer.get_vocab_size() + 1)]
    assert {" the", "the", " ", "bytes:\\xf0", "<|end|>", "A"} <= set(names)
    assert names[-1] == f"token_id:{len(names) - 1}"


def test_an_entrys_tokenizer_has_what_transformers_adds_to_the_file(tmp_path: Path) -> None:
    """Special tokens that only tokenizer_config.json names are one token in both; the file alone splits them."""
    names = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz<>/s"]
    vocabulary = {name: n for n, name in enumerate(dict.fromkeys(names))}
    Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    document, notes = entry_tokenizer(FolderTokenizer.of(tmp_path))
    assert document is not None
    assert notes == ()
    served, own = Tokenizer.from_str(document.decode()), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("<s>fox</s>", "</s>", "a<s>", "fox"):
        assert served.encode(text).ids == own(text)["input_ids"]
    alone = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert len(alone.encode("</s>").ids) > len(served.encode("</s>").ids) == 1
