"""A model in half precision, by its config.pbtxt: less memory, outputs of the same type, nearly the same values."""

import numpy as np
import pytest
import torch

from cohabit.runtime.lowering import packing
from cohabit.runtime.options import TOLERANCES
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import ask, infer, metric, serving

NAME = "ranker"


@pytest.mark.skipif(not packing.supports(torch.bfloat16), reason="needs a CPU with instructions for bfloat16")
def test_a_model_in_bfloat16_answers_within_its_tolerance_in_half_of_the_memory(archives: Archives) -> None:
    plain, half = archives.repository(NAME), archives.repository(NAME)
    (half / NAME / "config.pbtxt").write_text("parameters { key: 'precision' value { string_value: 'bfloat16' } }")
    inputs = archives.inputs(NAME, 4)
    (expected,) = archives.eager(NAME, inputs).values()
    nbytes = {}
    for repository in (plain, half):
        with serving(repository, "100%", archives.cache, layout="lru", batch_sizes=(1, 4)) as server:
            (output,) = infer(server.address, NAME, inputs).values()
            assert output.dtype == np.float32
            error = np.abs(output - expected).max() / np.abs(expected).max()
            assert error < (TOLERANCES["bfloat16"] if repository is half else TOLERANCES["float32"])
            nbytes[repository] = metric(server.metrics_address, "cohabit_parameter_bytes", NAME)
            status, config = ask(server.address, "GET", f"/v2/models/{NAME}/config", None)
            assert status == 200
            given = {"precision": {"string_value": "bfloat16"}} if repository is half else {}
            assert config["parameters"] == given
    assert nbytes[half] < 0.6 * nbytes[plain]
