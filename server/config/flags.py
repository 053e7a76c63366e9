"""The flags of `cohabit serve`; their values stay text until `server.config.config` checks them."""

import argparse
from pathlib import Path
from typing import get_args

from server.config.config import ClientShm, Layout, LogFormat, ModelControl, PortAccess, Store


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `serve`; the values stay text until `read_config` checks them."""
    parser.add_argument("repository", type=Path, metavar="REPOSITORY", help="folder of NAME/VERSION/model.pt2")
    memory = parser.add_argument_group("memory")
    memory.add_argument(
        "--memory",
        required=True,
        metavar="SIZE",
        help="device memory for all models: 64MiB, 8GiB, 82MB, or 25%% of the sum of their weights",
    )
    memory.add_argument(
        "--layout",
        choices=get_args(Layout),
        default="partitioned",
        help="how models share the memory: a partition each (the default); all of them resident; or one region, in"
        " which one model at a time is copied in whole (time_shared) or layer by layer while it computes (pipelined),"
        " or in which whole models (lru) or parameters (on_demand) stay until others need the room",
    )
    memory.add_argument(
        "--model-rate",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="requests per second to expect of a model, so that busy models get more memory; repeatable",
    )
    add_device_flags(memory)
    _add_control_flags(parser.add_argument_group("models"))
    compute = parser.add_argument_group("compute")
    add_computing_flags(compute)
    compute.add_argument(
        "--compute-lanes",
        default="1",
        metavar="N",
        help="inferences that run side by side; each model belongs to one lane, each lane takes a workspace of its own,"
        " and on a CPU the lanes divide the cores. For models too small to keep the device busy one at a time: it pays"
        " where cores, or a GPU's multiprocessors, are idle otherwise, and costs latency where not (default:"
        " %(default)s)",
    )
    compute.add_argument(
        "--prefetch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="begin the next model's copies beside the inference before its own (default: yes)",
    )
    compute.add_argument(
        "--batch-sizes",
        default="1,2,4,8",
        metavar="N,N,...",
        help="batch sizes to plan for; a request is padded to the next (default: %(default)s)",
    )
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument(
        "--http-port", default="8000", metavar="PORT", help="0 takes any free port (default: %(default)s)"
    )
    http.add_argument(
        "--grpc-port", default="8001", metavar="PORT", help="0 takes any free port, off none (default: %(default)s)"
    )
    http.add_argument(
        "--client-shm",
        choices=get_args(ClientShm),
        default="auto",
        help="whether clients may have tensors read from and written to shared memory of this machine; auto where the"
        " server listens on a loopback address only (default: %(default)s)",
    )
    http.add_argument("--metrics-port", default="8002", metavar="PORT", help="(default: %(default)s)")
    http.add_argument(
        "--queue-limit", default="256", metavar="N", help="requests that may wait per model (default: %(default)s)"
    )
    http.add_argument(
        "--queue-memory",
        default="1GiB",
        metavar="SIZE",
        help="bytes of inputs that may wait, of all models together (default: %(default)s)",
    )
    http.add_argument(
        "--max-body", default="64MiB", metavar="SIZE", help="largest request body (default: %(default)s)"
    )
    http.add_argument(
        "--max-connections",
        default="1024",
        metavar="N",
        help="connections that a port has open at once (default: %(default)s)",
    )
    http.add_argument(
        "--exit-timeout-secs",
        default="30",
        metavar="S",
        help="on SIGTERM, how long to wait for requests in flight (default: %(default)s)",
    )
    http.add_argument("--log-format", choices=get_args(LogFormat), default="text", help="(default: %(default)s)")
    http.add_argument(
        "--trace-file",
        metavar="FILE",
        help="write the spans of some requests, as JSON that Perfetto and chrome://tracing open",
    )
    http.add_argument(
        "--trace-rate",
        default="1000",
        metavar="N",
        help="with --trace-file, trace every N-th request of a model (default: %(default)s)",
    )
    _add_access_flags(parser.add_argument_group("access"))


def _add_access_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token-file",
        action="append",
        default=[],
        metavar="FILE",
        help="tokens, one a line, of which every call must show one (Authorization: Bearer TOKEN); repeatable",
    )
    group.add_argument(
        "--control-token-file",
        action="append",
        default=[],
        metavar="FILE",
        help="tokens that permit everything, also to load, unload, register shared memory and change settings;"
        " repeatable",
    )
    group.add_argument(
        "--health-access",
        choices=get_args(PortAccess),
        default="open",
        help="where there are tokens, whether health needs one (default: %(default)s)",
    )
    group.add_argument(
        "--metrics-access",
        choices=get_args(PortAccess),
        default="token",
        help="where there are tokens, whether metrics need one (default: %(default)s)",
    )


def _add_control_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model-control",
        choices=get_args(ModelControl),
        default="none",
        help="load all models at start and none later; or on request, those of --load-model at start; or whenever the"
        " repository changes (default: %(default)s)",
    )
    group.add_argument(
        "--load-model",
        action="append",
        default=[],
        metavar="NAME",
        help="with --model-control explicit, what to load at start; repeatable, '*' is all",
    )
    group.add_argument(
        "--poll-interval",
        default="15",
        metavar="S",
        help="with --model-control poll, how often to look at the repository (default: %(default)s)",
    )
    group.add_argument(
        "--strict-readiness",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="be ready only when every model asked for can be served (default: yes)",
    )
    group.add_argument(
        "--exit-on-error",
        action="store_true",
        help="stop if a model cannot be loaded at start, instead of serving the others",
    )


def add_device_flags(group: argparse._ArgumentGroup) -> None:
    """Declare where parameters wait, how fast they come, and where what was measured is kept."""
    group.add_argument(
        "--device",
        default="cpu",
        metavar="NAME",
        help="what models run on: cpu, cuda, or cuda:N (default: %(default)s)",
    )
    group.add_argument(
        "--store",
        choices=get_args(Store),
        default="ram",
        help="where parameters wait that are not in device memory (default: %(default)s)",
    )
    group.add_argument(
        "--link-bandwidth", metavar="SIZE/s", help="slow copies down to this, to stand in for another bus or flash"
    )
    group.add_argument("--cache", type=Path, metavar="DIR", help="where profiles and plans are kept between starts")


def add_computing_flags(group: argparse._ArgumentGroup) -> None:
    """Declare how one inference computes: models are measured as they will be served."""
    group.add_argument("--threads", metavar="N", help="threads that one inference computes with")
    group.add_argument(
        "--scripted",
        action=argparse.BooleanOptionalAction,
        help="on the CPU, run stretches of a model's ops as one call outside of Python, with the same bits and less"
        " time per inference, above all under load (default: yes, on the CPU)",
    )
