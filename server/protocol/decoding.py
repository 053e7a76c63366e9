"""Decoding of generated text: sampling, log probabilities, and stop strings. No step sorts the vocabulary."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress

import msgspec
import numpy as np

from cohabit.server.errors import Refused
from cohabit.server.ipc.model import Array

_BLOCK = 512
"""Tokens whose weights are added up together: the cumulative sum of all weights would take most of a step's time."""
_BINS = 1 << 12
"""Bins of tokens by weight. A nucleus sorts the tokens of one bin."""
_NEAR = (4.0, 8.0, 12.0, 16.0)
"""Distances from the largest logit within which a nucleus is looked for first."""


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters: OpenAI's, and `top_k`."""

    temperature: float = 1.0
    """0 selects the most likely token."""
    top_p: float = 1.0
    """Samples from the most likely tokens with this total probability."""
    top_k: int = 0
    """Samples from this many most likely tokens, and others as likely as the last of them; 0 from all."""
    seed: int | None = None
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per earlier occurrence of the token."""
    logit_bias: Mapping[int, float] = {}
    """Added to logits, by token."""


class Sampler:
    """Chooses the tokens of one text. The same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)
        self._generated: Counter[int] = Counter()
        bias = sampling.logit_bias
        self._biased = np.fromiter(bias.keys(), np.int64, len(bias))
        self._biases = np.fromiter(bias.values(), np.float32, len(bias))

    @property
    def is_greedy(self) -> bool:
        return self._sampling.temperature == 0

    @property
    def largest_biased(self) -> int:
        """The largest token with a bias; -1 without any."""
        return int(self._biased.max(initial=-1))

    def choose(self, logits: Array, allowed: Array | None = None) -> int:
        """Return the next token, given the logits of all tokens [vocabulary], float32.

        `allowed` says which tokens may be chosen [vocabulary], bool: at least one. Raises Refused for logits without a
        finite maximum.
        """
        adjusted = self._adjusted(logits)
        if allowed is None:
            token = self._chosen(adjusted)
        else:
            tokens = np.flatnonzero(allowed)
            token = int(tokens[self._chosen(adjusted[tokens])])
        self._generated[token] += 1
        return token

    def _adjusted(self, logits: Array) -> Array:
        """Return the logits after penalties and biases."""
        sampling = self._sampling
        penalizes = bool((sampling.presence_penalty or sampling.frequency_penalty) and self._generated)
        if not penalizes and not self._biased.size:
            return logits
        adjusted = logits.copy()
        if penalizes:
            generated = self._generated
            tokens = np.fromiter(generated.keys(), np.int64, len(generated))
            counts = np.fromiter(generated.values(), np.float32, len(generated))
            adjusted[tokens] -= sampling.presence_penalty + counts * np.float32(sampling.frequency_penalty)
        adjusted[self._biased] += self._biases
        return adjusted

    def _chosen(self, logits: Array) -> int:
        sampling = self._sampling
        best = int(np.argmax(logits))
        if not np.isfinite(logits[best]):
            raise Refused("EngineFailed", f"the model's largest logit is {logits[best]}: no token can be chosen")
        if sampling.temperature == 0:
            return best
        # Distances below the largest logit. A temperature near zero makes all others infinite, and never NaN.
        with np.errstate(over="ignore"):
            below = ((logits[best] - logits) / np.float64(sampling.temperature)).astype(np.float32)
        weights = np.exp(-below)
        if 0 < sampling.top_k < len(weights):
            weights[weights < np.partition(weights, -sampling.top_k)[-sampling.top_k]] = 0
        if sampling.top_p == 1:
            return _drawn(weights, self._random.random())
        tokens = _nucleus(weights, below, sampling.top_p)
        return int(tokens[_drawn(weights[tokens], self._random.random())])


def _drawn(weights: Array, share: float) -> int:
    """Return the index at which the cumulative weight exceeds this share of the total weight."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    place = share * blocks[-1]
    block = min(int(np.searchsorted(blocks, place, side="right")), len(blocks) - 1)
    start = block * _BLOCK
    within = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    index = int(np.searchsorted(within, place - (blocks[block - 1] if block else 0.0), side="right"))
    # Rounding may lead beyond the block's last weight, after which the sum no longer grows.
    return start + min(index, int(np.searchsorted(within, within[-1])))


def _nucleus(weights: Array, below: Array, share: float) -> Array:
    """Return the fewest tokens, ascending, that have at least `share` of the total weight.

    `below` is each token's distance from the largest logit. Tokens are put into bins by distance; the nucleus ends in
    one of these.
    """
    target = share * weights.sum(dtype=np.float64)
    for near in _NEAR:
        tokens = np.flatnonzero(below <= near)
        if weights[tokens].sum(dtype=np.float64) >= target:
            break
    else:
        tokens = np.flatnonzero(weights)
    weights, below = weights[tokens], below[tokens]
    bins = (below * ((_BINS - 1) / max(float(below.max()), 1e-30))).astype(np.int64)
    sums = np.cumsum(np.bincount(bins, weights))
    last = min(int(np.searchsorted(sums, target)), len(sums) - 1)
    edge = np.flatnonzero(bins == last)
    edge = edge[np.argsort(-weights[edge], kind="stable")]
    within = (sums[last - 1] if last else 0.0) + np.cumsum(weights[edge], dtype=np.float64)
    kept = edge[: int(np.searchsorted(within, target)) + 1]
    nucleus: Array = tokens[np.sort(np.concatenate([np.flatnonzero(bins < last), kept]))]
    return nucleus


def log_probabilities(logits: Array, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log probabilities of `token` and of the `most` most likely tokens, by the model's own logits."""
    own = logits - logits.max()
    total = float(np.log(np.exp(own).sum(dtype=np.float64)))
    most = min(most, len(own))
    likely: Array = np.empty(0, np.int64)
    if most:
        likely = np.flatnonzero(own >= np.partition(own, -most)[-most])
        likely = likely[np.argsort(-own[likely], kind="stable")][:most]
    return float(own[token]) - total, [(int(other), float(own[other]) - total) for other in likely]


class StopStrings:
    """Cuts a streamed text at the first stop string. Holds back text that may become one.

    Hidden text, that of special tokens, can be part of a stop string, but is never returned.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self._shown: list[bool] = []
        """Whether each held character may be returned."""
        self.found = False
        """Whether a stop string was found. No text is returned after it."""

    def push(self, piece: str, *, hidden: bool = False) -> str:
        """Add a piece of text, and return the text that can be sent."""
        if self.found:
            return ""
        text, shown = self._held + piece, self._shown + [not hidden] * len(piece)
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held, self._shown = True, "", []
            return "".join(compress(text[: min(places)], shown))
        held = max((self._overlap(text, string) for string in self._strings), default=0)
        sent = len(text) - held
        self._held, self._shown = text[sent:], shown[sent:]
        return "".join(compress(text[:sent], shown))

    def flush(self) -> str:
        """Return the held-back text, at the end of the text."""
        held, self._held = "".join(compress(self._held, self._shown)), ""
        return held

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Return the length of the longest end of `text` with which `string` begins."""
        return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if string.startswith(text[-n:])), 0)
