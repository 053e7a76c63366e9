"""Tensors without dimensions and without elements, and bfloat16: in and out over both protocols, in every form."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton_grpc
from numpy.typing import NDArray
from torch import nn
from torch.export import Dim
from tritonclient.grpc.service_pb2 import ModelInferRequest
from tritonclient.utils import InferenceServerException

from cohabit.loadgen.zoo.exporting import save_model
from tests.support.e2e.serving import Running, ask, infer, serving


class Odd(nn.Module):
    """A factor without dimensions, rows without elements, and a result of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, factor: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        scaled = factor * self.weight
        return {"scaled": scaled, "total": scaled.sum(), "twice": torch.cat([rows, rows]) * 2}


class PerRow(nn.Module):
    """Scalars with a batch, and a column that is cut to nothing."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"doubled": x * 2, "nothing": x[:, None][:, :0]}


class Half(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x * 2}


class Views(nn.Module):
    """No kernel at all."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"turned": x.transpose(1, 2), "flat": x.view(x.shape[0], 6), "column": x[:, :, 1:2], "same": x}


FACTOR, ROWS = np.array(1.5, np.float32), np.zeros((0, 4), np.float32)
SCALED = np.array([0, 1.5, 3, 4.5], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("shapes")
    batch = Dim("batch", min=1, max=8)
    programs = {
        "odd": torch.export.export(Odd(), (), kwargs={"factor": torch.tensor(1.0), "rows": torch.zeros(0, 4)}),
        "per_row": torch.export.export(PerRow(), (), {"x": torch.zeros(2)}, dynamic_shapes={"x": {0: batch}}),
        "half": torch.export.export(
            Half(), (), {"x": torch.zeros(2, 3, dtype=torch.bfloat16)}, dynamic_shapes={"x": {0: batch}}
        ),
    }
    for name, program in programs.items():
        (folder / "models" / name / "1").mkdir(parents=True)
        save_model(program, folder / "models" / name / "1" / "model.pt2", {})
    with serving(folder / "models", "8MiB", folder / "cache", grpc_port=0, batch_sizes=(1, 4)) as running:
        yield running


def assert_odd(outputs: Mapping[str, NDArray[Any]]) -> None:
    assert {name: array.shape for name, array in outputs.items()} == {"scaled": (4,), "total": (), "twice": (0, 4)}
    np.testing.assert_array_equal(outputs["scaled"], SCALED)
    assert outputs["total"] == 9


def test_binary_over_http(server: Running) -> None:
    assert_odd(infer(server.address, "odd", {"factor": FACTOR, "rows": ROWS}))
    outputs = infer(server.address, "per_row", {"x": np.array([1, 2, 3], np.float32)})
    np.testing.assert_array_equal(outputs["doubled"], [2, 4, 6])
    assert outputs["nothing"].shape == (3, 0)


@pytest.mark.parametrize("factor", [1.5, [1.5]], ids=str)
def test_json_over_http(server: Running, factor: Any) -> None:
    inputs = [
        {"name": "factor", "datatype": "FP32", "shape": [], "data": factor},
        {"name": "rows", "datatype": "FP32", "shape": [0, 4], "data": []},
    ]
    status, answer = ask(server.address, "POST", "/v2/models/odd/infer", {"inputs": inputs})
    assert status == 200, answer
    assert_odd({o["name"]: np.array(o["data"], np.float32).reshape(o["shape"]) for o in answer["outputs"]})
    status, answer = ask(server.address, "POST", "/v2/models/per_row/generate", {"x": factor})
    assert (status, answer.get("doubled"), answer.get("nothing")) == (200, 3.0, []), answer


@pytest.mark.parametrize("typed", [True, False])
def test_grpc(server: Running, typed: bool) -> None:
    message = ModelInferRequest(model_name="odd")
    for name, array in (("factor", FACTOR), ("rows", ROWS)):
        tensor = message.inputs.add(name=name, datatype="FP32", shape=array.shape)
        if typed:
            tensor.contents.fp32_contents.extend(array.ravel().tolist())
            tensor.contents.SetInParent()
        else:
            message.raw_input_contents.append(array.tobytes())
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        answer = client._client_stub.ModelInfer(message)
    pairs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    assert_odd({o.name: np.frombuffer(raw, np.float32).reshape(list(o.shape)) for o, raw in pairs})


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        ("per_row", {"x": np.zeros(0, np.float32)}, "batch-size must be <= 4 for 'per_row' and at least 1, got 0"),
        (
            "per_row",
            {"x": np.array(1.0, np.float32)},
            r"unexpected shape for input 'x' .* Expected \[-1\], got \[\]",
        ),
        ("odd", {"factor": FACTOR, "rows": np.zeros((1, 4), np.float32)}, r"Expected \[0, 4\], got \[1, 4\]"),
    ],
)
def test_other_shapes_are_refused(server: Running, model: str, inputs: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(InferenceServerException, match=reason) as caught:
        infer(server.address, model, inputs)
    assert caught.value.status() == "400"


def test_bfloat16_is_sent_as_bytes_only(server: Running) -> None:
    x = np.array([[1, -2.5, 1024]], ml_dtypes.bfloat16)
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        sent = triton_grpc.InferInput("x", [1, 3], "BF16")
        sent.set_data_from_numpy(x)
        result = client.infer("half", [sent])
    raw = result.get_response().raw_output_contents[0]
    np.testing.assert_array_equal(np.frombuffer(raw, ml_dtypes.bfloat16).reshape(1, 3), x * 2)
    body = {"inputs": [{"name": "x", "datatype": "BF16", "shape": [1, 3], "data": [1, 2, 3]}]}
    status, answer = ask(server.address, "POST", "/v2/models/half/infer", body)
    assert (status, "receiving BF16 data via JSON is not supported" in answer["error"]) == (400, True)


@pytest.mark.parametrize("layout", ["partitioned", "on_demand"])
def test_a_model_of_views_only_is_served(tmp_path: Path, layout: str) -> None:
    """It has no op to time, no parameter to copy, and no time to compare with."""
    example, batch = {"x": torch.zeros(2, 2, 3)}, Dim("batch", min=1, max=8)
    program = torch.export.export(Views(), (), example, dynamic_shapes={"x": {0: batch}})
    (tmp_path / "models" / "views" / "1").mkdir(parents=True)
    save_model(program, tmp_path / "models" / "views" / "1" / "model.pt2", {})
    x = np.random.default_rng(0).standard_normal((3, 2, 3), np.float32)
    folders = tmp_path / "models", "1MiB", tmp_path / "cache"
    with serving(*folders, layout=layout, engine="process", batch_sizes=(1, 4)) as server:
        answers = infer(server.address, "views", {"x": x})
    expected = {"turned": x.transpose(0, 2, 1), "flat": x.reshape(3, 6), "column": x[:, :, 1:2], "same": x}
    assert answers.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(answers[name], array)
