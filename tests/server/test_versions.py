"""Versions of a model side by side, seen through tritonclient over both protocols."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tritonclient.utils import InferenceServerException

from cohabit.server.commands.remote import tables
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.deploy.prepare import _rate
from cohabit.server.errors import InvalidRequest, ModelNotFound
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.model import ModelFootprint, ModelInfo, ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.process.engine import Engine
from cohabit.server.protocol.shared_memory import Regions
from cohabit.server.repository.sources import ModelSource, Unloadable
from cohabit.server.triton.model_config import ModelConfig
from tests.support.server.clients import Client
from tests.support.server.metrics_client import scrape
from tests.support.server.server_fakes import FakeLoaded, FakeServable, Running, identity, refused, running, serving
from tests.support.server.transport_fakes import FakeEngine, FakeModel

pytestmark = pytest.mark.process

VERSIONS = (1, 2, 10)
X = np.array([[1, 2, 3, 4]], np.float32)


def adding(version: int) -> FakeServable:
    """A version that adds its number."""
    info = replace(identity("m", "FP32").info, version=version)
    return FakeServable(info, lambda x: {"y": x + np.float32(version)})


@pytest.fixture(scope="module")
def own() -> Iterator[Running]:
    loaded: FakeLoaded = serving(*(adding(version) for version in VERSIONS), identity("single", "FP32"))
    loaded.failures = {ModelKey("m", 11): "model.pt2 is truncated"}
    loaded.footprints = {ModelKey("m", v): ModelFootprint(partition_bytes=v << 20) for v in VERSIONS}
    with running(loaded) as handle:
        yield handle


def asked(client: Client, method: str, *arguments: Any) -> Any:
    options = {"as_json": True} if client.protocol == "grpc" else {}
    return getattr(client.raw, method)(*arguments, **options)


def infer(client: Client, version: str) -> tuple[float, str]:
    """Return what a version adds, and the version that the answer names."""
    result = client.raw.infer("m", [client.input("x", X, "FP32")], model_version=version)
    (added,) = set((result.as_numpy("y") - X).ravel().tolist())
    response = result.get_response(as_json=True) if client.protocol == "grpc" else result.get_response()
    return added, response["model_version"]


def test_requests_choose_their_version_and_the_highest_ready_one_answers_the_others(client: Client) -> None:
    assert {version: infer(client, str(version)) for version in VERSIONS} == {v: (v, str(v)) for v in VERSIONS}
    assert infer(client, "") == (10, "10")
    for version, message in (
        ("3", "Request for unknown model: 'm' version 3 is not found"),
        ("11", "Request for unknown model: 'm' version 11 is not at ready state: model.pt2 is truncated"),
    ):
        with pytest.raises(InferenceServerException, match=message) as caught:
            infer(client, version)
        assert client.status(caught.value) in ("404", "NOT_FOUND")


def test_each_version_is_described_by_itself(client: Client) -> None:
    assert client.raw.is_server_ready(), "a version of every model is ready"
    assert [client.raw.is_model_ready("m", str(version)) for version in (*VERSIONS, 3, 11)] == [True] * 3 + [
        False
    ] * 2
    for version in ("", "1"):
        assert asked(client, "get_model_metadata", "m", version)["versions"] == ["1", "2", "10"]
    config = asked(client, "get_model_config", "m", "2")
    assert config.get("config", config)["version_policy"] == {"all": {}}
    index = asked(client, "get_model_repository_index")
    rows = index["models"] if client.protocol == "grpc" else index
    assert [(r["name"], r["version"], r["state"], r.get("reason")) for r in rows if r["name"] == "m"] == [
        *(("m", str(version), "READY", None) for version in VERSIONS),
        ("m", "11", "UNAVAILABLE", "model.pt2 is truncated"),
    ]


def test_versions_are_counted_one_by_one(client: Client, own: Running) -> None:
    def counts(*which: str) -> dict[str, int]:
        stats = asked(client, "get_inference_statistics", *which)["model_stats"]
        return {s["version"]: int(s.get("inference_count", 0)) for s in stats if s["name"] == "m"}

    before = counts()
    assert list(before) == ["1", "2", "10"]
    infer(client, "2")
    assert counts("m") == before | {"2": before["2"] + 1}
    assert counts("m", "2") == {"2": before["2"] + 1}
    with pytest.raises(InferenceServerException, match="requested model 'm' is not available"):
        counts("m", "3")
    samples = scrape(own)
    for version in VERSIONS:
        labels = (("model", "m"), ("version", str(version)))
        assert samples["nv_inference_count", labels] == counts()[str(version)]
        assert samples["cohabit_partition_bytes", labels] == version << 20


def test_the_version_of_a_model_that_has_several_is_listed() -> None:
    from rich.console import Console

    labels = [("m", "2"), ("m", "10"), ("single", "1")]
    metrics = {("cohabit_partition_bytes", *label): int(label[1]) << 20 for label in labels}
    console = Console(width=150)
    with console.capture() as captured:
        console.print(tables.models([{"name": n, "version": v, "state": "READY"} for n, v in labels], metrics))
    assert [line.split()[:4] for line in captured.get().splitlines() if "READY" in line] == [
        [name, version, "READY", f"{version}.0"] for name, version in labels
    ]


def entry(version: int | None, state: ModelState, **changes: Any) -> ModelEntry:
    info = ModelInfo("m", version, (), ()) if state is ModelState.READY and version is not None else None
    return ModelEntry("m", version, state, info=info, **changes)


def catalog_of(*entries: ModelEntry) -> Catalog:
    catalog = Catalog()
    for each in entries:
        catalog.update(each)
    return catalog


def test_without_a_version_the_highest_ready_one_is_found_and_else_one_that_loads() -> None:
    catalog = catalog_of(entry(1, ModelState.READY), entry(2, ModelState.LOADING), entry(3, ModelState.UNAVAILABLE))
    assert catalog.require("m").version == 1
    with refused("ModelNotReady"):
        catalog.require("m", "2")
    catalog.update(entry(1, ModelState.UNLOADING))
    with refused("ModelNotReady"):
        catalog.require("m")
    catalog.update(entry(2, ModelState.UNAVAILABLE, reason="it is too large"))
    with pytest.raises(ModelNotFound, match="'m' version 2 is not at ready state: it is too large"):
        catalog.require("m", "2")
    with pytest.raises(ModelNotFound, match="'m' has no available versions: it is not loaded"):
        catalog.require("m")
    with refused("ModelNotListed"):
        catalog.ready("m")
    with pytest.raises(InvalidRequest, match="over the largest version"):
        catalog.find("m", "9" * 19)


def test_the_entry_without_a_version_is_there_only_while_no_version_is_known() -> None:
    catalog = catalog_of(entry(None, ModelState.ABSENT, wanted=False))
    assert [(e.version, e.state) for e in catalog] == [(None, ModelState.ABSENT)]
    catalog.update(entry(2, ModelState.READY))
    catalog.update(entry(1, ModelState.READY))
    catalog.update(entry(None, ModelState.ABSENT, wanted=False))
    assert [e.version for e in catalog] == [1, 2]


def test_the_server_is_ready_when_every_requested_model_has_a_version_that_is() -> None:
    catalog = catalog_of(entry(1, ModelState.READY), entry(2, ModelState.UNAVAILABLE), entry(3, ModelState.LOADING))
    assert catalog.not_ready() is None
    catalog.update(entry(1, ModelState.UNAVAILABLE, wanted=False))
    assert catalog.not_ready() == "still loading: m"
    catalog.update(entry(3, ModelState.UNAVAILABLE))
    assert catalog.not_ready() == "not loaded: m"
    for version in (2, 3):
        catalog.update(entry(version, ModelState.UNAVAILABLE, wanted=False))
    assert catalog.not_ready() is None, "it is not requested any more"


def test_a_models_rate_is_shared_equally_by_its_versions() -> None:
    config = ServeConfig(Path("models"), FixedSize(1 << 20), model_rates={"m": 30.0, "other": 10.0})
    rates = {
        name: _rate(ModelSource(name, 1, Path("model.pt2"), rate_share=1 / 3), config) for name in ("m", "third")
    }
    assert rates == {"m": pytest.approx(10.0), "third": pytest.approx(20.0 / 3)}


def test_a_restart_loads_the_versions_that_were_served_with_the_configurations_that_clients_sent(
    tmp_path: Path,
) -> None:
    for version in (1, 2, 3):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
        (tmp_path / "m" / str(version) / "model.pt2").touch()
    engine = Engine(ServeConfig(tmp_path, FixedSize(1 << 20)), lambda entry: None)
    sent = bytes(ModelConfig(max_batch_size=4).SerializeToString())
    served = {version: ModelEntry("m", version, ModelState.READY) for version in (1, 2, 4)}
    served[1] = replace(served[1], config_override=sent)
    found = engine._served([*served.values(), ModelEntry("m", 3, ModelState.LOADING)])["m"]
    sources = {entry.version: entry for entry in found if isinstance(entry, ModelSource)}
    assert {version: source.config_override for version, source in sources.items()} == {1: sent, 2: None}
    assert [entry for entry in found if isinstance(entry, Unloadable)] == [
        Unloadable("m", "it has no file model.pt2", 4)
    ]


# A version that is replaced after a request for no particular version has chosen it.


class Replacing(FakeEngine):
    """An engine that replaces version 1 of its model by version 2 while a request is on its way."""

    def __init__(self, successor: ModelInfo) -> None:
        info = ModelInfo("m", 1, *(identity("m", "FP32").info.inputs,) * 2, 8)
        super().__init__(FakeModel(info, lambda x: {"x": x}))
        self.successor = successor

    async def infer(self, request: Request, *rest: Any) -> Any:
        if request.model.version == 1:
            self.models = {self.successor.key: FakeModel(self.successor, lambda x: {"x": x + 1})}
            self._statistics[self.successor.key] = self._statistics[ModelKey("m", 1)]
            self.catalog.update(ModelEntry("m", 2, ModelState.READY, info=self.successor))
            self.catalog.update(ModelEntry("m", 1, ModelState.UNAVAILABLE, "unloaded", wanted=False))
            raise ModelNotFound(*request.model, reason="unloaded")
        return await super().infer(request, *rest)


@pytest.mark.parametrize(
    ("version", "columns", "answered"), [(None, 4, True), ("1", 4, False), (None, 5, False)], ids=str
)
async def test_a_request_without_a_version_is_answered_by_the_next_one_if_that_takes_the_same_tensors(
    version: str | None, columns: int, answered: bool
) -> None:
    tensors = (identity("m", "FP32", (columns,)).info.inputs,) * 2
    engine, memory = Replacing(ModelInfo("m", 2, *tensors, 8)), RequestMemory(1 << 20)
    plane = DataPlane(ServeConfig(Path("fakes"), FixedSize(1 << 20)), engine, memory, Regions())
    info = plane.require_ready("m", version)
    request = Request(info.key, {"x": X}, 1, ())
    try:
        with memory.lease() as lease:
            if not answered:
                with pytest.raises(ModelNotFound, match="'m' version 1 is not at ready state: unloaded"):
                    await plane.infer(request, info, lease, version)
                return
            response = await plane.infer(request, info, lease, version)
            assert response.model == ("m", 2)
            (sent,) = engine.models["m", 2].requests
            assert sent.arrived_s is not None, "its timeout counts from when it came first"
    finally:
        memory.close()


async def test_folders_whose_names_are_no_text_are_in_the_index_escaped(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    (tmp_path / "later").mkdir()
    engine, memory = FakeEngine(FakeModel(identity("one", "FP32").info, lambda x: {"x": x})), RequestMemory(1 << 20)
    config = ServeConfig(tmp_path, FixedSize(1 << 20), model_control="explicit")
    try:
        index = await DataPlane(config, engine, memory, Regions()).index(only_ready=False)
        assert [entry["name"] for entry in index][-2:] == ["caf\\xe9", "later"]
        assert json.loads(msgspec.json.encode(index)) == index
    finally:
        memory.close()
