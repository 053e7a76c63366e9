"""Decoding of generated text: sampling, log probabilities, and stop strings."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from cohabit.server.ipc.model import Array


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters: OpenAI's, and `top_k`."""

    temperature: float = 1.0
    """0 selects the most likely token."""
    top_p: float = 1.0
    """Samples from the most likely tokens with this total probability."""
    top_k: int = 0
    """Samples from this many most likely tokens; 0 from all."""
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

    def choose(self, logits: Array) -> int:
        """Return the next token, given the logits of all tokens [vocabulary], float32."""
        token = self._chosen(self._adjusted(logits))
        self._generated[token] += 1
        return token

    def _adjusted(self, logits: Array) -> Array:
        """Return the logits after penalties and biases."""
        sampling = self._sampling
        if not sampling.logit_bias and not sampling.presence_penalty and not sampling.frequency_penalty:
            return logits
        adjusted = logits.astype(np.float64)
        for token, count in self._generated.items():
            adjusted[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
        for token, bias in sampling.logit_bias.items():
            if token < len(adjusted):
                adjusted[token] += bias
        return adjusted

    def _chosen(self, logits: Array) -> int:
        sampling = self._sampling
        if sampling.temperature == 0:
            return int(np.argmax(logits))
        # Candidates, the most likely first.
        count = min(sampling.top_k or len(logits), len(logits))
        tokens = np.argpartition(logits, -count)[-count:] if count < len(logits) else np.arange(count)
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
        scaled = logits[tokens].astype(np.float64) / sampling.temperature
        weights = np.exp(scaled - scaled[0])
        sums = np.cumsum(weights)
        kept = int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1 if sampling.top_p < 1 else len(tokens)
        drawn = self._random.random() * sums[min(kept, len(tokens)) - 1]
        return int(tokens[min(int(np.searchsorted(sums, drawn, side="right")), kept - 1)])


def log_probabilities(logits: Array, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log probabilities of `token` and of the `most` most likely tokens, by the model's own logits."""
    own = logits.astype(np.float64)
    own -= own.max()
    own -= np.log(np.exp(own).sum())
    likely = np.argsort(-own, kind="stable")[:most] if most else ()
    return float(own[token]), [(int(other), float(own[other])) for other in likely]


class StopStrings:
    """Cuts a streamed text at the first stop string. Holds back text that may become one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.found = False
        """Whether a stop string was found. No text is returned after it."""

    def push(self, piece: str) -> str:
        """Add a piece of text, and return the text that can be sent."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for string in self._strings if (place := text.find(string)) >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max((self._overlap(text, string) for string in self._strings), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the held-back text, at the end of the text."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, string: str) -> int:
        """Return the length of the longest end of `text` with which `string` begins."""
        return next((n for n in range(min(len(string) - 1, len(text)), 0, -1) if string.startswith(text[-n:])), 0)
