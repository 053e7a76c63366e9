"""Causal language models of transformers: one decoding step, as a function of tokens and cached keys and values.

The step takes new tokens of each sequence and the keys and values of all tokens before them. It returns the logits
after the last token, and the new tokens' keys and values. The server keeps these between steps, as a growing state.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from cohabit.server.errors import ImportFailed
from cohabit.server.frontend.templates import rendered
from cohabit.server.importing.declared_input import DeclaredInput
from cohabit.server.importing.folder_files import read_object
from cohabit.server.importing.folder_tokenizer import FolderTokenizer, entry_tokenizer
from cohabit.server.importing.huggingface_inputs import TOKENS
from cohabit.server.importing.subject import DecodingStep, Subject, Tensors, reason_of
from cohabit.server.ipc.model import LanguageDocument

_LENGTH, _PAST, _NEW, _LOGITS = "length", "past", "new", "logits"
_CHUNK = 64
"""Maximum number of prompt tokens per step: the step copies the weights once for all of them."""
_LEAST_PAST = 16
"""Entries to which shorter pasts are padded: a size of 1 would be a special case."""
_USUAL_CONTEXT = 2048
_FIRST_BUCKET, _BUCKETS_APART = 128, 4
_LENGTHS = re.compile("window|chunk|original_max_position")
"""Settings of configurations that name a length at which attention changes."""
_SLIDING = "sliding_attention"
_MOST_DIFFERENCE = 1e-3
_GENERATION = "generation_config.json"
_MOST_TEMPLATE_BYTES = 1 << 20
_USER = {"role": "user", "content": " Hi, <b>1</b> "}
_CALL = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {"x": "ü"}}}
_CHATS: Sequence[Sequence[dict[str, Any]]] = (
    [_USER],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, {"role": "assistant", "content": "Yes.\n"}, {"role": "user", "content": "Why?"}],
    [_USER, {"role": "assistant", "content": "A", "reasoning_content": "B"}, {"role": "user", "content": "C"}],
    [
        _USER,
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "content": "42", "name": "f", "tool_call_id": "a12345678"},
    ],
)
"""Conversations whose renderings are compared with transformers'."""


def is_causal(written: dict[str, Any]) -> bool:
    """Whether a folder's configuration names a model that predicts the next token."""
    names = written.get("architectures") or [""]
    return str(names[0]).endswith(("ForCausalLM", "LMHeadModel"))


class DecodingModule(nn.Module):
    """One decoding step.

    `past` is [batch, layers x 2, heads, entries, size]; the first `length` entries of a row are valid. `window` is the
    number of tokens that layers with sliding attention see, all layers if the configuration names no kinds of layers.
    """

    def __init__(self, model: Any, window: int | None = None) -> None:
        super().__init__()
        self.model = model
        self.window = window
        self.has_kinds = bool(getattr(model.config.get_text_config(), "layer_types", None))

    def forward(self, input_ids: torch.Tensor, length: torch.Tensor, past: torch.Tensor) -> Tensors:
        count, entries = input_ids.shape[1], past.shape[3]
        steps = torch.arange(count)
        places = length[:, None] + steps
        before = (torch.arange(entries) < length[:, None])[:, None].expand(-1, count, -1)
        among = (steps <= steps[:, None]).expand(input_ids.shape[0], -1, -1)
        masks: Any = _added(torch.cat([before, among], 2))
        if self.window is not None:
            before = before & (torch.arange(entries) > places[:, :, None] - self.window)
            among = among & (steps > steps[:, None] - self.window)
            windowed = _added(torch.cat([before, among], 2))
            masks = {"full_attention": masks, _SLIDING: windowed} if self.has_kinds else windowed
        cache = _Cache(past)
        outputs = self.model(
            input_ids=input_ids,
            position_ids=places,
            attention_mask=masks,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return {_LOGITS: outputs.logits[:, -1], _NEW: torch.stack(cache.new, 1)}


def _added(visible: torch.Tensor) -> torch.Tensor:
    """Return what is added to scores [batch, heads, tokens, entries] for a mask [batch, tokens, entries]."""
    return torch.where(visible[:, None], 0.0, torch.finfo(torch.float32).min)


class _Cache:
    """A cache for attention layers of transformers: joins the past with the new keys and values."""

    is_compileable = False

    def __init__(self, past: torch.Tensor) -> None:
        self.new: list[torch.Tensor] = []
        self._past = past

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if 2 * layer != len(self.new):
            raise ImportFailed("its layers share keys and values, or are out of order")
        self.new += [keys, values]
        past = self._past
        return torch.cat([past[:, 2 * layer], keys], 2), torch.cat([past[:, 2 * layer + 1], values], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return self._past.shape[3]

    def get_mask_sizes(self, count: int, layer: int = 0) -> tuple[int, int]:
        return self._past.shape[3] + count, 0


def generating(folder: Path, model: Any, context: int, by_default: bool, notes: Sequence[str] = ()) -> Subject:
    """Make a subject of a causal language model with up to `context` tokens, including the prompt.

    If `context` is only a default, `by_default`, it is limited to 2,048. Raises ImportFailed for a cache of another
    kind.
    """
    if by_default and context > _USUAL_CONTEXT:
        notes = (
            *notes,
            f"sequences have at most {_USUAL_CONTEXT} tokens, the model takes {context}; --max-sequence-length chooses"
            " otherwise, for more memory",
        )
        context = _USUAL_CONTEXT
    # The inputs follow from the cache's shape.
    heads, size, layers = _cache_shape(model)
    inputs = (
        DeclaredInput(TOKENS, "INT64", (-1, -1), int(model.config.get_text_config().vocab_size)),
        DeclaredInput(_LENGTH, "INT64", (-1,), _LEAST_PAST),
        DeclaredInput(_PAST, "FP32", (-1, layers, heads, -1, size)),
    )

    # Steps must agree with whole texts up to the greatest length, or up to that of a window.
    windows = dict.fromkeys((_window_of(model.config.get_text_config()), None))
    steps = [DecodingModule(model, window).eval() for window in windows]
    step, most, said = _proven_length(steps, inputs, max(context, _LEAST_PAST + 1))
    notes = (*notes, *said)

    def examples(batch: int, seed: int) -> Tensors:
        draws = torch.Generator().manual_seed(seed)
        # Odd seeds: the longest texts. One token, or a part of a prompt.
        count = 1 if seed % 4 == 1 else min(9 + max(seed, 0), _CHUNK)
        entries = most if seed % 2 else min(_LEAST_PAST + max(seed, 0), most)
        return {
            TOKENS: torch.randint(0, inputs[0].bound or 1, (batch, count), generator=draws),
            _LENGTH: torch.randint(0, max(entries - count, 1), (batch,), generator=draws),
            _PAST: torch.randn((batch, layers, heads, entries, size), generator=draws),
        }

    # Buckets for the past grow by a constant factor, up to the context.
    pasts = [n for n in (_FIRST_BUCKET * _BUCKETS_APART**k for k in range(16)) if n < most] + [most]
    read = FolderTokenizer.of(folder)
    document, said = _checked(read, _document(folder, model, read))
    tokenizer, unlike = entry_tokenizer(read)
    return Subject(
        step,
        inputs,
        examples,
        most_tokens=most,
        tokenizer=tokenizer,
        notes=(*notes, *said, *unlike),
        decoding=DecodingStep(
            states=((_PAST, _NEW),),
            lengths=_LENGTH,
            ranges={TOKENS: {1: (1, _CHUNK)}, _PAST: {3: (_LEAST_PAST, most)}},
            shape_buckets=f"{TOKENS}.1={_CHUNK};{_PAST}.3={','.join(map(str, pasts))}",
            document=document,
        ),
    )


def _proven_length(
    steps: Sequence[DecodingModule], inputs: Sequence[DeclaredInput], most: int
) -> tuple[DecodingModule, int, tuple[str, ...]]:
    """Return a step, the maximum length, up to `most`, at which it agrees with whole texts, and notes about it.

    Attention windows, chunks of attention and rotations for long texts may depend on the padding and on the other texts
    of a batch. Tries `most`, and then the lengths that the configuration names. Raises ImportFailed if none is right.
    """
    reasons: list[str] = []
    lengths = most, *_named_lengths(steps[0].model.config, most)
    for length, step in product(lengths, steps):
        try:
            with torch.no_grad():
                difference = _difference_from_whole_texts(step, inputs, length)
        except Exception as error:
            reasons.append(f"a step with a cache of {length} tokens fails: {reason_of(error)}")
            continue
        if difference <= _MOST_DIFFERENCE:
            if length == most:
                return step, most, ()
            return step, length, (f"sequences have at most {length} tokens, because {reasons[0]}",)
        reasons.append(
            f"steps with a cache of {length} tokens differ from whole texts by {difference:.2g} of the largest logit"
        )
    raise ImportFailed(f"{reasons[0]}: its attention ignores the mask that it is given")


def _window_of(config: Any) -> int | None:
    """Return the number of tokens that layers with sliding attention see; None without such layers."""
    window = getattr(config, "sliding_window", None)
    has_kinds = getattr(config, "layer_types", None)
    return window if isinstance(window, int) and (not has_kinds or _SLIDING in has_kinds) else None


def _named_lengths(config: Any, most: int) -> list[int]:
    """Return lengths at which a model's attention may change, and those that leave room for a step, descending."""
    found: set[int] = set()
    waiting: list[Any] = [config.to_dict()]
    while waiting:
        part = waiting.pop()
        for name, value in part.items():
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, int) and _LENGTHS.search(str(name)):
                found |= {value, value - _CHUNK}
    return sorted((length for length in found if _LEAST_PAST < length < most), reverse=True)


def _difference_from_whole_texts(step: DecodingModule, inputs: Sequence[DeclaredInput], most: int) -> float:
    """Return the largest difference of the logits of steps from the model's own pass over whole texts.

    A text of `most` tokens and short ones are padded together, in a step of one token and in a larger one. Relative to
    the largest logit.
    """
    tokens = inputs[0]
    draws = torch.Generator().manual_seed(0)
    largest = 0.0
    for count in (1, min(_CHUNK, most - _LEAST_PAST)):
        lengths = [most - count, min(_LEAST_PAST - 5, most - count), 3]
        texts = [torch.randint(0, tokens.bound or 1, (length + count,), generator=draws) for length in lengths]
        pasts = [_past_of(step, inputs, text[:length]) for text, length in zip(texts, lengths, strict=True)]
        entries = torch.zeros((len(texts), *pasts[0].shape[1:3], most, pasts[0].shape[4]))
        for row, past in enumerate(pasts):
            entries[row, :, :, : past.shape[3]] = past[0]
        last = torch.stack([text[-count:] for text in texts])
        found = step(last, torch.tensor(lengths), entries)[_LOGITS]
        whole = torch.cat([_logits_of(step.model, text) for text in texts])
        largest = max(largest, float((found - whole).abs().max() / whole.abs().max()))
    return largest


def _logits_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Return the logits after a whole text, by the model's own pass."""
    logits: torch.Tensor = model(input_ids=text[None], use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits


def _past_of(step: DecodingModule, inputs: Sequence[DeclaredInput], text: torch.Tensor) -> torch.Tensor:
    """Return the keys and values of a text [1, layers x 2, heads, tokens, size], computed as a prompt is."""
    _, layers, heads, _, size = inputs[2].dims
    past = torch.zeros((1, layers, heads, len(text), size))
    for start in range(0, len(text), _CHUNK):
        piece = text[None, start : start + _CHUNK]
        before = past[:, :, :, : max(start, _LEAST_PAST)]
        if before.shape[3] < _LEAST_PAST:  # a text shorter than the least past
            before = nn.functional.pad(before, (0, 0, 0, _LEAST_PAST - before.shape[3]))
        made = step(piece, torch.tensor([start]), before)[_NEW]
        past[:, :, :, start : start + piece.shape[1]] = made
    return past


def _cache_shape(model: Any) -> tuple[int, int, int]:
    """Return heads, size, and twice the layers, of keys and values. Raises ImportFailed if their shapes differ."""
    try:
        with torch.no_grad():
            cache = model(input_ids=torch.zeros(1, 1, dtype=torch.int64), use_cache=True).past_key_values
        shapes = {tuple(tensor.shape) for layer in cache.layers for tensor in (layer.keys, layer.values)}
    except Exception as error:
        raise ImportFailed(f"a step with a cache fails: {reason_of(error)}") from error
    if len(shapes) != 1 or len(next(iter(shapes))) != 4:
        raise ImportFailed(f"its layers have caches of different shapes: {sorted(shapes) or 'none'}")
    ((_, heads, _, size),) = shapes
    return heads, size, 2 * len(cache.layers)


def _document(folder: Path, model: Any, read: FolderTokenizer | None = None) -> LanguageDocument:
    """Return the server's data for texts, as transformers reads it from the folder.

    `read` is the folder's tokenizer, if it has been read already. Texts end at the end tokens of all sources: the
    configurations of the model and of generation, and the tokenizer.
    """
    own = read_object(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    read = read or FolderTokenizer.of(folder)
    tokenizer = None if read is None else read.own
    sources = (own.get("eos_token_id"), getattr(model.config, "eos_token_id", None))
    ends = [token for source in sources for token in (source if isinstance(source, list | tuple) else [source])]
    if tokenizer is None:
        return LanguageDocument(_tokens(ends))
    template = tokenizer.chat_template
    if isinstance(template, dict):  # templates by name; the others are for tools and documents
        template = template.get("default")
    cleans_up = tokenizer.clean_up_tokenization_spaces and type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
    return LanguageDocument(
        _tokens([*ends, tokenizer.eos_token_id]),
        template if isinstance(template, str) and len(template) <= _MOST_TEMPLATE_BYTES else None,
        tokenizer.special_tokens_map,
        bool(cleans_up),
    )


def _tokens(found: Sequence[Any]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(int(token) for token in found if token is not None))


def _checked(read: FolderTokenizer | None, document: LanguageDocument) -> tuple[LanguageDocument, tuple[str, ...]]:
    """Compare renderings of conversations with transformers' own.

    Returns the document, without a chat template that is rendered differently, and notes about why there are no chats.
    """
    if read is not None and read.unread is not None:
        return document, (f"it has no chats: transformers cannot read its tokenizer ({read.unread})",)
    if read is None or document.chat_template is None:
        return document, ()
    for chat in _CHATS:
        own = _attempted(partial(rendered, "", document, chat))
        whole = partial(read.own.apply_chat_template, add_generation_prompt=True, tokenize=False)
        if own != _attempted(partial(whole, chat)):
            note = "it has no chats: its chat template is rendered differently than by transformers"
            return structs.replace(document, chat_template=None), (note,)
    return document, ()


def _attempted(render: Callable[[], Any]) -> str | None:
    """Return a rendering; None if the conversation is rejected."""
    try:
        return str(render())
    except Exception:  # templates raise what they like
        return None
