"""A config.pbtxt chooses how a model computes; nonsense is refused with the parameter's name."""

from pathlib import Path

import pytest
from google.protobuf import text_format

from runtime.options import Options
from server.errors import RepositoryError
from server.models.options import options_of
from server.models.repository import ModelSource
from server.protocol.model_config import ModelConfig


def source(**parameters: str) -> ModelSource:
    lines = [f"parameters {{ key: '{k}' value {{ string_value: '{v}' }} }}" for k, v in parameters.items()]
    return ModelSource("m", 1, Path("model.pt2"), text_format.Parse("\n".join(lines), ModelConfig()))


def test_parameters_choose_the_options() -> None:
    assert options_of(source(), "cpu") == Options()
    assert options_of(ModelSource("m", 1, Path("model.pt2")), "cpu") == Options()
    assert options_of(source(precision="Half"), "cpu") == Options("float16")
    assert options_of(source(precision="bfloat16", channels_last="true"), "cpu") == Options("bfloat16", True)
    assert options_of(source(precision="tf32"), "cuda:1") == Options(tf32=True)
    assert options_of(source(fused="true"), "cuda") == Options(fused=True)
    assert options_of(source(fused="false"), "cpu") == Options()
    assert options_of(source(max_burst="3"), "cpu") == Options(), "others' parameters are others' business"


@pytest.mark.parametrize(
    ("parameters", "device", "reason"),
    [
        ({"precision": "int8"}, "cuda", "'precision': 'int8' is none of float32, tf32, float16, half, bfloat16"),
        ({"precision": ""}, "cpu", "'precision': '' is none of"),
        ({"channels_last": "yes"}, "cpu", "'channels_last': 'yes' is none of true, false"),
        ({"precision": "tf32"}, "cpu", "tf32 is how CUDA rounds float32; on cpu it changes nothing"),
        ({"fused": "maybe"}, "cuda", "'fused': 'maybe' is none of true, false"),
        ({"fused": "true"}, "cpu", "fused kernels are cuDNN's; on cpu there are none"),
    ],
)
def test_nonsense_is_refused(parameters: dict[str, str], device: str, reason: str) -> None:
    with pytest.raises(RepositoryError) as refused:
        options_of(source(**parameters), device)
    assert reason in str(refused.value)
