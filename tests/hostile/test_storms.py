"""The whole server under hostile traffic and on a damaged disk: valid requests get the right bits. Minutes."""

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.serving import Process, eventually, infer, process
from tests.e2e.stacks import WIDTH, Stacks
from tests.hostile.test_requests import BODIES, GENERATE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    return Stacks(tmp_path_factory.mktemp("stacks"))


@pytest.fixture
def server(stacks: Stacks, tmp_path: Path) -> Iterator[Process]:
    for seed, name in enumerate("ab"):
        stacks.put(tmp_path / "models", name, seed)
    flags = ("--store", "file", "--batch-sizes", "1", "--prepare-memory", "4GiB")
    with process(tmp_path / "models", "5MiB", tmp_path / "cache", *flags) as running:
        running.until_ready()
        yield running


def answers(server: Process) -> dict[str, bytes]:
    x = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]
    return {name: next(iter(infer(server.address, name, {"x": x}).values())).tobytes() for name in "ab"}


def test_a_store_that_is_overwritten_is_made_anew(server: Process, tmp_path: Path) -> None:
    before = answers(server)
    for path in sorted(tmp_path.glob("cache/weights/*/weights.bin")):
        good = path.read_bytes()
        with path.open("r+b") as file:
            file.write(bytes(len(good)))
        assert answers(server) == before
        eventually(lambda path=path, good=good: path.read_bytes() == good)  # type: ignore[misc]


def test_valid_requests_are_answered_to_the_bit_during_a_storm(server: Process) -> None:
    before = answers(server)
    host, port = server.address.split(":")

    def attack(seed: int) -> None:
        generator = random.Random(seed)
        bodies = [*BODIES.values(), *GENERATE.values(), b"", generator.randbytes(1 << 20)]
        for _ in range(40):
            body = generator.choice(bodies)
            head = b"POST /v2/models/a/%b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            request = head % (generator.choice([b"infer", b"generate"]), len(body)) + body
            whole = len(request)
            request = request[: generator.choice([whole, whole // 2, 20])]
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(request)
                if len(request) == whole and generator.random() < 0.5:  # no answer comes to half a request
                    connection.recv(1 << 16)

    with ThreadPoolExecutor(4) as threads:
        attacks = [threads.submit(attack, seed) for seed in range(4)]
        while not all(a.done() for a in attacks):
            assert answers(server) == before
        for done in attacks:
            done.result()
    assert answers(server) == before
    assert "engine's process has died" not in server.log_text()
