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

from cohabit.server.config.setting import Setting, declared, flag, setting
from cohabit.server.config.sizes import FixedSize, MemorySize, parse_bandwidth, parse_memory, parse_size, write_size
from cohabit.server.config.values import batches, integer, model_rate, port, port_or_off, seconds, seconds_or_zero
from cohabit.server.errors import ConfigError

Layout = Literal["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"]
Store = Literal["ram", "file"]
LogFormat = Literal["text", "json"]
ClientShm = Literal["auto", "on", "off", "any-user"]
ModelControl = Literal["none", "explicit", "poll"]
OnOff = Literal["on", "off"]
PortAccess = Literal["open", "token"]
EngineMode = Literal["process", "in-process"]
Search = Literal["best", "genetic", "streaming"]

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_PARTITIONED: tuple[Layout, ...] = ("partitioned", "resident")


def _commas(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class ServeConfig:
    repository: Path = field(metadata=flag("REPOSITORY", "folder of NAME/VERSION/model.pt2", Path, "REPOSITORY"))

    memory: MemorySize = field(
        metadata=flag(
            "--memory",
            "device memory for all models, without embedding tables: 64MiB, 8GiB, 82MB, or 25% of the sum of their"
            " weights; required unless --process-memory or a bundle gives it",
            parse_memory,
            "SIZE",
            group="memory",
        )
    )
    process_memory_bytes: int | None = setting(
        None,
        "--process-memory",
        "limit for all processes of the server, instead of --memory: Python, torch, requests, the host store and the"
        " models, which get the rest. --queue-memory is then a sixteenth of it, unless given",
        parse_size,
        "SIZE",
        write_size,
    )
    layout: Layout = setting(
        "partitioned",
        "--layout",
        "how models share the memory. partitioned: each has a part of its own; resident: all stay in memory;"
        " time_shared: one at a time, copied before it computes; pipelined: one at a time, copied while it"
        " computes; lru, on_demand: whole models, or single parameters, stay until others need the space",
    )
    model_rates: Mapping[str, float] = setting(
        dict,
        "--model-rate",
        "expected requests per second of a model, so that busy models get more memory (default: the mean of the given"
        " rates)",
        model_rate,
        "NAME=RATE",
        repeatable=True,
    )
    search: Search = setting(
        "best",
        "--search",
        "how plans are searched for. best: streaming and genetic, with activation offloading if needed; streaming and"
        " genetic alone keep activations in memory, and refuse memory in which that is impossible",
    )
    device: str = setting(
        "cpu", "--device", "device that runs the models: cpu, cuda, or cuda:N", metavar="NAME", group="device"
    )
    store: Store = setting("ram", "--store", "where parameters are kept that are not in device memory")
    verify_reads: bool = setting(
        False,
        "--verify-reads",
        "verify checksums on every read of weights; with --store file, embedding tables are then kept in memory",
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
    bundle: Path | None = setting(
        None,
        "--bundle",
        "serve what `cohabit export-bundle` wrote to this folder; the same as giving the folder as REPOSITORY",
        Path,
        "DIR",
    )

    model_control: ModelControl = setting(
        "none",
        "--model-control",
        "when models are loaded. none: all at start; explicit: by request, and those of --load-model at start;"
        " poll: whenever the repository changes",
        group="models",
    )
    load_models: tuple[str, ...] = setting(
        (),
        "--load-model",
        "with --model-control explicit, a model to load at start; '*' is all",
        metavar="NAME",
        repeatable=True,
    )
    poll_interval_s: float = setting(
        15.0,
        "--poll-interval",
        "with --model-control poll, time between two scans of the repository",
        seconds,
        "SECONDS",
    )
    strict_readiness: bool = setting(True, "--strict-readiness", "ready only while all requested models are loaded")
    exit_on_error: bool = setting(
        False, "--exit-on-error", "exit if a model cannot be loaded at start; otherwise skip it"
    )
    quick_start: bool = setting(
        True,
        "--quick-start",
        "serve models that the cache lacks on plans from a quick measurement, and measure and plan them while they are"
        " served; otherwise all of that is done before. --engine in-process and layouts without partitions always wait",
    )

    prepare_timeout_s: float = setting(
        600.0, "--prepare-timeout", "time to prepare or plan a model in a process of its own", seconds, "SECONDS"
    )
    prepare_memory_bytes: int | None = setting(
        None,
        "--prepare-memory",
        "memory that a preparing process may allocate; without it, the kernel ends such a process first if memory runs"
        " out",
        parse_size,
        "SIZE",
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
        "kill and restart the engine after this long without progress: an execution that also takes 20 times its"
        " prediction, or an event loop that does not run; 0 switches that off",
        seconds_or_zero,
        "SECONDS",
    )
    threads: int | None = setting(
        None,
        "--threads",
        "CPU threads of one inference; by default one fewer than there are CPUs, divided among the compute lanes",
        integer(1, 1024),
        "N",
    )
    pack_weights: bool = setting(
        True,
        "--pack-weights",
        "on a CPU, prepack weights for oneDNN and this processor; plain weights are slower, and run on every"
        " processor",
    )
    compute_lanes: int = setting(
        1,
        "--compute-lanes",
        "number of inferences that run in parallel. A model belongs to one lane; each lane has a workspace and, on"
        " a CPU, a share of the cores. Helps small models that leave cores idle, and costs latency otherwise",
        integer(1, 16),
        "N",
    )
    batch_sizes: tuple[int, ...] = setting(
        (1, 2, 4, 8),
        "--batch-sizes",
        "batch sizes to plan for; a request is padded to the next one, unless rows influence one another",
        batches,
        "N,N,...",
        _commas,
    )
    shape_buckets: tuple[int, ...] | None = setting(
        None,
        "--shape-buckets",
        "sizes to plan for of each dynamic dimension other than the batch, such as a sequence's length; a request runs"
        " at its own size with the plan of the next one. Requests cannot be larger than the largest (default: powers"
        " of two from 16 on, and the largest size that the model was exported for)",
        batches,
        "N,N,...",
        _commas,
    )

    hosts: tuple[str, ...] = setting(
        ("127.0.0.1",),
        "--host",
        "address to listen on; localhost is both IPv4 and IPv6",
        metavar="ADDRESS",
        repeatable=True,
        group="network",
    )
    http_port: int = setting(8000, "--http-port", "0 takes any free port", port, "PORT")
    grpc_port: int | None = setting(
        8001, "--grpc-port", "0 takes any free port, off disables gRPC", port_or_off, "PORT"
    )
    metrics_port: int | None = setting(
        8002, "--metrics-port", "0 takes any free port, off serves no metrics", port_or_off, "PORT"
    )
    http_unix: Path | None = setting(None, "--http-unix", "Unix socket that also accepts HTTP", Path, "PATH")
    grpc_unix: Path | None = setting(None, "--grpc-unix", "Unix socket that also accepts gRPC", Path, "PATH")
    server_name: str = setting(
        "cohabit",
        "--server-name",
        "name in the server's metadata; programs that were written for Triton may compare it with 'triton'",
        metavar="NAME",
    )
    frontends: int = setting(
        1, "--frontends", "number of processes that accept requests on the ports", integer(1, 64), "N"
    )
    max_connections: int = setting(1024, "--max-connections", "open connections per port", integer(1, 1 << 20), "N")
    keep_alive_s: float = setting(
        75.0, "--keep-alive", "close a connection that was idle for this long", seconds, "SECONDS"
    )
    max_connection_age_s: float | None = setting(
        None,
        "--max-connection-age",
        "ask clients to reconnect after this long, so that a load balancer can move them (default: never)",
        seconds,
        "SECONDS",
    )
    exit_timeout_s: float = setting(
        30.0, "--exit-timeout-secs", "on SIGTERM, time to finish the requests in flight", seconds_or_zero, "SECONDS"
    )

    max_body_bytes: int = setting(
        64 << 20, "--max-body", "largest request body", parse_size, "SIZE", write_size, group="requests"
    )
    max_json_bytes: int = setting(
        16 << 20,
        "--max-json",
        "largest JSON of a request, and largest gRPC request without its raw contents; tensors should be sent as bytes",
        parse_size,
        "SIZE",
        write_size,
    )
    queue_limit: int = setting(
        8192,
        "--queue-limit",
        "requests that may wait per model; more are answered 503. The default is above what one front end's connections"
        " and gRPC calls can have under way, so that --queue-memory and timeouts bound the queue",
        integer(1, 1 << 20),
        "N",
    )
    queue_bytes: int = setting(
        1 << 30,
        "--queue-memory",
        "shared memory for requests that are not answered yet: bodies, inputs and outputs; per front end",
        parse_size,
        "SIZE",
        write_size,
    )
    client_shm: ClientShm = setting(
        "auto",
        "--client-shm",
        "let clients pass tensors in shared memory of this machine, in objects of the server's own user or of any user;"
        " auto allows the former if the server listens on loopback addresses only",
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
        "file of tokens that permit every call, also to load and unload models, register shared memory and change"
        " settings",
        Path,
        "FILE",
        repeatable=True,
    )
    health_access: PortAccess = setting("open", "--health-access", "with tokens, whether health checks need one")
    metrics_access: PortAccess = setting("token", "--metrics-access", "with tokens, whether metrics need one")
    tls_cert: Path | None = setting(
        None, "--tls-cert", "certificate chain (PEM); all ports then use TLS", Path, "FILE"
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
    trace_file: Path | None = setting(
        None,
        "--trace-file",
        "write spans of sampled requests here, as JSON for Perfetto and chrome://tracing",
        Path,
        "FILE",
    )
    trace_rate: int = setting(
        1000, "--trace-rate", "with --trace-file, trace every N-th request of a model", integer(1, 999_999_999), "N"
    )

    frontend_bytes: int = 0
    """Internal, no setting: resident memory of the front end at the start, which --process-memory counts."""

    @property
    def is_loopback(self) -> bool:
        """Whether every address to listen on belongs to this machine alone."""
        return LOOPBACK.issuperset(self.hosts)

    @property
    def has_partitions(self) -> bool:
        """Whether each model has memory of its own."""
        return self.layout in _PARTITIONED

    @property
    def plans_later(self) -> bool:
        """Whether models are served before they are fully measured and planned."""
        return self.quick_start and self.prepares_in_workers and self.has_partitions

    @property
    def prepares_in_workers(self) -> bool:
        """Whether models that the cache lacks are prepared in other processes; those of a bundle are prepared."""
        return self.engine == "process" and self.bundle is None

    @property
    def takes_client_shm(self) -> bool:
        """Whether clients may register shared memory; several front ends do not share registrations."""
        allowed = self.is_loopback if self.client_shm == "auto" else self.client_shm != "off"
        return self.frontends == 1 and allowed


def cache_of(config: ServeConfig) -> Path:
    """Return the folder of lowered models, profiles and plans."""
    return config.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohabit"


SETTINGS: tuple[Setting, ...] = tuple(declared(ServeConfig))
BY_KEY: Mapping[str, Setting] = {setting.key: setting for setting in SETTINGS}


def check_consistent(config: ServeConfig) -> None:
    """Raise ConfigError for settings that contradict each other; the message names them."""
    partitioned = config.has_partitions
    if config.load_models and config.model_control != "explicit":
        raise ConfigError("--load-model needs --model-control explicit")
    if config.model_control != "none" and not partitioned:
        raise ConfigError(f"--model-control {config.model_control} needs a layout in which models have partitions")
    if config.compute_lanes > 1 and not partitioned:
        raise ConfigError(
            f"--compute-lanes {config.compute_lanes} needs a layout in which models have partitions; in"
            f" {config.layout} they share one region, which one inference at a time may change"
        )
    if config.model_control == "explicit" and not isinstance(config.memory, FixedSize):
        raise ConfigError("--memory: a share of the weights means nothing before models are loaded; give a size")
    if config.process_memory_bytes is not None and (config.device != "cpu" or config.frontends > 1):
        raise ConfigError("--process-memory needs --device cpu and --frontends 1")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key need each other")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
    if config.frontends > 1 and config.engine != "process":
        raise ConfigError(f"--frontends {config.frontends} needs --engine process, which they share")
    if config.frontends > 1 and 0 in (config.http_port, config.grpc_port, config.metrics_port):
        raise ConfigError(f"--frontends {config.frontends} needs fixed ports; 0 would give each its own")
    if config.frontends > 1 and config.client_shm in ("on", "any-user"):
        raise ConfigError("--client-shm needs --frontends 1: front ends do not share what clients register")
    if config.frontends > 1 and config.trace_file is not None:
        raise ConfigError("--trace-file needs --frontends 1: front ends do not share a trace file")
    if config.http_unix is not None and config.http_unix == config.grpc_unix:
        raise ConfigError("--http-unix and --grpc-unix need different paths")


def encode_config(config: ServeConfig) -> bytes:
    """Encode a config as msgpack, for the engine's process."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(raw: bytes) -> ServeConfig:
    """Decode what `encode_config` wrote."""
    return msgspec.msgpack.decode(raw, type=ServeConfig, dec_hook=lambda kind, value: kind(value))
