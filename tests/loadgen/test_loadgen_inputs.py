import numpy as np
import pytest

from cohabit.loadgen.errors import ModelRefused
from cohabit.loadgen.inputs import FREE_DIMENSION, MAX_ID, concrete_shape, random_inputs, random_values

RNG = np.random.default_rng(0)


def test_the_first_open_dimension_is_the_batch() -> None:
    assert concrete_shape("m", [-1, 3, 224, 224], batch=4) == (4, 3, 224, 224)
    assert concrete_shape("m", [-1, -1], batch=2) == (2, FREE_DIMENSION)
    assert concrete_shape("m", [2, 5], batch=2) == (2, 5)


def test_a_fixed_shape_with_another_batch_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"fixed shape \[1, 5\]; use --batch 1"):
        concrete_shape("m", [1, 5], batch=4)


@pytest.mark.parametrize("datatype", ["INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"])
def test_integers_are_small_ids(datatype: str) -> None:
    values = random_values("input_ids", datatype, (1000,), RNG)
    assert values is not None
    assert values.dtype == np.dtype(datatype.lower())
    assert 0 <= values.min() < values.max() < MAX_ID


def test_integers_are_within_the_range_that_the_server_tells() -> None:
    narrow, wide = (
        {"name": "ids", "datatype": "INT64", "shape": [-1, 500], "parameters": {"minimum": 0, "maximum": most}}
        for most in (1, 1 << 20)
    )
    first, second = random_inputs({"name": "m", "inputs": [narrow, wide]}, batch=1, rng=RNG)
    assert set(np.frombuffer(first._get_binary_data(), np.int64)) == {0, 1}
    assert np.frombuffer(second._get_binary_data(), np.int64).max() < MAX_ID


def test_a_mask_lets_everything_through() -> None:
    values = random_values("attention_mask", "INT64", (2, 8), RNG)
    assert values is not None
    assert values.tolist() == [[1] * 8] * 2


@pytest.mark.parametrize("datatype", ["BOOL", "FP16", "FP32", "FP64", "BF16", "BYTES", "INT64"])
def test_every_datatype_makes_a_request(datatype: str) -> None:
    metadata = {"name": "m", "inputs": [{"name": "x", "datatype": datatype, "shape": ["-1", "3"]}]}
    (tensor,) = random_inputs(metadata, batch=2, rng=RNG)
    assert (tensor.shape(), tensor.datatype()) == ([2, 3], datatype)


def test_an_unknown_datatype_is_refused() -> None:
    metadata = {"name": "m", "inputs": [{"name": "x", "datatype": "FP4", "shape": [-1]}]}
    with pytest.raises(ModelRefused, match="m: input x has the datatype FP4"):
        random_inputs(metadata, batch=1, rng=RNG)
