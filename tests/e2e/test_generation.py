"""Texts, token by token: the tokens of transformers' own `generate`, whatever else happens."""

import argparse
import asyncio
import http.client
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache as kept
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import tritonclient.http as triton
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cohabit.loadgen.load import Load
from cohabit.loadgen.run import run_load
from cohabit.server.cli import main
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import parse_memory
from cohabit.server.config.sources import add_flags, read_settings
from cohabit.server.importing.entry import EntryPlace, write_entry
from cohabit.server.importing.huggingface import from_folder
from cohabit.server.importing.huggingface_inputs import Lengths
from tests.support.e2e.serving import QUICK_SEARCH, Running, ask, eventually, metric, process, serving

VOCABULARY, CONTEXT, BATCHES = 300, 96, (1, 2, 4)
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
ONE_LAYER = {"num_hidden_layers": 1}
"""Exporting and lowering take seconds per layer; one architecture has two."""
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", LLAMA),
    "mistral": ("MistralConfig", {**LLAMA, **ONE_LAYER, "sliding_window": 40}),
    "gpt": (
        "GPT2Config",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": CONTEXT},
    ),
    "opt": (
        "OPTConfig",
        {**SIZES, **ONE_LAYER, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": CONTEXT},
    ),
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message['role']) }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@kept
def model_of(name: str) -> Any:
    """A model whose logits are far enough apart for rounding not to matter."""
    kind, sizes = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes, **ENDS)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(8)
    return model


def tokenizer() -> Tokenizer:
    """A token for each byte, after three special ones."""
    special = {"<s>": 0, "</s>": 1, "<pad>": 2}
    bytes_of = {c: n + 3 for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE({**special, **bytes_of}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("generation")
    config = ServeConfig(folder, parse_memory("1B"), cache=cache, batch_sizes=BATCHES)
    for name in ARCHITECTURES:
        source = folder / "sources" / name
        model_of(name).save_pretrained(source)
        if name == "llama":
            tokenizer().save(str(source / "tokenizer.json"))
            end = {"__type": "AddedToken", "content": "</s>"}
            written = {"bos_token": "<s>", "eos_token": end, "chat_template": TEMPLATE}
            (source / "tokenizer_config.json").write_text(json.dumps(written))
        subject = from_folder(source, (), Lengths())
        assert subject.decoding is not None, subject.notes
        write_entry(subject, EntryPlace(folder / "models", name), max(BATCHES), config, lambda stage: None)
    return folder / "models"


@pytest.fixture(scope="module")
def server(repository: Path, cache: Path) -> Iterator[Running]:
    with serving(repository, "8MiB", cache, batch_sizes=BATCHES) as running:
        yield running


def test_a_tokenizer_that_transformers_cannot_read_is_named_at_import(tmp_path: Path) -> None:
    model_of("llama").save_pretrained(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    subject = from_folder(tmp_path, (), Lengths())
    assert subject.decoding is not None
    assert any("it has no chats: transformers cannot read its tokenizer (Special" in note for note in subject.notes)


def expected(name: str, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates."""
    return _expected(name, tuple(prompt), count)


@kept
def _expected(name: str, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model_of(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, use_cache=True
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


def complete(address: str, name: str, prompt: str | Sequence[int], **more: Any) -> dict[str, Any]:
    body = {"model": name, "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
    status, answer = ask(address, "POST", "/v1/completions", body)
    assert status == 200, answer
    found: dict[str, Any] = answer
    return found


def tokens_of(answer: Mapping[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


@contextmanager
def streamed(address: str, path: str, body: Mapping[str, Any]) -> Iterator[Iterator[Any]]:
    """The events of a stream, as they come."""
    connection = http.client.HTTPConnection(address, timeout=120)
    connection.request("POST", path, json.dumps({**body, "stream": True}).encode())
    response = connection.getresponse()
    assert response.status == 200, response.read()

    def events() -> Iterator[Any]:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))

    try:
        yield events()
    finally:
        response.close()
        connection.close()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draws = np.random.default_rng(seed)
    return [draws.integers(3, VOCABULARY, draws.integers(1, 70)).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("store", "names"), [("ram", tuple(ARCHITECTURES)), ("file", ("llama", "gpt"))], ids=["ram", "file"]
)
def test_texts_that_come_and_go_have_the_tokens_of_transformers(
    repository: Path, cache: Path, store: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """In little memory, prompts and texts of many lengths, for several models at once; each token forms batches."""
    for name in names:
        shutil.copytree(repository / name, tmp_path / name)
    # The token that is generated last is not an input of another step.
    most = {len(prompt): CONTEXT + 1 - len(prompt) for prompt in prompts(6)}
    asked = [
        (name, prompt, min(3 + 5 * n, most[len(prompt)])) for name in names for n, prompt in enumerate(prompts(6))
    ]
    with serving(tmp_path, "2MiB", cache, batch_sizes=BATCHES, store=store) as server:

        def run(one: tuple[str, list[int], int]) -> list[int]:
            name, prompt, count = one
            return tokens_of(complete(server.address, name, prompt, max_tokens=count))

        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(run, asked))
        eventually(lambda: all(metric(server.metrics_address, "cohabit_sequences", n) == 0 for n in names))
    for (name, prompt, count), answer in zip(asked, answers, strict=True):
        assert answer == expected(name, prompt, count), (name, len(prompt))


def cached_of(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_next_turn_begins_where_the_last_one_ended(server: Running) -> None:
    """It continues the text of the same model that has the most of its tokens, whether that has ended or not."""
    prompt = np.random.default_rng(5).integers(3, VOCABULARY, 40).tolist()
    first = complete(server.address, "llama", prompt, max_tokens=12)
    assert cached_of(first) == 0
    whole = [*prompt, *tokens_of(first)]
    turns = [
        ([*whole, 9, 8, 7], len(whole) - 1),
        ([*prompt[:20], 5, 5, 6], 20),
        (whole, len(whole) - 1),
        (prompt, 39),
    ]
    for turn, cached in turns:
        answer = complete(server.address, "llama", turn, max_tokens=5)
        assert tokens_of(answer) == expected("llama", turn, 5)
        assert cached_of(answer) == cached
    assert cached_of(complete(server.address, "mistral", prompt, max_tokens=1)) == 0
    with ThreadPoolExecutor(6) as clients:
        asked = [[*prompt, n] for n in range(3, 9)]
        answers = list(clients.map(lambda own: complete(server.address, "llama", own, max_tokens=9), asked))
    assert [tokens_of(answer) for answer in answers] == [expected("llama", own, 9) for own in asked]
    assert min(map(cached_of, answers)) >= 40 - 1
    eventually(lambda: metric(server.metrics_address, "cohabit_sequences", "llama") == 0)


def test_texts_go_on_after_a_reload_with_the_same_weights(repository: Path, cache: Path, tmp_path: Path) -> None:
    """One that streams, and the next turn of one that had ended."""
    shutil.copytree(repository / "llama", tmp_path / "llama")
    prompt = np.random.default_rng(11).integers(3, VOCABULARY, 40).tolist()
    options: dict[str, Any] = {"model_control": "explicit", "load_models": ("llama",)}
    with serving(tmp_path, "8MiB", cache, batch_sizes=BATCHES, **options) as server:
        whole = [*prompt, *tokens_of(complete(server.address, "llama", prompt, max_tokens=12))]
        body = {
            "model": "llama",
            "prompt": prompt[:5],
            "temperature": 0,
            "max_tokens": 40,
            "return_token_ids": True,
        }
        got: list[int] = []
        with streamed(server.address, "/v1/completions", body) as events:
            for event in events:
                assert "error" not in event, event
                got += event["choices"][0].get("token_ids", [])
                if len(got) == 3:
                    before = list(server.placement.memory.models)
                    os.utime(tmp_path / "llama" / "1" / "model.pt2", (1, 1))
                    with triton.InferenceServerClient(server.address, network_timeout=120.0) as client:
                        client.load_model("llama")
                    assert list(server.placement.memory.models) != before
        assert got == expected("llama", prompt[:5], 40)
        answer = complete(server.address, "llama", [*whole, 9, 8, 7], max_tokens=5)
        assert (tokens_of(answer), cached_of(answer)) == (expected("llama", [*whole, 9, 8, 7], 5), len(whole) - 1)


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_texts_that_share_their_beginnings_have_the_tokens_of_transformers(
    repository: Path, cache: Path, tmp_path: Path, count: int
) -> None:
    """Prompts branch off one another at any place; clients leave in the middle; memory holds a few of the texts."""
    shutil.copytree(repository / "llama", tmp_path / "llama")
    draws = np.random.default_rng(count)
    prompts = [draws.integers(3, VOCABULARY, 60).tolist()]
    for _ in range(count - 1):
        other = prompts[draws.integers(len(prompts))]
        own = draws.integers(3, VOCABULARY, draws.integers(0, 20)).tolist()
        prompts.append([*other[: draws.integers(1, len(other) + 1)], *own][:80])
    most = draws.integers(1, 15, count).tolist()
    leaves = (draws.random(count) < 0.2).tolist()
    with serving(tmp_path, "8MiB", cache, batch_sizes=BATCHES, queue_bytes=512 << 10) as server:

        def run(number: int) -> tuple[list[int], int]:
            prompt = prompts[number]
            if leaves[number]:
                body = {"model": "llama", "prompt": prompt, "temperature": 0, "max_tokens": 15}
                with streamed(server.address, "/v1/completions", body) as events:
                    next(iter(events))
                return [], 0
            answer = complete(server.address, "llama", prompt, max_tokens=most[number])
            return tokens_of(answer), cached_of(answer)

        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(run, range(count)))
        eventually(lambda: metric(server.metrics_address, "cohabit_sequences", "llama") == 0)
        assert metric(server.metrics_address, "cohabit_state_bytes", "llama") <= 512 << 10
    for number, (tokens, _) in enumerate(answers):
        if not leaves[number]:
            assert tokens == expected("llama", prompts[number], most[number]), number
    assert sum(cached for _, cached in answers) > 0


def test_a_text_goes_on_with_the_same_tokens_after_its_engine_was_killed(
    repository: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(repository / "llama", tmp_path / "llama")
    with process(tmp_path, "8MiB", cache, "--batch-sizes", "1,2,4") as server:
        server.until_ready()
        for turn, prompt in enumerate(prompts(2, seed=7)):
            own = expected("llama", prompt[:20], 40)
            body = {"model": "llama", "prompt": prompt[:20], "temperature": 0, "max_tokens": 40}
            got: list[int] = []
            with streamed(server.address, "/v1/completions", {**body, "return_token_ids": True}) as events:
                for event in events:
                    assert "error" not in event, event
                    got += event["choices"][0].get("token_ids", [])
                    if len(got) == 5 + turn:
                        server.engine().kill()
            assert got == own


def test_a_bundle_generates_the_same_texts(repository: Path, cache: Path, tmp_path: Path) -> None:
    """With what a warm-up asks for: a sequence of one request, before the model is served."""
    root, bundle = tmp_path / "models", tmp_path / "bundle"
    shutil.copytree(repository / "llama", root / "llama")
    with (root / "llama" / "config.pbtxt").open("a") as config:
        tokens = "inputs { key: 'input_ids' value { data_type: TYPE_INT64 dims: [1, 3] zero_data: true } }"
        config.write(f"model_warmup {{ name: 'w' batch_size: 1 {tokens} }}")
    flags = ["--memory", "8MiB", "--batch-sizes", "1,2,4", "--search", QUICK_SEARCH, "--cache", str(cache)]
    assert main(["export-bundle", str(root), "--output", str(bundle), *flags]) == 0
    parser = argparse.ArgumentParser()
    add_flags(parser)
    config = read_settings(parser.parse_args([str(bundle)]), {}).config
    changes = {key: getattr(config, key) for key in ("bundle", "store", "batch_sizes", "pack_weights")}
    prompt = prompts(1, seed=3)[0]
    with serving(config.repository, "8MiB", config.cache or tmp_path, **changes) as server:
        found = tokens_of(complete(server.address, "llama", prompt, max_tokens=9))
        status, chat = ask(
            server.address, "POST", "/v1/chat/completions",
            {"model": "llama", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
        )  # fmt: skip
    assert found == expected("llama", prompt, 9)
    assert (status, chat["usage"]["completion_tokens"] in (1, 2)) == (200, True)


def test_a_model_with_a_fixed_batch_generates_and_can_be_replaced(cache: Path, tmp_path: Path) -> None:
    config = ServeConfig(tmp_path, parse_memory("1B"), cache=cache, batch_sizes=(1,))
    model_of("gpt").save_pretrained(tmp_path / "source")
    subject, root = from_folder(tmp_path / "source"), tmp_path / "models"
    for replaces in (False, True):
        entry = write_entry(subject, EntryPlace(root, "gpt", replaces=replaces), 1, config, lambda stage: None)
        assert [tensor.name for tensor in entry.info.inputs] == ["input_ids"], "what clients send"
        assert [tensor.name for tensor in entry.info.outputs] == ["logits"]
    prompt = prompts(1, seed=5)[0]
    with serving(root, "8MiB", cache, batch_sizes=(1,)) as server:
        assert tokens_of(complete(server.address, "gpt", prompt, max_tokens=12)) == expected("gpt", prompt, 12)


def test_steps_that_differ_from_whole_texts_are_not_served(tmp_path: Path) -> None:
    """MPT's attention has distances in its scores, and takes no mask of pasts that are padded behind."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MptConfig(**sizes)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    model.save_pretrained(tmp_path / "mpt")
    subject = from_folder(tmp_path / "mpt", (), Lengths(most=40))
    assert subject.decoding is None
    assert "differ from whole texts by" in subject.notes[0]


WINDOWED = ["sliding_attention", "full_attention"]
ROPE = {"type": "longrope", "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("kind", "sizes", "most"),
    [
        (
            "GPTNeoConfig",
            {
                "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 128,
                "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 300,
            },
            64,
        ),
        (
            "Phi3Config",
            {**LLAMA, "max_position_embeddings": 96, "original_max_position_embeddings": 48, "rope_scaling": ROPE},
            48,
        ),
        ("MistralConfig", {**LLAMA, "sliding_window": 40}, CONTEXT),
        ("Gemma3TextConfig", {**LLAMA, "head_dim": 8, "sliding_window": 40, "layer_types": WINDOWED}, CONTEXT),
        ("LlamaConfig", LLAMA, CONTEXT),
    ],
)  # fmt: skip
def test_texts_are_at_most_as_long_as_steps_were_shown_to_be_right(
    kind: str, sizes: Mapping[str, Any], most: int, tmp_path: Path
) -> None:
    """Windows that count the padding, and rotations that follow the longest text of a batch."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes, **ENDS)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(6)
    model.save_pretrained(tmp_path / "model")
    subject = from_folder(tmp_path / "model", (), Lengths(most=min(200, sizes["max_position_embeddings"])))
    assert subject.decoding is not None, subject.notes
    assert subject.most_tokens == most
    limited = [note for note in subject.notes if f"sequences have at most {most} tokens, because steps" in note]
    assert bool(limited) == (most < CONTEXT)


def test_a_conversation_is_rendered_by_the_model_s_template(server: Running) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüß Gott, 你好"}]
    text = "<s>[system] Be brief.\n[user] Grüß Gott, 你好\n[assistant] "
    prompt = tokenizer().encode(text, add_special_tokens=False).ids
    own = expected("llama", prompt, 8)
    body = {"model": "llama", "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    status, answer = ask(server.address, "POST", "/v1/chat/completions", body)
    assert status == 200, answer
    assert answer["object"] == "chat.completion"
    assert tokens_of(answer) == own
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 8,
        "total_tokens": len(prompt) + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = answer["choices"][0]["message"]
    parts = [{"type": "text", "text": text} for text in ("Grüß Gott", ", 你好")]
    in_parts = {**body, "messages": [messages[0], {"role": "user", "content": parts}]}
    _, same = ask(server.address, "POST", "/v1/chat/completions", in_parts)
    assert tokens_of(same) == own
    with streamed(
        server.address, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}
    ) as events:
        chunks = list(events)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    assert chunks[-2]["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    again = {"prompt_tokens_details": {"cached_tokens": len(prompt) - 1}}
    assert chunks[-1]["usage"] == answer["usage"] | again


def test_a_text_stops_at_its_strings_and_at_the_model_s_own_token(server: Running) -> None:
    prompt = "The quick brown fox"
    whole = complete(server.address, "llama", prompt, max_tokens=24)["choices"][0]["text"]
    assert len(whole) > 12
    stop = whole[6:9]
    cut = complete(server.address, "llama", prompt, max_tokens=24, stop=["never there", stop])["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    ended = complete(server.address, "llama", prompt, max_tokens=24, logit_bias={"1": 100})
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == 1


def test_seeds_repeat_a_text_and_log_probabilities_are_the_model_s(server: Running) -> None:
    prompt, more = [9, 8, 7, 6], {"temperature": 1.0, "max_tokens": 6, "logprobs": 3}
    first, again, other = (complete(server.address, "llama", prompt, seed=s, **more) for s in (3, 3, 4))
    assert tokens_of(first) == tokens_of(again) != tokens_of(other)
    both = complete(server.address, "llama", prompt, seed=3, n=2, **more)  # the second one has the next seed
    assert [choice["token_ids"] for choice in both["choices"]] == [tokens_of(first), tokens_of(other)]
    with torch.no_grad():
        logits = model_of("llama")(torch.tensor([prompt])).logits[0, -1]
    values: NDArray[Any] = torch.log_softmax(logits.double(), -1).numpy()
    assert first["choices"][0]["logprobs"]["token_logprobs"][0] == pytest.approx(
        values[tokens_of(first)[0]], abs=1e-4
    )
    body = {"model": "llama", "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 3}
    _, chat = ask(server.address, "POST", "/v1/chat/completions", {**body, "max_tokens": 1, "temperature": 0})
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    found = [other["logprob"] for other in entry["top_logprobs"]]
    assert (len(found), found[0], sorted(found, reverse=True)) == (3, entry["logprob"], found)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": [5] * CONTEXT},
            f"the prompt has {CONTEXT} tokens, and model 'llama' takes {CONTEXT} with what it",
        ),
        ({"prompt": "x" * (64 * CONTEXT + 1)}, f"has {64 * CONTEXT + 1} characters; model 'llama'"),
        ({"prompt": [VOCABULARY]}, f"a token id that is not from 0 to {VOCABULARY - 1}"),
        ({"prompt": [-1]}, "a token id that is not from 0 to"),
        ({"prompt": []}, "the prompt has no tokens"),
        ({"prompt": ["a", 5]}, "prompt has token ids beside texts"),
        ({"prompt": {"a": 1}}, "prompt is neither a text"),
        ({"prompt": "x", "stop": ["a"] * 5}, "stop: there can be 4 strings"),
        ({"prompt": "x", "stop": "a" * 257}, "stop: there can be 4 strings of 1 to 256"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias: keys are token ids"),
        ({"prompt": "x", "temperature": -1}, "failed to parse the request JSON"),
        ({"prompt": "x", "echo": True}, "echo is not supported"),
        ({"messages": []}, "failed to parse the request JSON"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "does not take these messages: unknown role robot"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of the kinds image_url; send text",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a part of a message has no 'text'"),
        ({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 3}, "top_logprobs is 3 without logprobs"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(server: Running, body: Any, message: str) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    status, answer = ask(server.address, "POST", path, {"model": "llama", **body})
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(server: Running) -> None:
    answer = complete(server.address, "gpt", [4, 5, 6], max_tokens=4, return_token_ids=None)
    assert tokens_of(answer) == expected("gpt", [4, 5, 6], 4)
    for path, body, message in (
        ("/v1/completions", {"prompt": "text"}, "has no tokenizer; send the prompt as token ids"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "has no tokenizer.json"),
    ):
        status, refused = ask(server.address, "POST", path, {"model": "gpt", **body})
        assert (status, message in refused["error"]["message"]) == (400, True)


def test_models_that_generate_are_listed_and_measured(server: Running) -> None:
    complete(server.address, "llama", [3, 4], max_tokens=3)
    _, listed = ask(server.address, "GET", "/v1/models")
    assert "llama" in [model["id"] for model in listed["data"]]
    connection = http.client.HTTPConnection(server.metrics_address, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    assert 'cohabit_first_token_seconds_count{model="llama"' in text
    assert 'cohabit_later_token_seconds_count{model="llama"' in text


def test_loadgen_measures_texts_beside_whole_requests(server: Running, tmp_path: Path) -> None:
    rows = [f"{0.1 * n},llama,{5 + n},{3 + n}" for n in range(4)]
    (tmp_path / "trace.csv").write_text(
        "time,model,prompt_tokens,output_tokens\n" + "\n".join(rows) + "\n0.2,opt,,\n"
    )
    load = Load(trace=str(tmp_path / "trace.csv"), warmup_s=0.0)
    report = asyncio.run(run_load(server.address, load))
    assert report.all_answered, report.errors
    assert report.generated is not None
    assert (report.generated.texts, report.generated.tokens) == (5, 3 + 4 + 5 + 6 + 3)
