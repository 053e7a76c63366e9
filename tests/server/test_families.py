"""Which models share a partition, and how many bytes several models have without counting any twice."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.deploy.model import LEAST_COMMON, Model, are_siblings, families_of, partitions_of, weight_bytes

SIZES = (5, 20, 40, 30, 5)
"""Bytes of the segments; a table of 50 bytes comes after them."""
TABLE = 50


def model(contents: Sequence[object], graph: str = "g", saved: int = 0) -> Model:
    """A model with these contents in its segments and its table."""
    made = Model(None)  # type: ignore[arg-type]
    segments, tables = [SimpleNamespace(nbytes=n) for n in SIZES], [SimpleNamespace(nbytes=TABLE)]
    lowered: Any = SimpleNamespace(
        manifest=SimpleNamespace(segments=segments, tables=tables),
        graphs={Bucket(1): SimpleNamespace(fingerprint=graph)},
        weight_bytes=sum(SIZES) + TABLE + saved,
        batched=True,
        interaction=None,
    )
    store: Any = SimpleNamespace(source=lambda n: contents[n])
    made.lowered, made.store = lowered, store
    return made


def drawn(draws: random.Random, trunks: int) -> Model:
    """A model on one of a few trunks; some segments are its own."""
    trunk, own = draws.randrange(trunks), draws.randrange(1 << len(SIZES)) & draws.randrange(1 << len(SIZES))
    contents: list[object] = [object() if own >> n & 1 else (trunk, n) for n in range(len(SIZES))]
    return model([*contents, draws.choice(["a table", object()])], draws.choice("gggh"))


def common_bytes(one: Model, other: Model) -> int:
    pairs = zip(SIZES, one.sources, other.sources, strict=False)
    return sum(nbytes for nbytes, own, its in pairs if own == its)


@pytest.mark.parametrize("seed", range(20))
def test_a_member_has_the_graphs_and_nine_tenths_of_the_weights_of_its_familys_first(seed: int) -> None:
    draws = random.Random(seed)
    models = [drawn(draws, trunks=2) for _ in range(30)]
    families = families_of(models, lanes=1)
    assert sorted(map(id, models)) == sorted(id(one) for family in families for one in family)
    for family in families:
        first, *others = family
        for other in others:
            assert other.planned_as == first.planned_as
            assert common_bytes(first, other) >= LEAST_COMMON * sum(SIZES)
            assert are_siblings(first, other)
    firsts = [family[0] for family in families]
    for n, one in enumerate(firsts):
        assert not any(are_siblings(other, one) for other in firsts[:n]), "it began a family for want of one"


def test_models_whose_rows_interact_are_planned_apart_from_others() -> None:
    """Batches of the others may be split; graphs do not say what an op computes along which dimension."""
    one, mixing = model("abcdet"), model("abcdet")
    mixing.lowered.interaction = "rows interact"  # type: ignore[misc,assignment]
    assert not are_siblings(one, mixing)
    assert families_of([one, mixing], lanes=1) == [[one], [mixing]]


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_each_lane_gets_a_part_of_a_family(lanes: int) -> None:
    members = [model([*"abcd", object(), object()]) for _ in range(5)]
    stranger = model([object() for _ in range(6)])
    families = families_of([members[0], stranger, *members[1:]], lanes)
    assert families == [*(members[lane::lanes] for lane in range(lanes)), [stranger]]


def test_parameters_that_several_models_have_count_once() -> None:
    one = model("abcdet", saved=7)
    assert weight_bytes([one]) == sum(SIZES) + TABLE + 7
    assert weight_bytes([model("aaaaat")]) == sum(SIZES) + TABLE, "as in a server of its own"
    assert weight_bytes([one, model("abcdet")]) == sum(SIZES) + TABLE + 7
    assert weight_bytes([one, model("abcdft")]) == sum(SIZES) + TABLE + 7 + SIZES[-1]
    assert weight_bytes([one, model("vwxyzu")]) == 2 * (sum(SIZES) + TABLE) + 7
    assert weight_bytes([]) == 0


def test_models_are_listed_by_partition_in_the_order_of_their_loads() -> None:
    models = [model("abcdet") for _ in range(3)]
    for one, partition_id in zip(models, ("x", "y", "x"), strict=True):
        one.partition_id = partition_id
    assert partitions_of(models) == {"x": [models[0], models[2]], "y": [models[1]]}
