"""Programs made at random compute what eager PyTorch computes, at every budget and from every store."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cohabit.runtime.lowering import fusion, packing
from tests.support.runtime.generated import Skipped, Step, differences

NUMBER = st.integers(0, 999)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), min_size=2, max_size=8)


@given(steps=STEPS, dynamic=st.booleans(), packed=st.booleans())
def equals_eager(steps: list[Step], dynamic: bool, packed: bool) -> None:
    try:
        found = list(differences(steps, dynamic=dynamic, packed=packed))
    except Skipped:
        assume(False)
    assert found == []


@pytest.mark.long
@pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))
@pytest.mark.parametrize("examples", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_program_at_random_equals_eager_at_every_budget(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    chosen = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
    )
    chosen(equals_eager)()
