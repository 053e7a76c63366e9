"""Buckets of sizes, and arithmetic with sizes, against Python's own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohabit.planner import shapes
from cohabit.planner.shapes import Bucket, Dimension, DynamicShape, UnknownExpression, evaluate, smallest_holding


def shape(least: int, most: int | None, step: int = 1, offset: int = 0, *constraints: str) -> DynamicShape:
    return DynamicShape((Dimension("s", 0, 1, step, offset, least, most),), constraints)


@pytest.mark.parametrize(
    ("dynamic", "wanted", "expected"),
    [
        (shape(2, 512), (), (16, 32, 64, 128, 256, 512)),
        (shape(1, 100), (), (1, 16, 32, 64, 100)),
        (shape(100, 512), (), (128, 256, 512)),
        (shape(2, 9), (), (9,)),
        (shape(1, 512), (64, 1000), (1, 64, 512)),
        (shape(2, None), (64, 1000), (64, 1000)),
        (shape(32, 512), (16,), ()),
        (shape(8, 64, 8), (20, 70), (16, 64)),
        (shape(9, 65, 8, 1), (20, 70), (17, 65)),
        (shape(2, 64, 1, 0, "Eq(Mod(s, 12), 0)"), (), (12, 24, 60)),
        (shape(1, 64, 1, 0, "s != 1"), (10,), (10,)),
    ],
)
def test_buckets_are_sizes_that_the_model_takes(
    dynamic: DynamicShape, wanted: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert dynamic.bucketed(wanted).dimensions[0].buckets == expected


@given(least=st.integers(1, 40), extent=st.integers(0, 200), step=st.integers(1, 8), size=st.integers(1, 300))
def test_a_size_is_allowed_where_a_bucket_holds_it(least: int, extent: int, step: int, size: int) -> None:
    dynamic = shape(least, least + extent * step, step, least % step).bucketed(())
    (dimension,) = dynamic.dimensions
    taken = range(least, least + extent * step + 1, step)
    assert dimension.allows(size) == (size in taken)
    if size in taken:
        (bucket,) = smallest_holding(dynamic.buckets, (size,))
        assert size <= bucket
        assert not any(size <= other < bucket for other in dimension.buckets)
        assert bucket in taken
        checked = dynamic.checked((bucket,))
        assert checked[0] == (bucket,)
        below = max((b for b in dimension.buckets if b < bucket), default=least - 1)
        assert all(below < other <= bucket and other in taken for (other,) in checked)


def test_no_size_is_compared_twice_with_the_conditions_of_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 buckets that no size meets, each would be searched down to the smallest size."""
    tried: list[int] = []
    monkeypatch.setattr(shapes, "_holds", lambda condition, symbols: tried.extend(symbols.values()))
    dynamic = DynamicShape((Dimension("s", 0, 1, 1, 0, 2, 1000),), ("Eq(Mod(s, 1009), 0)",))
    assert dynamic.bucketed(range(937, 1001)).dimensions[0].buckets == ()
    assert sorted(tried) == list(range(2, 1001))


def test_several_dimensions_make_every_combination() -> None:
    dimensions = (Dimension("s", 0, 1, 1, 0, 2, 32), Dimension("t", 1, 1, 1, 0, 2, 20))
    dynamic = DynamicShape(dimensions).bucketed((), ())
    assert dynamic.buckets == [(16, 16), (16, 20), (32, 16), (32, 20)]
    assert smallest_holding(dynamic.buckets, (17, 3)) == (32, 16)
    assert sorted([Bucket(4), Bucket(1, (32,)), Bucket(1, (4,))]) == [Bucket(1, (4,)), Bucket(1, (32,)), Bucket(4)]
    assert [str(Bucket(4)), str(Bucket(4, (128, 20)))] == ["4", "4x128x20"]


EXPRESSIONS = ["2*s + 1", "(s//2)", "s*t - 3", "-s + t**2", "s % 7", "(s + 1)//(t + 1)*4"]
CONDITIONS = ["s <= t", "s % 8 == 0 and t > 3", "not s == t or t >= 2", "max(s, 3) != min(t, 5)"]


@given(st.sampled_from(EXPRESSIONS + CONDITIONS), st.integers(0, 99), st.integers(1, 99))
def test_expressions_mean_what_they_mean_in_python(text: str, s: int, t: int) -> None:
    assert evaluate(text, {"s": s, "t": t}) == eval(text, {"s": s, "t": t})


def test_functions_of_shapes_are_known() -> None:
    assert evaluate("Max(3, s) + Min(s, 1) + Mod(s, 4) + FloorDiv(s, 2)", {"s": 7}) == 7 + 1 + 3 + 3
    assert (evaluate("Eq(Mod(s, 8), 0)", {"s": 16}), evaluate("Ne(s, 16)", {"s": 16})) == (True, False)


@pytest.mark.parametrize(
    "text", ["u + 1", "s.real", "open('x')", "s ** 99", "s[0]", "'s'", "lambda: s", "s +", "s" * 2000]
)
def test_nothing_but_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises(UnknownExpression):
        evaluate(text, {"s": 7})


def test_powers_of_powers_end_before_they_take_for_ever() -> None:
    text = "(" * 60 + "s" + ")**8" * 60
    with pytest.raises(UnknownExpression, match="the limit is 63"):
        evaluate(text, {"s": 7})
