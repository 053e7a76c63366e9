"""The grammar process: which tokens may follow in texts that obey a grammar.

llguidance holds the GIL while it reads a vocabulary, and some schemas make it crash or compute for minutes. Therefore a
process of its own reads vocabularies, and forks for each text. A fork's CPU time and memory are limited, and its end is
an error of its text alone.
"""

import gc
import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cohabit.server.frontend.tokenizers import LoadedTokenizer, TokenizerFile, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MASK, COMPLETE, INVALID, UNSUPPORTED = range(4)
"""Kinds of replies, to the grammar and to each token. MASK has a bit for each token, set if it may come next. The last
two have a reason. All but MASK end the connection."""
REPLY = struct.Struct("<BI")
"""Head of a reply: its kind, and the length in bytes of what follows."""
LENGTH = TOKEN = struct.Struct("<I")
"""The length in bytes of the grammar that follows, and a token."""
MOST_CPU_S = 2
"""Maximum CPU time of compiling a grammar, and of each token."""
MOST_BYTES = 64 << 20
"""Maximum memory of one text's grammar, in addition to the vocabulary."""
_MOST_MESSAGE_BYTES = 64 << 10
_KEPT = 16
"""Number of vocabularies kept."""
_SAMPLES, _SAMPLE_TOKENS = 64, 6
_REWRITING = {"WordPiece", "CTC"}
"""Decoders whose text of a token depends on the tokens around it."""
_MOST_REASON = 300
_NICENESS = 10
"""Forks yield to the server and its engine: schemas of clients can take all CPUs."""


class Vocabulary(msgspec.Struct, frozen=True):
    """A model's tokens: its tokenizer, the number of its logits, and the tokens that end a text."""

    file: TokenizerFile
    size: int
    stop_ids: tuple[int, ...]


_vocabulary_decoder = msgspec.msgpack.Decoder(Vocabulary)


class UnsupportedVocabulary(Exception):
    """The tokens of a vocabulary cannot be constrained."""


def main(control: socket.socket) -> None:
    """Fork for each connection that is received, until the other end is closed.

    A connection comes with the message of its vocabulary, and begins with its grammar.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends this process
    read = lru_cache(_KEPT)(_read)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MOST_MESSAGE_BYTES, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            tokens = read(_vocabulary_decoder.decode(message))
            child = None
            try:
                child = None if isinstance(tokens, str) else os.fork()
            except OSError as error:
                tokens = f"no process can be started: {error}"
            if child == 0 and not isinstance(tokens, str):
                control.close()
                try:
                    _serve(connection, tokens)
                finally:
                    os._exit(0)
            if isinstance(tokens, str):
                with suppress(OSError):
                    _reply(connection, UNSUPPORTED, tokens.encode())


def _read(vocabulary: Vocabulary) -> "LLTokenizer | str":
    """Return the vocabulary, or why its tokens cannot be constrained."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ModuleNotFoundError:
        return "schemas need the package llguidance; install it with pip install 'cohabit[text]'"
    try:
        loaded = load_tokenizer(Path(vocabulary.file.path))
        if loaded.file != vocabulary.file:
            return "the model's tokenizer was replaced; send the request again"
        tokens = _Tokens(loaded, vocabulary)
        made = LLTokenizer(TokenizerWrapper(tokens), eos_token=list(tokens.ends))
    except Exception as error:  # tokenizers and llguidance raise nothing more specific
        return f"the model's tokenizer cannot be constrained: {error}"[:_MOST_REASON]
    # Forks share what is read by now, as long as they do not write to it.
    gc.collect()
    gc.freeze()
    return made


class _Tokens:
    """The bytes of a vocabulary's tokens, in the form that llguidance reads."""

    def __init__(self, loaded: LoadedTokenizer, vocabulary: Vocabulary) -> None:
        size = vocabulary.size
        shown = [token for token in range(size) if loaded.is_shown(token) and token not in vocabulary.stop_ids]
        self._loaded = loaded
        self.tokens = [b""] * size
        for token in shown:
            self.tokens[token] = loaded.bytes_of(token)
        _require_independent(loaded, shown, self.tokens)
        self._by_bytes = {self.tokens[token]: token for token in reversed(shown)}
        self._longest = max(map(len, self._by_bytes), default=0)
        # Without a token that ends texts, one that the model does not have stands for their end.
        self.ends: tuple[int, ...] = vocabulary.stop_ids or (size,)
        self.tokens += [b""] * (size in self.ends)
        special = {token: name for name, token in loaded.special_tokens.items() if token < size}
        special |= {token: f"<end {token}>" for token in self.ends}
        for token, name in special.items():
            self.tokens[token] = name.encode()
        self.special_token_ids = sorted(special)
        self.eos_token_id = self.ends[0]
        self.bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that a grammar prescribes: the tokenizer's own, or else the longest ones."""
        try:
            (found,) = self._loaded.tokens([text.decode()], adds_special=False)
            if b"".join(self.tokens[token] for token in found) == text:
                return [int(token) for token in found]
        except (UnicodeDecodeError, IndexError):
            pass
        tokens, start = list[int](), 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._by_bytes), None)
            if end is None:
                break
            tokens.append(self._by_bytes[text[start:end]])
            start = end
        return tokens


def _require_independent(loaded: LoadedTokenizer, shown: Sequence[int], tokens: Sequence[bytes]) -> None:
    """Raise UnsupportedVocabulary unless the text of tokens is their bytes, one after the other."""
    anchor = next((token for token in shown if tokens[token].strip().isalnum()), None)
    whole = [token for token in shown if tokens[token] and _is_text(tokens[token])]
    chosen = random.Random(0)
    samples = [chosen.choices(whole, k=_SAMPLE_TOKENS) for _ in range(_SAMPLES)] if whole else []

    def is_joined(first: int, sample: Sequence[int]) -> bool:
        start, text = loaded.decoded([first]), loaded.decoded([first, *sample])
        return text.encode() == start.encode() + b"".join(tokens[token] for token in sample)

    if anchor is None or loaded.decoders & _REWRITING or not all(is_joined(anchor, sample) for sample in samples):
        raise UnsupportedVocabulary("it decodes a token by those around it")


def _is_text(token: bytes) -> bool:
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def _serve(connection: socket.socket, tokens: "LLTokenizer") -> None:
    """Follow one text through its grammar, until the connection is closed."""
    from llguidance import LLMatcher

    os.nice(_NICENESS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # crashes are for the client to know
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = _data_bytes() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    stream = connection.makefile("rb")
    grammar = stream.read(*LENGTH.unpack(stream.read(LENGTH.size)))
    _limit_cpu()
    matcher = LLMatcher(tokens, grammar.decode(), log_level=0)
    while not matcher.is_error():
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        _reply(connection, MASK, mask)
        sent = stream.read(TOKEN.size)
        if len(sent) < TOKEN.size:
            return
        _limit_cpu()
        matcher.consume_token(*TOKEN.unpack(sent))
        if matcher.is_stopped() and not matcher.is_error():
            _reply(connection, COMPLETE)
            return
    # The library adds its state, and the lines of our own grammar.
    reason = matcher.get_error().partition("<state>")[0].partition("\n   1 |")[0]
    if "NoExtension" in reason:
        reason = "no token of the model can come next in a text of it"
    _reply(connection, INVALID, " ".join(reason.split())[:_MOST_REASON].encode())


def _limit_cpu() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + MOST_CPU_S, most))


def _data_bytes() -> int:
    """Return the size of this process's data, as RLIMIT_DATA counts it."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))


def _reply(connection: socket.socket, kind: int, content: bytes = b"") -> None:
    connection.sendall(REPLY.pack(kind, len(content)) + content)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
