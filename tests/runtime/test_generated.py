"""Programs made at random compute what eager PyTorch computes, at every budget and from every store."""

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cohabit.runtime.lowering import fusion, packing
from tests.support.runtime.generated import Skipped, Step, differences

EXAMPLES = 12
NUMBER = st.integers(0, 999)
STEPS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), min_size=2, max_size=8)


@pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(steps=STEPS, dynamic=st.booleans(), packed=st.booleans())
def test_a_program_at_random_equals_eager_at_every_budget(
    steps: list[Step], dynamic: bool, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    try:
        found = list(differences(steps, dynamic=dynamic, packed=packed))
    except Skipped:
        assume(False)
    assert found == []
