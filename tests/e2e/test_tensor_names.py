"""Tensors have the names that the model's code has for them, or those of its config.pbtxt, as in Triton."""

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

from cohabit.loadgen.zoo.exporting import save_model
from tests.support.e2e.serving import Running, ask, infer, repository_index, serving


class SumAndDifference(nn.Module):
    """Named as Triton's examples are."""

    def forward(self, INPUT0: torch.Tensor, INPUT1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: N803
        return INPUT0 + INPUT1, INPUT0 - INPUT1


class Lowercase(nn.Module):
    def forward(self, first: torch.Tensor, second: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"Sum": first + second, "Difference": first - second}


class Structured(nn.Module):
    """Its arguments are structures, one of them passed by name."""

    def forward(self, Pair: list[torch.Tensor], *, Options: dict[str, torch.Tensor]) -> torch.Tensor:  # noqa: N803
        return Pair[0] + Pair[1] - Options["Shift"]


def config(*tensors: tuple[str, str]) -> str:
    written = (f'{way} {{ name: "{name}" data_type: TYPE_FP32 dims: 4 }}\n' for way, name in tensors)
    return "".join(written) + "max_batch_size: 4\n"


TRITON = (("input", "INPUT0"), ("input", "INPUT1"), ("output", "OUTPUT0"), ("output", "OUTPUT1"))
INDEXED = (("input", "B__1"), ("input", "A__0"), ("output", "OUT__1"), ("output", "OUT__0"))

NAMES: dict[str, tuple[nn.Module, str, list[str], list[str]]] = {
    "as_in_the_code": (SumAndDifference(), "", ["INPUT0", "INPUT1"], ["output_0", "output_1"]),
    "as_in_triton": (SumAndDifference(), config(*TRITON), ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"]),
    "by_order": (Lowercase(), config(*TRITON), ["INPUT0", "INPUT1"], ["OUTPUT0", "OUTPUT1"]),
    "by_index": (Lowercase(), config(*INDEXED), ["A__0", "B__1"], ["OUT__0", "OUT__1"]),
    "by_name_but_for_case": (
        Lowercase(),
        config(("input", "SECOND"), ("input", "FIRST"), ("output", "DIFFERENCE"), ("output", "SUM")),
        ["FIRST", "SECOND"],
        ["SUM", "DIFFERENCE"],
    ),
    "outputs_of_the_code": (Lowercase(), config(*TRITON[:2]), ["INPUT0", "INPUT1"], ["Sum", "Difference"]),
}
REASONS = {
    "three_outputs": (
        config(*TRITON, ("output", "OUTPUT2")),
        r"config\.pbtxt has 3 outputs \(OUTPUT0, OUTPUT1, OUTPUT2\), the program has 2 \(Sum, Difference\)",
    ),
    "name_of_another_input": (
        config(("input", "second"), ("input", "third")),
        r"config\.pbtxt has input 'third', the program has first, second",
    ),
    "name_twice": (
        config(("input", "first"), ("input", "first")),
        r"config\.pbtxt has an input twice: first, first",
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    repository = tmp_path_factory.mktemp("models")
    x, y, z = torch.ones(3, 2, 4).unbind()
    batch = {0: Dim("batch", min=1, max=4)}
    rejected = {name: (Lowercase(), text) for name, (text, _) in REASONS.items()}
    for name, (model, text, *_) in (NAMES | rejected).items():  # type: ignore[operator]
        program = torch.export.export(model, (x, y), dynamic_shapes=(batch, batch))
        save_model(program, repository / name / "1" / "model.pt2", {})
        if text:
            (repository / name / "config.pbtxt").write_text(text)
    program = torch.export.export(
        Structured(), ([x, y],), {"Options": {"Shift": z}}, dynamic_shapes=([batch, batch], {"Shift": batch})
    )
    save_model(program, repository / "structured" / "1" / "model.pt2", {})
    with serving(repository, "64MiB", tmp_path_factory.mktemp("cache"), batch_sizes=(1,)) as running:
        yield running


A, B = np.arange(4, dtype=np.float32)[None], np.full((1, 4), 10, np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_and_outputs_have_their_names(server: Running, name: str) -> None:
    *_, inputs, outputs = NAMES[name]
    status, metadata = ask(server.address, "GET", f"/v2/models/{name}")
    assert status == 200
    assert [tensor["name"] for tensor in metadata["inputs"]] == inputs
    assert [tensor["name"] for tensor in metadata["outputs"]] == outputs
    answer = infer(server.address, name, dict(zip(inputs, (A, B), strict=True)))
    np.testing.assert_array_equal(answer[outputs[0]], A + B)
    np.testing.assert_array_equal(answer[outputs[1]], A - B)


def test_tensors_of_structures_are_named_by_the_path_to_them(server: Running) -> None:
    (output,) = infer(server.address, "structured", {"Pair_0": A, "Pair_1": B, "Options_Shift": A}).values()
    np.testing.assert_array_equal(output, B)


@pytest.mark.parametrize("name", REASONS)
def test_a_config_that_does_not_fit_the_program_is_refused(server: Running, name: str) -> None:
    entry = repository_index(server.address)[name]
    assert entry["state"] == "UNAVAILABLE"
    assert re.search(REASONS[name][1], entry["reason"]), entry["reason"]
