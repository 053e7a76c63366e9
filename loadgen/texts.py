"""Requests for texts: prompts of drawn tokens, answers streamed through OpenAI's `/v1/completions`."""

import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from cohabit.loadgen.arrivals import TextSize
from cohabit.loadgen.openloop import RequestFailed, TokenTimes

_FIRST_ID = 3
"""Lower ids are usually special tokens."""
_DATA, _END = b"data: ", b"[DONE]"


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_event = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model that generates texts."""

    name: str
    size: TextSize
    """Default length, if the trace has none."""
    bound: int
    """Exclusive upper bound of drawn token ids."""


class TextSender:
    """Sends requests for texts to one server."""

    def __init__(self, session: aiohttp.ClientSession, url: str, seed: int) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._draws = np.random.default_rng(seed)

    async def send(self, model: TextModel, size: TextSize | None) -> TokenTimes:
        """Generate one text greedily. Returns its tokens' arrival times. Raises RequestFailed."""
        size = size or model.size
        prompt = self._draws.integers(min(_FIRST_ID, model.bound - 1), model.bound, size.prompt_tokens).tolist()
        body = {
            "model": model.name, "prompt": prompt, "max_tokens": size.output_tokens, "temperature": 0,
            "stream": True, "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        start_s = time.perf_counter()
        came_s: list[float] = []
        try:
            async with self._session.post(self._url, json=body) as answer:
                if answer.status != 200:
                    raise RequestFailed(f"HTTP {answer.status}", (await answer.text())[:500])
                async for line in answer.content:
                    if line.startswith(_DATA) and not line.startswith(_DATA + _END):
                        came_s += [time.perf_counter() - start_s] * _tokens_of(line)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"after {len(came_s)} tokens") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("connection", f"after {len(came_s)} tokens: {error}") from error
        if not came_s:
            raise RequestFailed("malformed answer", "the text has no tokens")
        return TokenTimes(came_s[0], tuple(np.diff(came_s).tolist()))


def _tokens_of(line: bytes) -> int:
    """Return an event's number of tokens; an event without token ids counts as one. Raises RequestFailed."""
    try:
        event = _event.decode(line[len(_DATA) :])
    except msgspec.MsgspecError as error:
        raise RequestFailed("malformed answer", f"an event is not a completion's: {error}") from error
    if event.error is not None:
        raise RequestFailed("ended by an error", str(event.error)[:500])
    return sum(
        (0 if choice.finish_reason else 1) if choice.token_ids is None else len(choice.token_ids)
        for choice in event.choices
    )
