"""Warm-up samples of a configuration: what is executed, what is refused, and where files may lie."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from google.protobuf import text_format

from cohabit.server.deploy.lifecycle import warm_up
from cohabit.server.errors import InvalidRequest, RepositoryError
from cohabit.server.file_state import FileState
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import ModelSource, Unloadable
from cohabit.server.triton.model_config import ModelConfig
from tests.server.test_compute_lane import lane_of
from tests.support.server.server_fakes import FakeServable, tensors

INPUTS = (("x", "FP32", (2,)), ("ids", "INT64", (3,)))


def recording(info: ModelInfo, refuse: Callable[[Array], bool] = lambda x: False) -> tuple[FakeServable, list[Any]]:
    """A servable, and the inputs that it is executed with."""
    seen: list[dict[str, Array]] = []

    def note(**inputs: Array) -> dict[str, Array]:
        seen.append(inputs)
        if refuse(inputs["x"]):
            raise InvalidRequest("row 7 is outside the table")
        return {}

    return FakeServable(info, note), seen


def source(text: str, **files: Path) -> ModelSource:
    config = text_format.Parse(text, ModelConfig())
    states = {name: (path, FileState.of(path)) for name, path in files.items()}
    return ModelSource("m", 1, Path("model.pt2"), config, warmup_files=states)


def given(name: str, datatype: str, dims: list[int], data: str) -> str:
    return f"inputs {{ key: '{name}' value {{ data_type: TYPE_{datatype} dims: {dims} {data} }} }}"


X, IDS = given("x", "FP32", [2], "zero_data: true"), given("ids", "INT64", [3], "random_data: true")
SHORT = given("x", "FP32", [2], "input_data_file: 'short'")


async def test_samples_are_executed_as_often_as_they_say(tmp_path: Path) -> None:
    (tmp_path / "row").write_bytes(np.array([5, 6], np.float32).tobytes() + b"more")
    from_file = given("x", "FP32", [2], "input_data_file: 'row'")
    text = f"""
        model_warmup {{ name: 'zeros' batch_size: 1 {X} {IDS} }}
        model_warmup {{ name: 'none' batch_size: 0 }}
        model_warmup {{ name: 'file' batch_size: 3 count: 2 {from_file} {IDS} }}
    """
    servable, seen = recording(ModelInfo("m", 1, tensors(*INPUTS), (), 8))
    async with lane_of(servable) as lane:
        await warm_up(lane, servable, source(text, row=tmp_path / "row"))
        await warm_up(lane, servable, ModelSource("m", 1, Path("model.pt2")))
    assert servable.calls == [1, 3, 3]
    np.testing.assert_array_equal(seen[0]["x"], [[0, 0]])
    np.testing.assert_array_equal(seen[1]["x"], [[5, 6]] * 3)
    assert all(inputs["ids"].dtype == np.int64 and set(inputs["ids"].ravel()) <= {0, 1} for inputs in seen)


@pytest.mark.parametrize(
    ("dims", "shape", "max_batch"), [([4], (4,), 8), ([1, 4], (4,), 8), ([1, 4], (1, 4), 0)], ids=str
)
async def test_dims_may_have_the_batch(dims: list[int], shape: tuple[int, ...], max_batch: int) -> None:
    data = given("x", "BF16", dims, "random_data: true")
    servable, seen = recording(ModelInfo("m", 1, tensors(("x", "BF16", shape)), (), max_batch))
    async with lane_of(servable) as lane:
        await warm_up(lane, servable, source(f"model_warmup {{ name: 'w' batch_size: 1 {data} }}"))
    values = seen[0]["x"].view(ml_dtypes.bfloat16).astype(np.float32)
    assert values.shape == (1, 4)
    assert ((values >= 0) & (values <= 1)).all()


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (f"batch_size: 9 {X} {IDS}", "model_warmup 'w': .*batch-size must be <= 8 for 'm' and at least 1, got 9"),
        (f"batch_size: 1 {X}", r"missing required input\(s\) \['ids'\]"),
        (f"batch_size: 1 {given('q', 'FP32', [2], 'zero_data: true')}", "unexpected inference input 'q'"),
        (f"batch_size: 1 {given('x', 'FP32', [-1], 'zero_data: true')} {IDS}", "unexpected shape for input 'x'"),
        (f"batch_size: 1 {given('x', 'STRING', [2], 'zero_data: true')} {IDS}", "invalid datatype 'STRING'"),
        (f"batch_size: 1 {given('x', 'FP32', [2], '')} {IDS}", "input 'x' has no zero_data, random_data or"),
        (f"batch_size: 1 {SHORT} {IDS}", "file 'short' has 4 bytes, a row takes 8"),
        (f"batch_size: 1 count: 1001 {X} {IDS}", "asks for 1001 executions, the limit is 1000"),
        (f"batch_size: 2 {X} {IDS}", "model_warmup 'w': row 7 is outside the table"),
    ],
)
async def test_samples_that_do_not_fit_are_refused(tmp_path: Path, sample: str, reason: str) -> None:
    (tmp_path / "short").write_bytes(bytes(4))
    info = ModelInfo("m", 1, tensors(*INPUTS), (), 8)
    servable, _ = recording(info, refuse=lambda x: len(x) == 2)
    async with lane_of(servable) as lane:
        with pytest.raises(RepositoryError, match=reason):
            await warm_up(
                lane, servable, source(f"model_warmup {{ name: 'w' {sample} }}", short=tmp_path / "short")
            )


@pytest.mark.parametrize("name", ["gone", "../1/model.pt2", "/etc/hostname", ".", "link"])
def test_files_lie_in_the_models_own_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.pt2").touch()
    (folder / "warmup").mkdir()
    (folder / "warmup" / "row").touch()
    (tmp_path / "outside").touch()
    (folder / "warmup" / "link").symlink_to(tmp_path / "outside")
    for file in ("row", name):
        data = given("x", "FP32", [2], f"input_data_file: '{file}'")
        (folder / "config.pbtxt").write_text(f"model_warmup {{ name: 'w' batch_size: 1 {data} }}")
        (found,) = scan(tmp_path / "models")
        if file == "row":
            assert isinstance(found, ModelSource)
            assert list(found.warmup_files) == ["row"]
    assert isinstance(found, Unloadable)
    assert name.rpartition("/")[2] in found.reason or "not a regular file" in found.reason
