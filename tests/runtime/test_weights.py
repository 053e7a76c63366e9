"""How weights are put together into segments."""

import torch

from cohabit.runtime.lowering.weights import BLOCK_BYTES, LARGE_BYTES, WeightUse, lay_out


def use(name: str, nbytes: int, *readers: int) -> WeightUse:
    return WeightUse(name, torch.empty(nbytes, dtype=torch.uint8, device="meta"), readers)


def names(*uses: WeightUse) -> list[list[str]]:
    return [[p.name for p in s.pieces] for s in lay_out("", uses, {}).segments]


def test_what_the_same_ops_read_travels_together_in_the_order_of_use() -> None:
    assert names(use("w2", 1 << 20, 2), use("w1", 1 << 20, 1), use("b1", 64, 1)) == [["b1", "w1"], ["w2"]]


def test_small_neighbours_share_a_segment() -> None:
    assert names(use("a", 4000, 0), use("b", 4000, 1), use("c", 1 << 20, 2)) == [["a", "b"], ["c"]]


def test_two_large_weights_of_an_op_come_apart_and_small_ones_with_the_first() -> None:
    joined = names(use("hh", LARGE_BYTES - 1, 0), use("ih", LARGE_BYTES - 1, 0))
    apart = names(use("hh", LARGE_BYTES, 0), use("ih", LARGE_BYTES, 0), use("bias", 64, 0))
    assert joined == [["hh", "ih"]]
    assert apart == [["bias", "hh"], ["ih"]]


def test_segments_follow_one_another_in_whole_blocks() -> None:
    segments = lay_out("", [use("a", LARGE_BYTES + 1, 0), use("b", 5, 1)], {}).segments
    assert [s.offset for s in segments] == [0, LARGE_BYTES + BLOCK_BYTES]
    assert all(s.nbytes % BLOCK_BYTES == 0 for s in segments)
