"""A config.pbtxt chooses how a model computes; nonsense is refused with the parameter's name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format

from cohabit.runtime.lowering import packing
from cohabit.runtime.options import CUDA_DEFAULTS, Options
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.deploy.notices import warn_without_packing
from cohabit.server.deploy.options import options_of
from cohabit.server.deploy.prepare import SHAPE_BUCKETS, wanted_buckets
from cohabit.server.errors import RepositoryError
from cohabit.server.repository.sources import ModelSource
from cohabit.server.triton.model_config import ModelConfig


def source(**parameters: str) -> ModelSource:
    lines = [f"parameters {{ key: '{k}' value {{ string_value: '{v}' }} }}" for k, v in parameters.items()]
    return ModelSource("m", 1, Path("model.pt2"), text_format.Parse("\n".join(lines), ModelConfig()))


PACKED = Options(packed=True)
DEFAULT = ServeConfig(Path("models"), FixedSize(1 << 30))


def test_without_parameters_a_gpu_computes_as_torch_s_users_have_it() -> None:
    """Channels last, cuDNN's fused kernels, and TF32 where torch's own defaults allow it."""
    for given in (source(), ModelSource("m", 1, Path("model.pt2"))):
        assert options_of(given, "cpu") == PACKED
        assert options_of(given, "cuda:1") == CUDA_DEFAULTS == Options(channels_last=True, tf32="cudnn", fused=True)


@pytest.mark.parametrize(
    ("parameters", "changed"),
    [
        ({"precision": "float32"}, {"tf32": "none"}),
        ({"precision": "tf32"}, {"tf32": "all"}),
        ({"precision": "Half"}, {"dtype": "float16"}),
        ({"precision": "bfloat16", "channels_last": "true"}, {"dtype": "bfloat16"}),
        ({"channels_last": "false"}, {"channels_last": False}),
        ({"weights": "INT8"}, {"weights": "int8"}),
        ({"fused": "false", "max_burst": "3"}, {"fused": False}),
        (
            {"precision": "float32", "channels_last": "false", "fused": "false"},
            {"tf32": "none", "channels_last": False, "fused": False},
        ),
    ],
)
def test_parameters_change_a_gpu_s_defaults(parameters: dict[str, str], changed: dict[str, Any]) -> None:
    assert options_of(source(**parameters), "cuda") == replace(CUDA_DEFAULTS, **changed)


def test_a_model_s_own_weights_go_before_the_server_s() -> None:
    for device in ("cpu", "cuda"):
        assert options_of(source(), device, weights="int8").weights == "int8"
        assert options_of(source(weights="float32"), device, weights="int8").weights == "float32"
        assert options_of(ModelSource("m", 1, Path("model.pt2")), device, weights="bfloat16").weights == "bfloat16"
    with pytest.raises(RepositoryError, match="parameter 'weights': '4bits' is none of float32, bfloat16, int8"):
        options_of(source(weights="4bits"), "cpu")
    assert options_of(source(precision="float16"), "cuda", weights="int8").weights == "float32"
    with pytest.raises(RepositoryError, match="int8 is for weights of float32, and 'precision' makes them float16"):
        options_of(source(precision="float16", weights="int8"), "cuda")


def test_parameters_choose_a_cpu_s_options() -> None:
    assert options_of(source(precision="float32"), "cpu") == PACKED
    assert options_of(source(channels_last="true"), "cpu") == replace(PACKED, channels_last=True)
    assert options_of(source(fused="false"), "cpu") == PACKED
    assert options_of(source(max_burst="3"), "cpu") == PACKED, "others' parameters are others' business"


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_reduced_precision_is_refused_on_a_cpu_without_its_instructions(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = getattr(torch, precision)
    monkeypatch.setattr(packing, "supports", lambda dtype: dtype in (torch.float32, given))
    assert options_of(source(precision=precision), "cpu") == replace(PACKED, dtype=precision)
    monkeypatch.setattr(packing, "supports", lambda dtype: dtype is torch.float32)
    with pytest.raises(RepositoryError, match=f"'precision': this CPU .* has no instructions for {precision}"):
        options_of(source(precision=precision), "cpu")


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


def test_weights_stay_plain_where_torch_cannot_pack_them_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "unavailable", lambda: "the test says so")
    assert options_of(source(), "cpu") == Options()
    warn_without_packing(DEFAULT)
    assert "weights are not packed" in caplog.text


@pytest.mark.parametrize("count", [65, 19_999])
def test_a_list_of_too_many_sizes_is_refused_before_it_is_read(count: int) -> None:
    """Each would be compared with the conditions of the export: 19,999 took a worker 22 s."""
    reason = rf"'cohabit.shape_buckets': {count} sizes are named, the limit is 64; each has a plan"
    sizes = ",".join(map(str, range(1, count + 1)))
    with pytest.raises(RepositoryError, match=reason):
        wanted_buckets(source(**{SHAPE_BUCKETS: sizes}), DEFAULT)
    given = wanted_buckets(source(**{SHAPE_BUCKETS: ",".join(map(str, range(1, 65)))}), DEFAULT)
    assert len(given.sizes) == 64


def test_a_dimension_may_have_sizes_of_its_own() -> None:
    given = wanted_buckets(source(**{SHAPE_BUCKETS: "64,16; image.2=224,32;tokens=7"}), DEFAULT)
    assert [given.of("image", 2), given.of("image", 3), given.of("tokens", 1)] == [(32, 224), (16, 64), (7,)]
    assert str(given) == "16,64;image.2=32,224;tokens=7"
    assert wanted_buckets(source(**{SHAPE_BUCKETS: str(given)}), DEFAULT) == given


@pytest.mark.parametrize("text", ["16;32", "=16", "x=1;x=2", "x=", "x=0", "x"])
def test_sizes_that_name_no_dimension_or_one_twice_are_refused(text: str) -> None:
    with pytest.raises(RepositoryError, match=r"cohabit\.shape_buckets"):
        wanted_buckets(source(**{SHAPE_BUCKETS: text}), DEFAULT)
