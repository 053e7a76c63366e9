"""Hostile clients of a running server, over HTTP and gRPC, until standard input ends.

What each does is drawn from a seed. Paths that are not UTF-8, which end releases of grpcio, are left out.
"""

import argparse
import gzip
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass

import grpc

MIB = 1 << 20
HELD_S = 0.5
"""How long a client that does not go on stays connected."""
TIMEOUT_S = 20.0
_SERVICE = "/inference.GRPCInferenceService/"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
_BOMB = gzip.compress(bytes(100 * MIB), 9)


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses as `host:port`, and a model that is served."""

    http: str
    grpc: str
    model: str

    def connected(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


Attack = Callable[[Target, random.Random], None]


def garbage(target: Target, rng: random.Random) -> None:
    """Bytes that are no protocol, on either port."""
    with target.connected(rng.choice([target.http, target.grpc])) as connection:
        connection.sendall(rng.randbytes(rng.randrange(1, 4096)))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(4096)


def half_a_request(target: Target, rng: random.Random) -> None:
    """A body that is announced and does not come, or a head that does not end."""
    request = _post(target, b"x" * rng.randrange(1, MIB))
    with target.connected(target.http) as connection:
        connection.sendall(request[: rng.randrange(1, len(request))])
        time.sleep(HELD_S)


def announced(target: Target, rng: random.Random) -> None:
    """A body near the limit, of which little comes."""
    head = _post(target, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % rng.randrange(MIB, 60 * MIB))
    with target.connected(target.http) as connection:
        connection.sendall(head + bytes(65536))
        time.sleep(HELD_S)


def exploding(target: Target, rng: random.Random) -> None:
    """JSON that would take many times its size, or text that inflates."""
    bodies = [b'{"inputs":[' + b"{}," * 100_000 + b"{}]}", b"[" * MIB, b'{"inputs":[{"shape":[' + b"1," * 100_000]
    with target.connected(target.http) as connection:
        if rng.random() < 0.3:
            connection.sendall(_post(target, _BOMB, b"Content-Encoding: gzip\r\n"))
        else:
            connection.sendall(_post(target, rng.choice(bodies)))
        connection.recv(4096)


def pipelining(target: Target, rng: random.Random) -> None:
    """Many requests at once, of which one is malformed."""
    requests = [b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\n\r\n"] * rng.randrange(10, 200)
    requests.insert(rng.randrange(len(requests)), rng.choice([_post(target, b"{}"), b"\0\r\n\r\n"]))
    with target.connected(target.http) as connection:
        connection.sendall(b"".join(requests))
        connection.recv(4096)


def deaf(target: Target, rng: random.Random) -> None:
    """Requests whose answers are not read."""
    with target.connected(target.http) as connection:
        connection.sendall(b"GET /v2/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
        time.sleep(HELD_S)


def damaged_messages(target: Target, rng: random.Random) -> None:
    """gRPC messages that are none."""
    with closing(grpc.insecure_channel(target.grpc)) as channel:
        call = channel.unary_unary(_SERVICE + rng.choice(["ModelInfer", "ModelConfig", "RepositoryIndex"]))
        for _ in range(rng.randrange(1, 10)):
            call(rng.randbytes(rng.randrange(1, 100_000)), timeout=TIMEOUT_S)


def abandoned_streams(target: Target, rng: random.Random) -> None:
    """Streams that are cancelled, with requests under way."""
    with closing(grpc.insecure_channel(target.grpc)) as channel:
        messages = [rng.randbytes(100) for _ in range(rng.randrange(1, 100))]
        call = channel.stream_stream(_SERVICE + "ModelStreamInfer")(iter(messages), timeout=TIMEOUT_S)
        next(call)
        call.cancel()


def frames(target: Target, rng: random.Random) -> None:
    """HTTP/2 frames without sense."""
    with target.connected(target.grpc) as connection:
        connection.sendall(_PREFACE)
        for _ in range(rng.randrange(1, 20)):
            payload = rng.randbytes(rng.randrange(0, 200))
            head = len(payload).to_bytes(3, "big") + rng.randbytes(2) + rng.randrange(20).to_bytes(4, "big")
            connection.sendall(head + payload)
        connection.recv(4096)


ATTACKS: Sequence[Attack] = (
    garbage,
    half_a_request,
    announced,
    exploding,
    pipelining,
    deaf,
    damaged_messages,
    abandoned_streams,
    frames,
)


def attack_until(stop: threading.Event, target: Target, seed: int, rate_per_s: float) -> Counter[str]:
    """Attack at random times, whatever becomes of it. Returns how often, by attack."""
    rng, made = random.Random(seed), Counter[str]()
    while not stop.wait(rng.expovariate(rate_per_s)):
        attack = rng.choice(ATTACKS)
        made[attack.__name__] += 1
        with suppress(OSError, grpc.RpcError, StopIteration):
            attack(target, rng)
    return made


def _post(target: Target, body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST /v2/models/%b/infer HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n"
    return head % (target.model.encode(), headers, len(body)) + body


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attacks", description=__doc__)
    parser.add_argument("http", help="HOST:PORT")
    parser.add_argument("grpc", help="HOST:PORT")
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=8, help="at a time (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="attacks per second of all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    target, stop = Target(options.http, options.grpc, options.model), threading.Event()
    with ThreadPoolExecutor(options.clients) as clients:
        attackers = [
            clients.submit(attack_until, stop, target, options.seed + n, options.rate / options.clients)
            for n in range(options.clients)
        ]
        sys.stdin.read()  # until the parent closes it
        stop.set()
        made = sum((attacker.result() for attacker in attackers), Counter[str]())
    print(" ".join(f"{name}={count}" for name, count in sorted(made.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
