"""Inputs that index a weight: what is out of range is an error before it is on a device, with the CPU's kind."""

import pytest
import torch
from torch import nn

from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.indices import indexed_values
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime import models
from tests.support.runtime.backends import cpu, fake_cuda, opened
from tests.support.runtime.cuda_fake import FakeDriver

WIDTH = 8


class Lookups(nn.Module):
    """Every way in which an input indexes a weight, each with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.host = nn.Embedding(48, WIDTH), nn.Embedding(40_000, WIDTH)
        self.bag = nn.EmbeddingBag(47, WIDTH, mode="sum")
        for name, rows in (("selected", 46), ("indexed", 45), ("pairs", 44), ("part", 43), ("second", 42)):
            self.register_buffer(name, torch.randn(rows, WIDTH))

    def forward(
        self,
        embedded: torch.Tensor,
        host: torch.Tensor,
        bag: torch.Tensor,
        selected: torch.Tensor,
        indexed: torch.Tensor,
        pair: torch.Tensor,
        parts: torch.Tensor,
        computed: torch.Tensor,
    ) -> torch.Tensor:
        rows = self.embedded(embedded.unsqueeze(1).long())[:, 0] + self.host(host.view(-1, 1)).mean(1)
        rows = rows + self.bag(bag) + self.selected.index_select(0, selected)
        rows = rows + self.indexed[indexed] + self.pairs[pair[:, 0], pair[:, 1]].unsqueeze(1)
        rows = rows + self.part[parts[:, 0]] + self.second[parts[:, 1:].squeeze(1)]
        return rows + self.embedded(computed * 3 + 1)


INPUTS = {
    name: torch.zeros(3, *shape, dtype=torch.int32 if name == "embedded" else torch.int64)
    for name, shape in {
        **dict.fromkeys(("embedded", "host", "selected", "indexed", "computed"), ()),
        **dict.fromkeys(("bag", "pair", "parts"), (2,)),
    }.items()
}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    torch.manual_seed(0)
    return models.lowered(Lookups(), INPUTS, tmp_path_factory.mktemp("lookups"), "lookups", [2])


def test_ranges_are_those_of_the_weights_that_inputs_index(lowered: Lowered) -> None:
    found = {
        (lowered.inputs[v.input].name, len(v.calls), v.least, v.most) for v in indexed_values(lowered, Bucket(2))
    }
    assert found == {
        ("embedded", 1, 0, 47),
        ("host", 0, 0, 39_999),
        ("bag", 0, 0, 46),
        ("selected", 0, 0, 45),
        ("indexed", 0, -45, 44),
        ("pair", 1, -44, 43),
        ("pair", 1, -WIDTH, WIDTH - 1),
        ("parts", 1, -43, 42),
        ("parts", 1, -42, 41),
    }, "and none of `computed`"


WRONG = [
    ("embedded", [48]),
    ("embedded", [-1]),
    ("host", [1 << 40]),
    ("host", [40_000]),
    ("bag", [0, 47]),
    ("selected", [46]),
    ("selected", [-1]),
    ("indexed", [45]),
    ("indexed", [-46]),
    ("pair", [0, WIDTH]),
    ("pair", [44, 0]),
    ("parts", [43, 0]),
    ("parts", [0, 42]),
]
RIGHT = [
    ("embedded", [47]),
    ("host", [39_999]),
    ("indexed", [-45]),
    ("pair", [-44, WIDTH - 1]),
    ("parts", [42, -42]),
]


def given(lowered: Lowered, name: str, values: list[int]) -> list[torch.Tensor]:
    """Inputs of a batch of two, with these values in the last row of one of them."""
    inputs = {port.name: tensor for port, tensor in zip(lowered.inputs, lowered.examples(Bucket(2)), strict=True)}
    inputs[name][-1] = torch.tensor(values).reshape(inputs[name][-1].shape)
    return list(inputs.values())


def test_an_index_out_of_range_is_refused_as_on_a_cpu_and_never_reaches_the_device(lowered: Lowered) -> None:
    """A kernel's assertion would lose the device, and with it every model."""
    with opened(fake_cuda, lowered) as device, opened(cpu, lowered) as host:
        plan = resident_plan(lowered.graphs[Bucket(2)])
        on_device, on_host = device.program(plan), host.program(plan)
        driver = device.backend.driver  # type: ignore[attr-defined]
        assert isinstance(driver, FakeDriver)
        for name, values in WRONG:
            inputs = given(lowered, name, values)
            with pytest.raises(DeviceError) as expected:
                host.executor.run(on_host, [t.clone() for t in inputs])
            driver.calls.clear()
            with pytest.raises(
                DeviceError, match=f"lookups: input {name} has the value .* out of range"
            ) as refused:
                device.executor.run(on_device, inputs)
            assert isinstance(refused.value.__cause__, type(expected.value.__cause__)) or name == "bag"
            assert isinstance(refused.value.__cause__, IndexError)
            assert driver.calls == [], "nothing was issued, and nothing is loaded again"
        for name, values in RIGHT:
            inputs = given(lowered, name, values)
            (answer,) = device.executor.run(on_device, inputs).outputs
            (wanted,) = host.executor.run(on_host, inputs).outputs
            torch.testing.assert_close(answer, wanted)
