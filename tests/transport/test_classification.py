"""The classification extension: Triton's strings, checked against a plain sort."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cohabit.server.ipc.model import TensorSpec
from cohabit.server.protocol.classification import classify
from tests.support.server.clients import PROTOCOLS, connect
from tests.support.server.server_http import infer, x
from tests.support.server.transport_fakes import Ports


def texts(array: np.ndarray[Any, Any]) -> list[str]:
    return [element.decode() for element in array.ravel()]


def plain(row: list[float], count: int, form: str) -> list[str]:
    order = sorted(range(len(row)), key=lambda index: (-row[index], index))
    return [f"{form % row[index]}:{index}" for index in order[:count]]


@settings(max_examples=100, deadline=None)
@given(
    hnp.arrays(np.int32, hnp.array_shapes(min_dims=2, max_dims=3, max_side=6), elements=st.integers(-3, 3)),
    st.integers(1, 8),
)
def test_the_largest_come_first_and_of_equal_ones_the_lower_index(rows: np.ndarray[Any, Any], count: int) -> None:
    labels = classify(rows, TensorSpec("y", "INT32", rows.shape[1:]), count, batched=True)
    for row, found in zip(rows.reshape(len(rows), -1), labels, strict=True):
        assert texts(found) == plain(row.tolist(), count, "%d")


@pytest.mark.parametrize(
    ("array", "datatype", "expected"),
    [
        (np.array([[1.5, 10.0, -2.0]], np.float32), "FP32", ["10.000000:1", "1.500000:0"]),
        (np.array([[1.5, np.nan, 2.0]], np.float64), "FP64", ["2.000000:2", "1.500000:0"]),
        (np.array([[0, 2**64 - 1, 5]], np.uint64), "UINT64", ["18446744073709551615:1", "5:2"]),
        (np.array([[False, True, True]]), "BOOL", ["1:1", "1:2"]),
        (np.array([[0x3F80, 0xC020, 0x4000]], np.uint16), "BF16", ["2.000000:2", "1.000000:0"]),
    ],
    ids=["FP32", "NaN", "UINT64", "BOOL", "BF16"],
)
def test_every_kind_of_number(array: np.ndarray[Any, Any], datatype: str, expected: list[str]) -> None:
    assert texts(classify(array, TensorSpec("y", datatype, (3,)), 2, batched=True)) == expected


def test_classes_have_the_names_that_the_model_gives_them() -> None:
    tensor = TensorSpec("y", "INT32", (4,), labels=("zero", "", "zwei: ½"))
    assert texts(classify(np.array([[5, 6, 7, 4]]), tensor, 4, batched=True)) == [
        "7:2:zwei: ½",
        "6:1",
        "5:0:zero",
        "4:3",
    ]


def test_without_a_batch_there_is_one_row() -> None:
    array = np.array([[1, 2], [3, 4]], np.int32)
    assert texts(classify(array, TensorSpec("y", "INT32", (2, 2)), 2, batched=False)) == ["4:3", "3:2"]


def test_nothing_has_no_classes() -> None:
    array = np.zeros((2, 0), np.float32)
    assert classify(array, TensorSpec("y", "FP32", (0,)), 3, batched=True).shape == (2, 0)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_clients_ask_for_classes(server: Ports, protocol: str) -> None:
    client = connect(server, protocol)
    with client.raw:
        array = np.array([[3, 1, 4, 1], [9, 2, 6, 5]], np.float64)
        wanted = client.api.InferRequestedOutput("y", class_count=2)
        result = client.raw.infer("id_fp64", [client.input("x", array, "FP64")], outputs=[wanted])
        assert [texts(row) for row in result.as_numpy("y")] == [
            ["4.000000:2", "3.000000:0"],
            ["9.000000:0", "6.000000:2"],
        ]
        wanted = client.api.InferRequestedOutput("y", class_count=9)
        result = client.raw.infer(
            "id_bf16", [client.input("x", np.ones((1, 4), ml_dtypes.bfloat16), "BF16")], outputs=[wanted]
        )
        assert texts(result.as_numpy("y")) == ["1.000000:0", "1.000000:1", "1.000000:2", "1.000000:3"]


def test_classes_as_json(server: Ports) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 2}}]
    answer = infer(server, "id_fp64", {"inputs": [x(datatype="FP64")], "outputs": outputs})
    assert answer.json["outputs"] == [
        {"name": "y", "datatype": "BYTES", "shape": [1, 2], "data": ["4.000000:3", "3.000000:2"]}
    ]
