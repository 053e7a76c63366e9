"""What `cohabit serve` was told: every flag of `server.config.flags`, read once into a frozen object."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from server.config.sizes import FixedSize, MemorySize, parse_bandwidth, parse_memory, parse_size
from server.errors import ConfigError, FlagError

_T = TypeVar("_T")

Layout = Literal["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"]
Store = Literal["ram", "file"]
LogFormat = Literal["text", "json"]
ClientShm = Literal["auto", "on", "off"]
ModelControl = Literal["none", "explicit", "poll"]
PortAccess = Literal["open", "token"]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

_LARGEST_BATCH = 1 << 16
_MOST_LANES = 16


@dataclass(frozen=True, slots=True)
class ServeConfig:
    repository: Path
    memory: MemorySize
    layout: Layout = "partitioned"
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0 takes any free port."""
    grpc_port: int | None = 8001
    """None for no gRPC."""
    metrics_port: int = 8002
    cache: Path | None = None
    """Where lowered models, profiles and plans are kept; None for the loader's choice."""
    device: str = "cpu"
    store: Store = "ram"
    link_bandwidth_bytes_per_s: float | None = None
    scripted: bool | None = None
    """Whether stretches of a model's calls run outside of Python's interpreter; None for wherever that can be had."""
    threads: int | None = None
    compute_lanes: int = 1
    """How many inferences run side by side, of different models."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    prefetch: bool = True
    """Whether the next model's copies begin beside the inference before its own."""
    queue_limit: int = 256
    queue_bytes: int = 1 << 30
    """Most bytes of inputs that may wait, of all models together."""
    max_body_bytes: int = 64 << 20
    max_connections: int = 1024
    """Per port."""
    exit_timeout_s: float = 30.0
    model_rates: Mapping[str, float] = field(default_factory=dict)
    """Expected requests per second by model; a model without a rate counts as their mean."""
    model_control: ModelControl = "none"
    load_models: tuple[str, ...] = ()
    """What is loaded at start where models are loaded by request; "*" is all."""
    poll_interval_s: float = 15.0
    strict_readiness: bool = True
    """Whether one model that cannot be served makes the server not ready."""
    exit_on_error: bool = False
    log_format: LogFormat = "text"
    client_shm: ClientShm = "auto"
    token_files: tuple[Path, ...] = ()
    """Tokens of which calls must show one; without any, whoever reaches a port may use it."""
    control_token_files: tuple[Path, ...] = ()
    """Tokens that also permit to load, unload and change settings."""
    trace_file: Path | None = None
    """Where spans of requests are written; None traces nothing."""
    trace_rate: int = 1000
    """Every how many requests of a model one is traced, until a client changes it."""
    health_access: PortAccess = "open"
    metrics_access: PortAccess = "token"

    @property
    def takes_client_shm(self) -> bool:
        """Whether clients may name shared memory of this machine: by default, where only this machine's can ask."""
        return self.client_shm == "on" or (self.client_shm == "auto" and self.host in LOOPBACK)

    @property
    def wants_stretches(self) -> bool:
        """Whether models run in stretches if torch can do that: by default on the CPU."""
        return self.device == "cpu" and self.scripted is not False


def config_of(options: argparse.Namespace) -> ServeConfig:
    """Check every flag. Raises ConfigError, which names the flag."""
    config = ServeConfig(
        repository=Path(options.repository),
        memory=read("--memory", options.memory, parse_memory),
        layout=options.layout,
        host=options.host,
        http_port=read("--http-port", options.http_port, integer(0, 65535)),
        grpc_port=read("--grpc-port", options.grpc_port, _port_or_off),
        client_shm=options.client_shm,
        metrics_port=read("--metrics-port", options.metrics_port, integer(0, 65535)),
        cache=None if options.cache is None else Path(options.cache),
        device=options.device,
        store=options.store,
        link_bandwidth_bytes_per_s=optional("--link-bandwidth", options.link_bandwidth, parse_bandwidth),
        scripted=options.scripted,
        compute_lanes=read("--compute-lanes", options.compute_lanes, integer(1, _MOST_LANES)),
        threads=optional("--threads", options.threads, integer(1, 1024)),
        batch_sizes=read("--batch-sizes", options.batch_sizes, _batch_sizes),
        prefetch=options.prefetch,
        queue_limit=read("--queue-limit", options.queue_limit, integer(1, 1 << 20)),
        queue_bytes=read("--queue-memory", options.queue_memory, parse_size),
        model_control=options.model_control,
        load_models=tuple(dict.fromkeys(options.load_model)),
        poll_interval_s=read("--poll-interval", options.poll_interval, _interval),
        strict_readiness=options.strict_readiness,
        exit_on_error=options.exit_on_error,
        max_body_bytes=read("--max-body", options.max_body, parse_size),
        max_connections=read("--max-connections", options.max_connections, integer(1, 1 << 20)),
        exit_timeout_s=read("--exit-timeout-secs", options.exit_timeout_secs, _seconds),
        model_rates=dict(read("--model-rate", text, _rate) for text in options.model_rate),
        log_format=options.log_format,
        trace_file=None if options.trace_file is None else Path(options.trace_file),
        trace_rate=read("--trace-rate", options.trace_rate, integer(1, 999_999_999)),
        token_files=tuple(Path(name) for name in options.token_file),
        control_token_files=tuple(Path(name) for name in options.control_token_file),
        health_access=options.health_access,
        metrics_access=options.metrics_access,
    )
    _refuse_contradictions(config)
    return config


def _refuse_contradictions(config: ServeConfig) -> None:
    if config.load_models and config.model_control != "explicit":
        raise ConfigError("--load-model needs --model-control explicit")
    if config.model_control != "none" and config.layout not in ("partitioned", "resident"):
        raise ConfigError(f"--model-control {config.model_control} needs a layout in which models have partitions")
    if config.scripted and config.device != "cpu":
        raise ConfigError(
            f"--scripted is for the CPU; {config.device} replays graphs, which need no Python between ops"
        )
    if config.compute_lanes > 1 and config.layout not in ("partitioned", "resident"):
        raise ConfigError(
            f"--compute-lanes {config.compute_lanes} needs a layout in which models have partitions; in"
            f" {config.layout} they share one region, which one inference at a time may change"
        )
    if config.model_control == "explicit" and not isinstance(config.memory, FixedSize):
        raise ConfigError("--memory: a share of the weights means nothing before models are loaded; give a size")


def read(flag: str, text: str, parse: Callable[[str], _T]) -> _T:
    """Read a flag's value. Raises FlagError."""
    try:
        return parse(text)
    except ValueError as error:
        raise FlagError(flag, str(error)) from error


def optional(flag: str, text: str | None, parse: Callable[[str], _T]) -> _T | None:
    return None if text is None else read(flag, text, parse)


def integer(least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers, which raises ValueError for others."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or not least <= int(text) <= most:
            raise ValueError(f"'{text}' is not a whole number from {least} to {most}")
        return int(text)

    return parse


def _port_or_off(text: str) -> int | None:
    return None if text == "off" else integer(0, 65535)(text)


def _batch_sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({integer(1, _LARGEST_BATCH)(part.strip()) for part in text.split(",")}))


def _seconds(text: str) -> float:
    return positive(text, "a number of seconds", allow_zero=True)


def _interval(text: str) -> float:
    return positive(text, "a number of seconds over zero")


def _rate(text: str) -> tuple[str, float]:
    name, separator, rate = text.rpartition("=")
    if not separator or not name:
        raise ValueError(f"'{text}' is not of the form NAME=RATE")
    return name, positive(rate, "a rate in requests per second")


def positive(text: str, what: str, allow_zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0 or (value == 0 and not allow_zero):
        raise ValueError(f"'{text}' is not {what}")
    return value
