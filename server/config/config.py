"""The settings of `cohabit serve`, each declared once.

`server.config.sources` derives flags, environment variables, the settings file and `--print-config` from these fields.
"""

# ruff: noqa: RUF009 - setting() returns a dataclass field
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from cohabit.planner.memory import parse_size
from cohabit.planner.parts import Part, PartRegistry
from cohabit.planner.shapes import ShapeBuckets
from cohabit.server.config.setting import Setting, declared, flag, setting
from cohabit.server.config.sizes import FixedSize, MemorySize, parse_bandwidth, parse_memory, write_size
from cohabit.server.config.values import (
    batches,
    integer,
    model_rates,
    port,
    port_or_off,
    seconds,
    seconds_or_zero,
    shape_buckets,
    trace_option,
)
from cohabit.server.errors import ConfigError

Store = Literal["ram", "file", "verified-file"]
Weights = Literal["float32", "bfloat16", "int8"]
LogFormat = Literal["text", "json"]
ClientShm = Literal["auto", "on", "off", "any-user"]
ModelControl = Literal["none", "explicit", "poll"]
OnOff = Literal["on", "off"]
EngineMode = Literal["process", "in-process"]
Search = Literal["best", "genetic"]

MOST_WAITING = 8192
"""More than the connections and gRPC calls of one front end can have in flight: memory and timeouts bound queues."""
_UNIX, _NAME = "unix:", "name:"
_TRACE_RATE = 1000
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
PARTITIONED = ("partitioned", "elastic", "resident")
"""Layouts in which each model has a partition."""
LAYOUTS = PartRegistry("cohabit.layouts", dict.fromkeys(PARTITIONED, Part("")))
"""Layouts by name. Those without partitions are a `runtime.backend.OpenLayout`; the others have no part to import."""


def _commas(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    repository: Path = field(
        metadata=flag(
            "REPOSITORY",
            "folder of NAME/VERSION/model.pt2, or one that `cohabit export-bundle` wrote",
            Path,
            "REPOSITORY",
        )
    )

    memory: MemorySize = field(
        metadata=flag(
            "--memory",
            "device memory for all models, as a size (64MiB, 8GiB, 82MB) or a share of the sum of their weights (25%);"
            " without it, a CPU server takes what the machine or container has left, as with --process-memory",
            parse_memory,
            "SIZE",
            group="memory",
        )
    )
    process_memory_bytes: int | None = setting(
        None,
        "--process-memory",
        "limit for the whole process tree instead of --memory: models get the rest",
        parse_size,
        "SIZE",
        write_size,
    )
    layout: str = setting(
        "partitioned",
        "--layout",
        "how models share the memory: a partition each (partitioned), whose sizes follow measured request rates"
        " (elastic); all weights resident (resident); one model at a time, copied before (time_shared) or while it"
        " computes (pipelined); LRU (lru, on_demand)",
        metavar="NAME",
        choices=LAYOUTS,
    )
    model_rates: Mapping[str, float] = setting(
        dict,
        "--rates",
        "expected requests per second of a model, or a file of lines NAME=RATE: memory and compute lanes are divided by"
        " these (default: mean of the given rates)",
        model_rates,
        "NAME=RATE|FILE",
        repeatable=True,
    )
    search: Search = setting(
        "best",
        "--search",
        "how plans are searched for: by the genetic search, with activation offloading if needed (best) or without",
    )
    device: str = setting(
        "cpu", "--device", "device that runs the models: cpu, cuda, or cuda:N", metavar="NAME", group="device"
    )
    store: Store = setting(
        "ram",
        "--store",
        "where parameters outside of device memory are kept: in RAM, in the weights file, or in the weights file with"
        " checksums verified on every read (verified-file)",
    )
    link_bandwidth_bytes_per_s: float | None = setting(
        None,
        "--link-bandwidth",
        "limit the bandwidth of copies, to emulate a slower bus or flash",
        parse_bandwidth,
        "SIZE/s",
    )
    cache: Path | None = setting(
        None, "--cache", "folder that keeps lowered models, profiles and plans between starts", Path, "DIR"
    )

    model_control: ModelControl = setting(
        "none",
        "--model-control-mode",
        "when models are loaded: at the start (none), on request (explicit), or when the repository changes (poll)",
        aliases=("--model-control",),
        group="models",
    )
    load_models: tuple[str, ...] = setting(
        (),
        "--load-model",
        "model to load at the start with --model-control-mode explicit; '*' is all",
        metavar="NAME",
        repeatable=True,
    )
    poll_interval_s: float = setting(
        15.0,
        "--repository-poll-secs",
        "time between two scans of the repository with --model-control-mode poll",
        seconds,
        "SECONDS",
        aliases=("--poll-interval",),
    )
    strict_readiness: bool = setting(True, "--strict-readiness", "ready only if all requested models are loaded")
    exit_on_error: bool = setting(
        False, "--exit-on-error", "exit if a model cannot be loaded at the start, instead of skipping it"
    )
    quick_start: bool = setting(
        True,
        "--quick-start",
        "serve models that the cache lacks on plans from a quick measurement until they are fully measured and planned",
    )

    engine: EngineMode = setting(
        "process",
        "--engine",
        "run the engine in a process of its own, which is restarted if it fails, or in the server's process, which"
        " needs less memory",
        group="compute",
    )
    watchdog_s: float = setting(
        10.0,
        "--watchdog",
        "kill and restart the engine after this long without progress; 0 disables the watchdog",
        seconds_or_zero,
        "SECONDS",
    )
    threads: int | None = setting(
        None,
        "--threads",
        "CPU threads of one inference (default: one fewer than there are CPUs, divided among the compute lanes)",
        integer(1, 1024),
        "N",
    )
    compute_lanes: int = setting(
        1,
        "--compute-lanes",
        "number of inferences that run in parallel, each with a workspace and a share of the cores",
        integer(1, 16),
        "N",
    )
    batch_sizes: tuple[int, ...] | None = setting(
        None,
        "--batch-sizes",
        "batch sizes to plan for; a request is padded to the next one, or runs in parts if it is larger than the last,"
        " unless rows influence one another (default: 1, 2, 4, 8, and max_batch_size and preferred_batch_size of"
        " config.pbtxt)",
        batches,
        "N,N,...",
        _commas,
    )
    shape_buckets: ShapeBuckets | None = setting(
        None,
        "--shape-buckets",
        "sizes to plan for, of each dynamic dimension except the batch, or of named ones"
        " ('tokens.1=16,64;image.2=224'); requests above the largest size are refused (default: powers of two from 16"
        " on, and the largest size that the model was exported for)",
        shape_buckets,
        "N,N,...",
        str,
    )

    weights: Weights = setting(
        "float32",
        "--weights",
        "how weights are stored and copied: exactly, in 16 bits where no bit is lost (float32), or rounded to 16 or 8"
        " bits (bfloat16, int8), which changes answers a little; computation always uses float32",
    )

    hosts: tuple[str, ...] = setting(
        ("127.0.0.1",),
        "--host",
        "address to listen on, unix:DIR for the additional Unix sockets DIR/http.sock and DIR/grpc.sock, or name:NAME"
        " for a name by which browsers may change the server",
        metavar="ADDRESS",
        repeatable=True,
        group="network",
    )
    http_port: int = setting(8000, "--http-port", "port of HTTP; 0 takes any free port", port, "PORT")
    grpc_port: int | None = setting(
        8001, "--grpc-port", "port of gRPC; 0 takes any free port, off disables it", port_or_off, "PORT"
    )
    metrics_port: int | None = setting(
        8002,
        "--metrics-port",
        "port of the metrics and of health checks; 0 takes any free port, off disables it",
        port_or_off,
        "PORT",
    )
    max_connections: int = setting(1024, "--max-connections", "open connections per port", integer(1, 1 << 20), "N")
    exit_timeout_s: float = setting(
        30.0,
        "--exit-timeout-secs",
        "time to finish the requests in flight on SIGTERM",
        seconds_or_zero,
        "SECONDS",
        aliases=("--exit-timeout",),
    )

    max_body_bytes: int = setting(
        64 << 20,
        "--max-body",
        "largest request body, after inflation",
        parse_size,
        "SIZE",
        write_size,
        group="requests",
    )
    queue_bytes: int = setting(
        1 << 30,
        "--queue-memory",
        "shared memory for the bodies, inputs and outputs of unanswered requests, per front end; as much again for"
        " states of sequences (default with --process-memory: a sixteenth of it)",
        parse_size,
        "SIZE",
        write_size,
    )
    client_shm: ClientShm = setting(
        "auto",
        "--client-shm",
        "let clients pass tensors in shared memory objects of the server's user (on), of any user (any-user), or of the"
        " server's user if the server listens on loopback addresses only (auto)",
    )

    token_files: tuple[Path, ...] = setting(
        (),
        "--token-file",
        "file with one token per line; all calls but health checks must then present one (Authorization: Bearer TOKEN)",
        Path,
        "FILE",
        repeatable=True,
        group="access",
    )
    control_token_files: tuple[Path, ...] = setting(
        (),
        "--control-token-file",
        "file of tokens that permit every call, also to load and unload models and to register shared memory",
        Path,
        "FILE",
        repeatable=True,
    )
    tls_cert: Path | None = setting(
        None, "--tls-cert", "certificate chain (PEM) with which all ports use TLS", Path, "FILE"
    )
    tls_key: Path | None = setting(None, "--tls-key", "private key of the certificate (PEM)", Path, "FILE")
    tls_client_ca: Path | None = setting(
        None,
        "--tls-client-ca",
        "require client certificates that one of these authorities (PEM) has signed",
        Path,
        "FILE",
    )

    ui: OnOff = setting(
        "on",
        "--ui",
        "show a live page of the models and their memory at / of the HTTP port",
        group="diagnostics",
    )
    log_format: LogFormat = setting("text", "--log-format", "format of log lines")
    trace: Mapping[str, str] = setting(
        dict,
        "--trace-config",
        "file=FILE writes spans of requests there, as JSON for Perfetto and chrome://tracing; otlp=URL sends them to an"
        " OpenTelemetry collector; rate=N traces every N-th request of a model (default: 1000)",
        trace_option,
        "KEY=VALUE",
        repeatable=True,
    )

    pack_weights: bool = True
    """Internal, set by `cohabit export-bundle`: whether weights are prepacked for oneDNN and this processor."""
    bundle: Path | None = None
    """Internal: REPOSITORY, if it is a bundle. `repository` is then the bundle's folder of models."""
    queue_limit: int = MOST_WAITING
    """Internal: maximum number of waiting requests per model."""
    frontend_bytes: int = 0
    """Internal: resident memory of the front end at the start, which --process-memory counts."""
    is_trial: bool = False
    """Internal, set by `cohabit import`: models are loaded only for a comparison, so quick plans are enough."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The hosts that are TCP addresses; 127.0.0.1 if there are none."""
        return tuple(host for host in self.hosts if not host.startswith((_UNIX, _NAME))) or ("127.0.0.1",)

    @property
    def names(self) -> tuple[str, ...]:
        """Names by which browsers reach the server, such as that of a proxy."""
        return tuple(host.removeprefix(_NAME) for host in self.hosts if host.startswith(_NAME))

    @property
    def unix_folder(self) -> Path | None:
        """The folder of the Unix sockets."""
        return next((Path(host.removeprefix(_UNIX)) for host in self.hosts if host.startswith(_UNIX)), None)

    @property
    def is_loopback(self) -> bool:
        """Whether all addresses to listen on are loopback addresses."""
        return LOOPBACK.issuperset(self.addresses)

    @property
    def store_kind(self) -> Literal["ram", "file"]:
        return "ram" if self.store == "ram" else "file"

    @property
    def verifies_reads(self) -> bool:
        """Whether reads of weights are verified with checksums: the one read into RAM, or each read of the file."""
        return self.store != "file"

    @property
    def trace_file(self) -> Path | None:
        return Path(self.trace["file"]) if "file" in self.trace else None

    @property
    def collector(self) -> str | None:
        """The URL of the OpenTelemetry collector."""
        return self.trace.get("otlp")

    @property
    def trace_rate(self) -> int:
        """Every N-th request of a model is traced; this is N."""
        return int(self.trace.get("rate", _TRACE_RATE))

    @property
    def has_partitions(self) -> bool:
        """Whether each model has its own memory."""
        return self.layout in PARTITIONED

    @property
    def plans_later(self) -> bool:
        """Whether models are served before they are fully measured and planned."""
        return self.quick_start and (self.prepares_in_workers or self.is_trial) and self.has_partitions

    @property
    def prepares_in_workers(self) -> bool:
        """Whether uncached models are prepared in worker processes. A bundle needs no preparation."""
        return self.engine == "process" and self.bundle is None

    @property
    def takes_client_shm(self) -> bool:
        """Whether clients may register shared memory."""
        return self.is_loopback if self.client_shm == "auto" else self.client_shm != "off"


def cache_of(config: ServeConfig) -> Path:
    """Return the folder of lowered models, profiles and plans."""
    return config.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohabit"


SETTINGS: tuple[Setting, ...] = tuple(declared(ServeConfig))
BY_KEY: Mapping[str, Setting] = {setting.key: setting for setting in SETTINGS}
BY_NAME: Mapping[str, Setting] = {name: setting for setting in SETTINGS for name in setting.names}
"""By key, including the keys of aliases."""


def check_consistent(config: ServeConfig) -> None:
    """Raise ConfigError for contradictory settings; the message names them."""
    partitioned = config.has_partitions
    if config.load_models and config.model_control != "explicit":
        raise ConfigError("--load-model needs --model-control-mode explicit")
    if config.model_control != "none" and not partitioned:
        raise ConfigError(
            f"--model-control-mode {config.model_control} needs a layout in which models have partitions"
        )
    if config.layout == "elastic" and config.bundle is not None:
        raise ConfigError("--layout elastic: a bundle's plans are for partitions of one size; serve its repository")
    if config.compute_lanes > 1 and not partitioned:
        raise ConfigError(
            f"--compute-lanes {config.compute_lanes} needs a layout in which models have partitions; in"
            f" {config.layout} they share one region, which one inference at a time may change"
        )
    if config.model_control == "explicit" and not isinstance(config.memory, FixedSize):
        raise ConfigError("--memory: a share of the weights means nothing before models are loaded; give a size")
    if config.process_memory_bytes is not None and config.device != "cpu":
        raise ConfigError("--process-memory needs --device cpu")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key need each other")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
    if "rate" in config.trace and config.trace_file is None and config.collector is None:
        raise ConfigError("--trace-config rate= needs --trace-config file=FILE or otlp=URL")
    if sum(host.startswith(_UNIX) for host in config.hosts) > 1:
        raise ConfigError("--host: give one folder for Unix sockets")


def encode_config(config: ServeConfig) -> bytes:
    """Encode a config as msgpack, for the engine's process."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(raw: bytes) -> ServeConfig:
    """Decode what `encode_config` wrote."""
    return msgspec.msgpack.decode(raw, type=ServeConfig, dec_hook=lambda kind, value: kind(value))
