"""`cohabit scale`: serves a repository with several engines, which Ray Serve places."""

import argparse
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

from rich.console import Console

from cohabit.server.config.config import BY_KEY
from cohabit.server.config.sources import add_flag, given, typed
from cohabit.server.config.values import integer
from cohabit.server.errors import ConfigError, StartFailed
from cohabit.server.format import make_table
from cohabit.server.scale.settings import ENGINE_SETTINGS, ScalePlan, count, plan_engines

NAME = "cohabit"
_EXAMPLES = """examples:
  cohabit scale ./models --replicas 2 --memory 8GiB
  cohabit scale ./models --replicas 4 --memory 40GiB --device cuda --rates rates.txt --copies 2
  RAY_ADDRESS=head:6379 cohabit scale /models --replicas 16 --memory 8GiB --host 0.0.0.0
  serve run cohabit.server.scale.app:app repository=/models memory=8GiB replicas=2

Needs Ray Serve: pip install 'cohabit[scale]'. On a cluster, REPOSITORY is the same path on every machine.
"""

_HELP = {
    "repository": "folder with the models; no bundle, which is made for one engine",
    "memory": "device memory of one engine, as a size (64MiB, 8GiB)",
    "rates": "expected requests per second of a model, or a file of lines NAME=RATE: models are assigned by these",
    "threads": "threads that one inference computes with (default: 1)",
}
"""Help texts that differ from those of `cohabit serve`."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.usage = "cohabit scale REPOSITORY --replicas N --memory SIZE [options]"
    parser.description = (
        "Serve a repository over HTTP with several engines, each with some of the models. Ray Serve places the\n"
        "engines on one machine or a cluster, and starts them again."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument(
        "--replicas", type=typed(count), default=2, metavar="N", help="engines (default: %(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=typed(count),
        default=1,
        metavar="N",
        help="minimum number of engines per model whose rate is above the mean (default: %(default)s)",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    ports = typed(integer(1, 65535))
    parser.add_argument(
        "--http-port", type=ports, default=8000, metavar="PORT", help="port of HTTP (default: %(default)s)"
    )
    engine = parser.add_argument_group("each engine")
    for key in ENGINE_SETTINGS:
        setting = BY_KEY[key]
        add_flag(
            parser if key in ("repository", "rates") else engine,
            replace(setting, help=_HELP.get(key, setting.help)),
        )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Serve until SIGTERM or SIGINT. Raises ConfigError, RepositoryError, and StartFailed if Ray cannot start it."""
    plan = plan_engines(given(options, ENGINE_SETTINGS), options.copies)
    if find_spec("ray") is None:
        raise ConfigError("`cohabit scale` needs Ray Serve, which is not installed: pip install 'cohabit[scale]'")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would send usage statistics to its makers
    import ray
    from ray import serve

    ray.init(include_dashboard=False, log_to_driver=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # same as SIGINT; replaces Ray's handler
    try:
        require_resources(plan, options.replicas, ray.cluster_resources())
        with errors.status("loading"):
            _start(plan, options.replicas, options.host, options.http_port)
        _report(plan, options.replicas, f"http://{options.host}:{options.http_port}", out)
        signal.pause()
    except KeyboardInterrupt:
        errors.print("stopping: answering the requests in flight")
    finally:
        serve.delete(NAME)
        ray.shutdown()
    return 0


def require_resources(plan: ScalePlan, replicas: int, resources: Mapping[str, float]) -> None:
    """Raise ConfigError if Ray could never place the engines."""
    for what, needed, found, way_out in (
        ("GPUs", replicas * plan.gpus, resources.get("GPU", 0.0), "--device cpu"),
        ("CPUs", replicas * plan.cpus, resources.get("CPU", 0.0), "fewer --threads or --compute-lanes"),
    ):
        if needed > found:
            raise ConfigError(
                f"--replicas {replicas}: the engines need {needed} {what}, and Ray found {found:g}; take fewer"
                f" engines, {way_out}, or a larger Ray cluster (RAY_ADDRESS)"
            )


def _start(plan: ScalePlan, replicas: int, host: str, http_port: int) -> None:
    """Deploy the engines. Returns once each serves its models. Raises StartFailed."""
    from ray import serve

    from cohabit.server.scale.app import application

    serve.start(http_options={"host": host, "port": http_port})
    try:
        ingress = serve.run(application(plan, replicas), name=NAME, logging_config={"log_level": "WARNING"})
        ingress.wait_until_loaded.remote().result()
    except RuntimeError as error:
        found = serve.status().applications[NAME].deployments
        failed = {name: one.message.strip() for name, one in found.items() if "FAILED" in str(one.status)}
        reasons = [f"{name}: {message.splitlines()[-1]}" for name, message in failed.items() if message]
        raise StartFailed("\n".join(reasons) or f"Ray Serve could not start the engines: {error}") from error


def _report(plan: ScalePlan, replicas: int, url: str, out: Console) -> None:
    table = make_table("engine", "models", "requests/s", left=("engine", "models"))
    for number, models in enumerate(plan.assigned(replicas)):
        names = sorted(model.name for model in models)
        table.add_row(str(number), ", ".join(names), f"{sum(model.rate_per_s for model in models):g}")
    out.print(table)
    print(f"http: {url}", flush=True)
