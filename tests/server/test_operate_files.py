"""What is shipped beside the server must fit it: the dashboard, the deployment, the guides, the developer's tools."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from cohabit.server.commands import EXIT_USAGE
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.config.setting import PREFIX
from cohabit.server.config.sources import add_flags, read_settings
from cohabit.server.ipc.model import DeviceUse
from cohabit.server.observe.gpus import Gpu
from tests.support.server.metrics_client import FakeNvml, Samples, machine_samples, scrape
from tests.support.server.server_fakes import Running

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = [
    DOCS / name for name in ("operating.md", "models.md", "limits.md", "devices.md", "edge.md", "training.md")
]
DASHBOARD = json.loads((DOCS / "grafana" / "cohabit.json").read_text())
METRIC = re.compile(r"\b(?:nv|cohabit)_\w+")
SELECTOR = re.compile(r"\b((?:nv|cohabit)_\w+)\{([^}]*)\}")
LABEL = re.compile(r'(\w+)=~?"')
TARGET_LABELS = {"instance", "job"}
"""What Prometheus adds to every sample."""


def config_of(arguments: list[str], environment: Mapping[str, str] = MappingProxyType({})) -> ServeConfig:
    """What these arguments of `cohabit serve` set."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return read_settings(parser.parse_args(arguments), environment).config


def everything(server: Running) -> Samples:
    """A live server's metrics, with those of a GPU, of pinned memory and of elastic partitions."""
    nvml: Any = FakeNvml()
    gpus = (Gpu("GPU-1", nvml, object()),)
    use = DeviceUse(pinned_total_bytes=1, pinned_used_bytes=1, outside_bytes=1, divisions=1)
    return scrape(server) | machine_samples(use, gpus)


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (v["definition"] for v in DASHBOARD["templating"]["list"] if "definition" in v)


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_exist(server: Running) -> None:
    samples = everything(server)
    labels: dict[str, set[str]] = {}
    for name, pairs in samples:
        labels.setdefault(name, set()).update(key for key, _ in pairs)
    for query in queries():
        assert METRIC.search(query), query
        for name in METRIC.findall(query):
            assert name in labels, f"{query}: there is no metric {name}"
        for name, selector in SELECTOR.findall(query):
            assert set(LABEL.findall(selector)) <= labels[name] | TARGET_LABELS, query
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            wanted = {label.strip() for label in grouping.split(",")}
            assert all(wanted <= labels[name] for name in METRIC.findall(query)), query


def test_every_latency_objective_is_a_bucket_of_the_latency_histogram(server: Running) -> None:
    (objectives,) = (v for v in DASHBOARD["templating"]["list"] if v["name"] == "latency")
    buckets = {dict(labels)["le"] for name, labels in scrape(server) if name == "cohabit_request_seconds_bucket"}
    assert set(objectives["query"].split(",")) == buckets - {"+Inf"}
    assert {query for query in queries() if "cohabit_request_seconds_bucket" in query and 'le="$latency"' in query}


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_deployment_starts_the_server_with_settings_that_exist() -> None:
    documents = list(yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text()))
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "serve"
    environment = {e["name"]: e.get("value", "") for e in container.get("env", []) if e["name"].startswith(PREFIX)}
    config = config_of(container["args"][1:], environment)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.http_port, "grpc": config.grpc_port, "metrics": config.metrics_port}
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ("http", "metrics"), "which both answer health"
        assert container[probe]["httpGet"]["path"].startswith("/v2/health/")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    paths = [config.repository, config.cache, *config.token_files, *config.control_token_files]
    for path in paths:
        assert any(Path(mount) in (path, *path.parents) for mount in mounts), path
    assert pod["terminationGracePeriodSeconds"] > config.exit_timeout_s
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_serving_runtime_starts_the_server_with_settings_that_exist_on_the_port_that_is_probed() -> None:
    runtime, service = yaml.safe_load_all((DOCS / "kserve.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    config = config_of(container["args"][1:], {e["name"]: e["value"] for e in container["env"]})
    assert not config.takes_client_shm
    assert [port["containerPort"] for port in container["ports"]] == [config.http_port]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/v2/health/ready", "port": config.http_port}
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {f["name"] for f in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_the_kustomization_and_the_service_monitor_fit_the_deployment() -> None:
    kustomization = yaml.safe_load((DOCS / "kustomization.yaml").read_text())
    monitor = yaml.safe_load((DOCS / "deploy" / "servicemonitor.yaml").read_text())
    files = [DOCS / resource for resource in kustomization["resources"]]
    documents = [document for path in files for document in yaml.safe_load_all(path.read_text())]
    by_kind = {document["kind"]: document for document in documents}
    (container,) = by_kind["Deployment"]["spec"]["template"]["spec"]["containers"]
    (image,) = kustomization["images"]
    assert image["name"] == container["image"].partition(":")[0]
    service, secret = by_kind["Service"], by_kind["Secret"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    credentials = endpoint["authorization"]["credentials"]
    assert credentials["name"] == secret["metadata"]["name"]
    assert credentials["key"] in secret["stringData"]


def test_the_scaled_object_scales_the_deployment_by_metrics_that_exist(server: Running) -> None:
    scaled = yaml.safe_load((DOCS / "deploy" / "scaledobject.yaml").read_text())
    documents = list(yaml.safe_load_all((DOCS / "kubernetes.yaml").read_text()))
    (deployment,) = [d["metadata"]["name"] for d in documents if d["kind"] == "Deployment"]
    spec = scaled["spec"]
    assert spec["scaleTargetRef"]["name"] == deployment
    assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
    (trigger,) = spec["triggers"]
    samples = {name for name, _ in everything(server)}
    assert set(METRIC.findall(trigger["metadata"]["query"])) <= samples
    assert float(trigger["metadata"]["threshold"]) > 0
    assert {"serverAddress", "query", "threshold"} == trigger["metadata"].keys()


def test_the_systemd_unit_starts_the_server_with_settings_that_exist_and_keeps_what_it_needs() -> None:
    lines = (DOCS / "deploy" / "cohabit.service").read_text().splitlines()
    settings = [line.partition("=") for line in lines if "=" in line and not line.startswith("#")]
    unit = {key: value for key, _, value in settings}
    credentials = {value.partition(":")[0] for key, _, value in settings if key == "LoadCredential"}
    program, command, *arguments = shlex.split(unit["ExecStart"])
    assert (Path(program).name, command) == ("cohabit", "serve")
    config = config_of([a.replace("%d", "/credentials") for a in arguments])
    tokens = [*config.token_files, *config.control_token_files]
    assert {path.name for path in tokens} == credentials
    assert all(path.parent == Path("/credentials") for path in tokens)
    assert int(unit["TimeoutStopSec"]) > config.exit_timeout_s
    assert "XDG_CACHE_HOME=%C" in unit["Environment"].split()
    assert unit["CacheDirectory"] == cache_of(config).name
    assert int(unit["RestartPreventExitStatus"]) == EXIT_USAGE
    assert unit["OOMPolicy"] == "continue", "a preparing process may be ended without the server"
    assert "MemoryDenyWriteExecute" not in unit
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["ProtectSystem"] == "strict"


def test_developers_use_the_linter_that_ci_uses() -> None:
    hooks = yaml.safe_load((DOCS.parent / ".pre-commit-config.yaml").read_text())["repos"]
    (ruff,) = [hook["rev"] for hook in hooks if "ruff" in hook["repo"]]
    pinned = re.findall(r"^ruff==(\S+)", (DOCS.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert [f"v{version}" for version in pinned] == [ruff]


def test_the_dev_container_is_a_stage_of_the_dockerfile() -> None:
    folder = DOCS.parent / ".devcontainer"
    text = "\n".join(line for line in (folder / "devcontainer.json").read_text().splitlines() if line[:2] != "//")
    build = json.loads(text)["build"]
    assert f" AS {build['target']}\n" in (folder / build["dockerfile"]).read_text()


def test_every_command_of_the_guides_parses() -> None:
    from cohabit.server.cli import COMMANDS, _parser

    lines = [line for guide in GUIDES for line in guide.read_text().splitlines()]
    commands = [line.strip() for line in lines if re.match(r"\s{4}cohabit ", line)]
    assert len(commands) > 20
    for command in commands:
        _parser(COMMANDS.all).parse_args(shlex.split(command, comments=True)[1:])


def test_the_files_that_contributing_names_exist() -> None:
    text = (DOCS.parent / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:[a-z_]+/)+(?:\w+\.\w+)?)`", text)) | set(re.findall(r"\]\(([^)#]+)\)", text))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if "NAME" not in path and not (DOCS.parent / path).exists()] == []


def test_the_guides_settings_file_is_accepted(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (DOCS / "operating.md").read_text(), re.DOTALL)
    path = tmp_path / "cohabit.toml"
    path.write_text(block)
    assert config_of(["--config", str(path)]).model_rates["resnet50"] == 40


def test_every_metric_of_the_guide_exists(server: Running) -> None:
    known = {name for name, _ in everything(server)}
    known |= {"cohabit_first_token_seconds", "cohabit_later_token_seconds"}  # of models that generate: e2e tests
    known |= {name.removesuffix(part) for name in known for part in ("_bucket", "_sum", "_count")}
    for name in METRIC.findall("".join(guide.read_text() for guide in GUIDES)):
        assert name in known or (name.endswith("_") and any(k.startswith(name) for k in known)), name
