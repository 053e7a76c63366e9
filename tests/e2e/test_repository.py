"""A repository where most models are broken, and budgets that cannot work: each says why, what is sound serves."""

import json
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.server.deploy import prepare
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.model import Model, Programs
from cohabit.server.errors import StartFailed
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import Running, ask, infer, refused_start, repository_index, serving

GOOD = "torchcrepe"
WEIGHTS_CONFIG = "model/data/weights/model_weights_config.json"

REASONS = {
    "corrupt": r"record data/weights/weight_\d+ is damaged: its checksum does not fit",
    "empty": r"has no version folder",
    "garbage_config": r"config\.pbtxt is not a ModelConfig: 1:\d+",
    "no_program": r"it has no file model\.pt2",
    "pickled": r"weight .+ is pickled, and pickles are never loaded",
    "truncated": r"not a \.pt2 archive, or a truncated one",
    "wrong_dims": r"config\.pbtxt says dims \[999\] for input 'frames', the program \[1024\]",
    "wrong_precision": r"'int4' is none of float32",
    "wrong_count": r"config\.pbtxt has 2 inputs \(frames, sound\), the program has 1 \(frames\)",
}


@pytest.fixture(scope="module")
def broken_and_good(archives: Archives) -> Iterator[Running]:
    """One server. Its cache holds the good model, whose list of checksums the corrupt one has."""
    repository = archives.repository(GOOD)
    sound = archives.archive(GOOD).read_bytes()
    for name in ("truncated", "corrupt", "pickled"):
        (repository / name / "1").mkdir(parents=True)
    (repository / "truncated" / "1" / "model.pt2").write_bytes(sound[: len(sound) // 2])
    (repository / "corrupt" / "1" / "model.pt2").write_bytes(_with_a_flipped_bit(archives.archive(GOOD)))
    _pickle_weights(archives.archive(GOOD), repository / "pickled" / "1" / "model.pt2")
    (repository / "empty").mkdir()
    (repository / "no_program" / "1").mkdir(parents=True)
    for name, text in (
        ("garbage_config", "\x7fELF\x02\x01{{{"),
        ("wrong_dims", 'input { name: "frames" data_type: TYPE_FP32 dims: 999 }\nmax_batch_size: 4'),
        ("wrong_count", 'input [{ name: "frames" }, { name: "sound" }]\nmax_batch_size: 4'),
        ("wrong_precision", "parameters { key: 'precision' value { string_value: 'int4' } }"),
    ):
        archives.put(repository, GOOD, name)
        (repository / name / "config.pbtxt").write_text(text)
    with serving(repository, "300%", archives.cache, batch_sizes=(1, 4)) as server:
        yield server


def _with_a_flipped_bit(archive: Path) -> bytes:
    with zipfile.ZipFile(archive) as file:
        record = max((i for i in file.infolist() if "/data/weights/" in i.filename), key=lambda i: i.file_size)
    raw = bytearray(archive.read_bytes())
    name_bytes, extra_bytes = struct.unpack_from("<HH", raw, record.header_offset + 26)
    raw[record.header_offset + 30 + name_bytes + extra_bytes + record.file_size // 2] ^= 1
    return bytes(raw)


def _pickle_weights(archive: Path, path: Path) -> None:
    """Copy an archive; the copy says of its weights that they are pickles."""
    with zipfile.ZipFile(archive) as source, zipfile.ZipFile(path, "w") as copy:
        for record in source.infolist():
            raw = source.read(record)
            if record.filename == WEIGHTS_CONFIG:
                document = json.loads(raw)
                for weight in document["config"].values():
                    weight["use_pickle"] = True
                raw = json.dumps(document).encode()
            copy.writestr(record.filename, raw)


@pytest.mark.parametrize("name", REASONS)
def test_a_broken_model_is_not_ready_and_says_why(broken_and_good: Running, name: str) -> None:
    entry = repository_index(broken_and_good.address)[name]
    assert entry["state"] == "UNAVAILABLE"
    assert re.search(REASONS[name], entry["reason"])
    with triton.InferenceServerClient(broken_and_good.address) as client:
        assert not client.is_model_ready(name)
    status, answer = ask(broken_and_good.address, "POST", f"/v2/models/{name}/infer", {"inputs": []})
    assert status == 404
    assert re.search(REASONS[name], answer["error"])


def test_a_good_model_serves_beside_broken_ones(broken_and_good: Running, archives: Archives) -> None:
    index = repository_index(broken_and_good.address)
    assert index.keys() == {GOOD, *REASONS}
    assert index[GOOD]["state"] == "READY"
    status, answer = ask(broken_and_good.address, "GET", "/v2/health/ready")
    assert status == 400, "not every model that was asked for can be served"
    assert all(name in answer["error"] for name in REASONS)
    inputs = archives.inputs(GOOD, 4)
    (expected,) = archives.eager(GOOD, inputs).values()
    (output,) = infer(broken_and_good.address, GOOD, inputs).values()
    np.testing.assert_allclose(output, expected, atol=1e-4)


@pytest.mark.parametrize("layout", ["resident", "partitioned", "lru", "on_demand"])
def test_the_named_least_budget_works_and_a_page_less_does_not(archives: Archives, layout: str) -> None:
    names = ("ranker", "torchcrepe")
    repository = archives.repository(*names)

    def start(nbytes: int):  # type: ignore[no-untyped-def]
        changes = {"layout": layout, "batch_sizes": (1, 4), "search": "best"}
        return serving(repository, f"{nbytes}B", archives.cache, **changes)

    with pytest.raises(InfeasibleBudget) as refused, start(64 << 10):
        pass
    least = refused.value.least_bytes
    with pytest.raises(InfeasibleBudget) as again, start(least - PAGE_BYTES):
        pass
    assert again.value.least_bytes == least
    with start(least) as server:
        for name in names:
            for batch in (1, 4):
                inputs = archives.inputs(name, batch)
                (expected,) = archives.eager(name, inputs).values()
                (answer,) = infer(server.address, name, inputs).values()
                np.testing.assert_allclose(answer, expected, atol=1e-4 * np.abs(expected).max())


def test_a_start_that_cannot_work_names_model_op_and_least_budget(archives: Archives) -> None:
    repository = archives.repository("ranker")
    flags = ("--batch-sizes", "1,4", "--search", "best", "--log-format", "json")
    status, said = refused_start(repository, "64KiB", archives.cache, *flags)
    assert status == 1
    *_, last = (json.loads(line) for line in said.splitlines())
    assert last["event"] == "the server has ended"
    message = re.search(r"ranker: op linear\S* needs a budget of \S+ [KM]iB \((\d+) bytes\)", last["reason"])
    assert message is not None, said
    with (
        pytest.raises(InfeasibleBudget) as refused,
        serving(repository, "64KiB", archives.cache, batch_sizes=(1, 4), search="best"),
    ):
        pass
    assert int(message[1]) == refused.value.least_bytes, "which is enough, as the test before shows"


def test_an_unexpected_error_reaches_no_user_but_its_number(
    archives: Archives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It has a cache of its own: what such an error may come from is removed."""

    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("p_weight")

    monkeypatch.setattr(prepare, "lower", broken)
    with pytest.raises(StartFailed) as refused, serving(archives.repository("ranker"), "100%", tmp_path):
        pass
    said = r"lowering model 'ranker' failed unexpectedly: internal error [0-9a-f]{12}; the server's log"
    assert re.search(said, str(refused.value))
    assert "KeyError" not in str(refused.value)
    assert "KeyError: 'p_weight'" in caplog.text


def test_a_model_whose_plan_cannot_be_bound_at_the_start_does_not_stop_the_others(
    archives: Archives, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = PartitionedMemory.bind

    def refused(memory: PartitionedMemory, model: Model, *arguments: Any, **options: Any) -> Programs:
        if model.key.name == "ranker":
            raise UnsupportedPlan("ranker: this device has no such copies")
        return bind(memory, model, *arguments, **options)

    monkeypatch.setattr(PartitionedMemory, "bind", refused)
    with serving(archives.repository("ranker", GOOD), "100%", archives.cache, batch_sizes=(1, 4)) as server:
        index = repository_index(server.address)
        assert (index["ranker"]["state"], index["ranker"]["reason"]) == (
            "UNAVAILABLE",
            "this device has no such copies",
        )
        inputs = archives.inputs(GOOD, 4)
        (expected,) = archives.eager(GOOD, inputs).values()
        (output,) = infer(server.address, GOOD, inputs).values()
        np.testing.assert_allclose(output, expected, atol=1e-4)
        memory = server.placement.memory
        assert {model.partition_id for model in memory.models.values()} == memory.partitions.held.keys()
