"""The batch is followed through a program: rows are independent only if that is shown, by rules per op."""

import pytest
import torch

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.exported import from_program
from cohabit.runtime.lowering.rows.proof import find_mixing
from tests.support.runtime import rows

QUICK = 6
"""Every sixth case is part of the quick tests."""


def _marked(cases: dict[str, rows.Case]) -> list[object]:
    return [pytest.param(name, marks=[pytest.mark.slow] * bool(n % QUICK)) for n, name in enumerate(cases)]


@pytest.mark.parametrize("name", _marked(rows.MIXING))
def test_programs_that_mix_rows_are_found_with_the_op(name: str) -> None:
    found = rows.mixing(*rows.MIXING[name])
    assert found is not None
    assert found.startswith("op ")


@pytest.mark.parametrize("name", _marked(rows.INDEPENDENT))
def test_programs_that_do_not_are_shown_to_be_independent(name: str) -> None:
    function, inputs = rows.INDEPENDENT[name]
    assert rows.mixing(function, inputs) is None
    with torch.inference_mode():
        assert rows.influence(rows.Program(function).eval(), inputs) is None


def _verdicts(count: int) -> tuple[int, int]:
    """Return the number of generated programs that were exported, and of those shown to be independent."""
    made = (found for seed in range(100 * count) if (found := rows.generated(seed)) is not None)
    exported = independent = 0
    for module, inputs in made:
        if exported == count:
            break
        try:
            model = from_program("m", rows.exported(module, inputs))
        except (UnsupportedModel, RuntimeError, ValueError):
            continue  # the batch is fixed, or the output has it elsewhere
        except torch._dynamo.exc.UserError:
            continue
        if model.max_batch is None:
            continue
        exported += 1
        if find_mixing(model, [{}]) is None:
            independent += 1
            with torch.inference_mode():
                assert rows.influence(module, inputs) is None, module.steps
    return exported, independent


@pytest.mark.long
def test_no_row_of_a_generated_program_shown_independent_depends_on_a_neighbour() -> None:
    exported, independent = _verdicts(20)
    assert exported == 20
    assert independent >= 5


@pytest.mark.slow
def test_no_row_of_2000_generated_programs_depends_on_a_neighbour() -> None:
    exported, independent = _verdicts(2000)
    assert exported == 2000
    assert independent >= 500
