"""The worst body of each endpoint, sent by several clients at once: how long health probes take meanwhile."""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.export import Dim

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import serve_command, serving
from cohabit.loadgen.zoo.exporting import save_model

MIB, VALUES, TOKENS, WIDTH = 1 << 20, 1 << 18, 512, 16
JSON_BYTES, TEXT_BYTES = 8 * MIB - 1024, 4 * MIB - 1024
LIMIT_S = 0.05
_PROBE_EVERY_S = 0.005
_INFER, _GENERATE, _EMBEDDINGS = "/v2/models/array/infer", "/v2/models/array/generate", "/v1/embeddings"


class Embedded(torch.nn.Module):
    """Makes a vector of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.table(input_ids) * attention_mask[..., None]
        return {"last_hidden_state": states}


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).sum(-1, keepdim=True)


def write_models(repository: Path) -> None:
    """Write a model of one large input, and a text model with its tokenizer."""
    rows = {"x": {0: Dim("batch", min=1, max=4)}}
    scaled = torch.export.export(Scaled().eval(), (), kwargs={"x": torch.zeros(2, VALUES, 1)}, dynamic_shapes=rows)
    save_model(scaled, repository / "array" / "1" / "model.pt2", {})
    ids = torch.ones(2, 8, dtype=torch.int64)
    sizes = {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=1, max=TOKENS)}
    embedded = torch.export.export(
        Embedded().eval(),
        (),
        kwargs={"input_ids": ids, "attention_mask": ids},
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
    )
    save_model(embedded, repository / "texts" / "1" / "model.pt2", {})
    vocabulary = (
        {"[UNK]": 0} | {chr(97 + n): n + 1 for n in range(26)} | {f"##{chr(97 + n)}": n + 27 for n in range(26)}
    )
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.save(str(repository / "texts" / "tokenizer.json"))


def bodies() -> dict[str, tuple[str, Callable[[], bytes]]]:
    """Return the path and the body of each attack, by name."""

    def array(data: bytes, more: bytes = b"", shape: bytes = b"[1,262144,1]") -> bytes:
        head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":%b,"data":[' % shape
        return head + data + b"]}]" + more + b"}"

    def fill(item: bytes, nbytes: int = JSON_BYTES) -> bytes:
        return (item + b",") * (nbytes // (len(item) + 1) - 1) + item

    def texts(items: bytes) -> bytes:
        return b'{"model":"texts","input":' + items + b"}"

    long = b"1.2345678901234567890123e-5"
    return {
        "infer: 262,144 long numbers": (_INFER, lambda: array(b",".join([long] * VALUES))),
        "infer: each number in an array": (_INFER, lambda: array(b"[" + b",".join([b"[1]"] * VALUES) + b"]")),
        "infer: empty arrays": (_INFER, lambda: array(fill(b"[]"))),
        "infer: NaN": (_INFER, lambda: array(b",".join([b"NaN"] * VALUES))),
        "infer: NaN and invalid JSON": (_INFER, lambda: array(fill(b"NaN"), b",")),
        "infer: arrays that no one reads": (_INFER, lambda: array(b"1", b',"own":[%b]' % fill(b"[]"))),
        "infer: an escaped key": (
            _INFER,
            lambda: array(b"1", b',"parameters":{"%b":1}' % (b"\\u00e9" * (JSON_BYTES // 6))),
        ),
        "infer: white space": (_INFER, lambda: array(b" " * (JSON_BYTES - 200) + b"1")),
        "generate: arrays": (_GENERATE, lambda: b'{"x":[' + fill(b"[1]") + b"]}"),
        "generate: deep": (_GENERATE, lambda: b'{"x":' + b"[" * JSON_BYTES),
        "embeddings: empty arrays": (_EMBEDDINGS, lambda: texts(b"[" + fill(b"[]", TEXT_BYTES) + b"]")),
        "embeddings: the same for no model": (
            _EMBEDDINGS,
            lambda: b'{"model":"none","input":[' + fill(b"[]", TEXT_BYTES) + b"]}",
        ),
        "embeddings: one text": (_EMBEDDINGS, lambda: texts(b'"' + b"a b " * (TEXT_BYTES // 4) + b'"')),
        "embeddings: the longest texts": (
            _EMBEDDINGS,
            lambda: texts(b"[" + fill(b'"' + b"a " * 500 + b'"', TEXT_BYTES) + b"]"),
        ),
        "embeddings: short texts": (_EMBEDDINGS, lambda: texts(b"[" + fill(b'"\\\\"', TEXT_BYTES) + b"]")),
        "embeddings: token ids": (_EMBEDDINGS, lambda: texts(b"[" + fill(b"1", TEXT_BYTES) + b"]")),
        "chat: empty arrays as tools": (
            "/v1/chat/completions",
            lambda: (
                b'{"model":"none","messages":[{"role":"user","content":"a"}],"tools":[%b]}' % fill(b"[]", MIB - 200)
            ),
        ),
        "chat: empty objects as content": (
            "/v1/chat/completions",
            lambda: b'{"model":"none","messages":[{"role":"user","content":[%b]}]}' % fill(b"{}", MIB - 200),
        ),
        "load: a configuration": (
            "/v2/repository/models/texts/load",
            lambda: b'{"parameters":{"config":"%b"}}' % (b"\\n" * (MIB // 2 - 40)),
        ),
    }


_ATTACK = """
import http.client, pathlib, sys
from contextlib import closing, suppress
address, path, body = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]).read_bytes()
print("begun", flush=True)
while True:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection, suppress(OSError):
        connection.request("POST", path, body)
        connection.getresponse().read()
"""
"""Posts a body again and again, in a process of its own, which imports nothing that takes long."""


@contextmanager
def attacked(address: str, path: str, body: bytes, clients: int) -> Iterator[None]:
    """Have clients post a body again and again until the context ends."""
    with tempfile.NamedTemporaryFile() as file, ExitStack() as running:
        file.write(body)
        file.flush()
        command = [sys.executable, "-c", _ATTACK, address, path, file.name]
        for _ in range(clients):
            attacker = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            running.callback(attacker.kill)
            assert attacker.stdout is not None
            attacker.stdout.readline()
        yield


async def probe(addresses: Sequence[str], seconds: float) -> list[float]:
    """Ask the addresses' health in turn. Returns the seconds that each probe took."""
    opened = [await asyncio.open_connection(*address.rsplit(":", 1)) for address in addresses]
    taken_s: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        for reader, writer in opened:
            start_s = time.perf_counter()
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"}")
            taken_s.append(time.perf_counter() - start_s)
        await asyncio.sleep(_PROBE_EVERY_S)
    for _, writer in opened:
        writer.close()
    return taken_s


async def measure(
    url: str, metrics_url: str, seconds: float, clients: int, only: str
) -> list[tuple[str, list[float]]]:
    """Return the probes' seconds without an attack, and during each."""
    address, addresses = urlsplit(url).netloc, [urlsplit(u).netloc for u in (url, metrics_url)]
    measured = [("nothing", await probe(addresses, seconds))]
    for name, (path, make) in bodies().items():
        if only not in name:
            continue
        with attacked(address, path, make(), clients):
            measured.append((name, await probe(addresses, seconds)))
        print(f"{name}: {1e3 * max(measured[-1][1]):.1f} ms", file=sys.stderr, flush=True)
    return measured


async def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        repository, cache = Path(folder) / "models", Path(folder) / "cache"
        write_models(repository)
        flags = ("--model-control-mode", "explicit", "--load-model", "*", "--batch-sizes", "1")
        async with serving(serve_command(repository, "64MiB", None, cache, *flags)) as server:
            measured = await measure(server.url, server.metrics_url, options.seconds, options.clients, options.only)
    rows = []
    for name, taken_s in measured:
        ordered = sorted(taken_s)
        rows.append(
            {
                "body": name,
                "probes": str(len(ordered)),
                "median ms": f"{1e3 * statistics.median(ordered):.1f}",
                "p99 ms": f"{1e3 * ordered[int(0.99 * (len(ordered) - 1))]:.1f}",
                "longest ms": f"{1e3 * ordered[-1]:.1f}",
            }
        )
    about = (
        f"Each body by {options.clients} clients at once, again and again, for {options.seconds:g} s; probes of"
        " both ports' health.\n"
    )
    publish(options, "Probes beside the worst bodies", [about, table_of(rows)])
    return 0 if all(max(taken_s) <= LIMIT_S for _, taken_s in measured) else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.worst_bodies", __doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of probes per body (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=4, help="at once (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="bodies whose names have this")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
