"""The memory that parameters share, as a planner sees it: a line of pages with items in page order.

First comes the partition, then a page that belongs to nobody (so that no parameter lies across the border), then
the workspace, at whose bottom the activations are. An item is a parameter, a free stretch or the border. All
functions run inside compiled loops and change the memory in place.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOWHERE: Final = -1
"""Page of a parameter that is not in memory."""
NO_MORE: Final = 1 << 40
"""Next use of a parameter that this inference does not need again."""
FRESH: Final = -1
"""Last user of bytes that no op has used in this inference."""

_FREE: Final = -1
_BORDER: Final = -2


class Memory(NamedTuple):
    """Item i covers pages `begin[i]` to `begin[i + 1]`; the arrays are longer than needed."""

    begin: Ints
    what: Ints
    """Parameter of each item, or one of the two above."""
    last: Ints
    """Last op that used each item's bytes, or FRESH."""
    items: Ints
    """Number of items, [1]."""
    where: Ints
    """Page of each parameter, or NOWHERE."""


class Demand(NamedTuple):
    """What the search for room goes by."""

    op: int
    needed_by: Ints
    """The latest op, so far, that needed each parameter."""
    upcoming: Ints
    """The next op that will read each parameter, counted on into the next inference, or NO_MORE."""
    op_start_s: Floats
    threshold_s: float
    keep: int


@compiled
def empty_memory(partition_pages: int, workspace_pages: int, parameters: int, most_items: int) -> Memory:
    begin = np.empty(most_items + 1, dtype=np.int64)
    what = np.empty(most_items + 1, dtype=np.int64)
    last = np.full(most_items + 1, FRESH)
    begin[0], begin[1], begin[2] = 0, partition_pages, partition_pages + 1
    begin[3] = partition_pages + 1 + workspace_pages
    what[0], what[1], what[2] = _FREE, _BORDER, _FREE
    return Memory(begin, what, last, np.array([3]), np.full(parameters, NOWHERE))


@compiled
def copy_memory(source: Memory, target: Memory) -> None:
    """Overwrite one memory with another of the same capacity."""
    items = source.items[0]
    target.begin[: items + 1] = source.begin[: items + 1]
    target.what[:items] = source.what[:items]
    target.last[:items] = source.last[:items]
    target.items[0] = items
    target.where[:] = source.where


@compiled
def item_at(memory: Memory, page: int) -> int:
    """The item that covers a page."""
    low, high = 0, memory.items[0]
    while high - low > 1:
        middle = (low + high) // 2
        if memory.begin[middle] <= page:
            low = middle
        else:
            high = middle
    return low


@compiled
def use(memory: Memory, parameter: int, op: int) -> None:
    memory.last[item_at(memory, memory.where[parameter])] = op


@compiled
def remove(memory: Memory, parameter: int) -> None:
    memory.what[item_at(memory, memory.where[parameter])] = _FREE
    memory.where[parameter] = NOWHERE


@compiled
def put(memory: Memory, parameter: int, page: int, pages: int) -> int:
    """Write a parameter over whatever is there; return the last op that used these bytes, or FRESH.

    What is displaced is gone as a whole; those parts of it that stick out are free.
    """
    begin, what, last, items = memory.begin, memory.what, memory.last, memory.items[0]
    first = item_at(memory, page)
    stop, latest = first, FRESH
    while stop < items and begin[stop] < page + pages:
        latest = max(latest, last[stop])
        if what[stop] >= 0:
            memory.where[what[stop]] = NOWHERE
        what[stop] = _FREE
        stop += 1
    head = 1 if begin[first] < page else 0
    tail = 1 if begin[stop] > page + pages else 0
    tail_last = last[stop - 1]
    grown = head + 1 + tail - (stop - first)
    if grown > 0:
        for i in range(items, stop - 1, -1):
            _copy_item(memory, i, i + grown)
    else:
        for i in range(stop, items + 1):
            _copy_item(memory, i, i + grown)
    at = first + head
    begin[at], what[at], last[at] = page, parameter, latest
    if tail:
        begin[at + 1], what[at + 1], last[at + 1] = page + pages, _FREE, tail_last
    memory.items[0] += grown
    memory.where[parameter] = page
    return latest


@compiled
def cover(memory: Memory, pages: int, op: int) -> None:
    """An op's activations take the first pages of the workspace: who lies there is gone."""
    begin, what, last = memory.begin, memory.what, memory.last
    first = 0
    while what[first] != _BORDER:
        first += 1
    first += 1
    if pages == 0:
        return
    end = begin[first] + pages
    stop = first
    while stop < memory.items[0] and begin[stop] < end:
        if what[stop] >= 0:
            memory.where[what[stop]] = NOWHERE
            what[stop] = _FREE
        stop += 1
    tail = begin[stop] > end
    tail_last = last[stop - 1]
    moved = first + (2 if tail else 1) - stop
    if moved > 0:
        for i in range(memory.items[0], stop - 1, -1):
            _copy_item(memory, i, i + moved)
    elif moved < 0:
        for i in range(stop, memory.items[0] + 1):
            _copy_item(memory, i, i + moved)
    memory.items[0] += moved
    what[first], last[first] = _FREE, op
    if tail:
        begin[first + 1], what[first + 1], last[first + 1] = end, _FREE, tail_last


@compiled
def _copy_item(memory: Memory, source: int, target: int) -> None:
    memory.begin[target] = memory.begin[source]
    memory.what[target] = memory.what[source]
    memory.last[target] = memory.last[source]


@compiled
def find_room(memory: Memory, pages: int, demand: Demand) -> int:
    """First page of the stretch whose contents are needed last, then whose bytes are idle longest; or NOWHERE.

    Stretches begin or end where an item does. Those that hold what the op reads, or what must be kept, or that
    were used within the threshold, are out of the question.
    """
    begin, items = memory.begin, memory.items[0]
    idle_since_s = demand.op_start_s[demand.op] - demand.threshold_s
    best, best_next, best_last = NOWHERE, -1, demand.op
    for i in range(items):
        p = memory.what[i]
        item_next = demand.upcoming[p] if p >= 0 else NO_MORE
        if item_next < best_next or (item_next == best_next and memory.last[i] >= best_last):
            continue  # whatever else such a stretch holds only makes it worse
        for page in (begin[i], begin[i + 1] - pages):
            if page < 0 or page + pages > begin[items]:
                continue
            soonest, latest = _contents(memory, i, page, pages, demand)
            if soonest < 0 or latest >= demand.op or (latest >= 0 and demand.op_start_s[latest + 1] > idle_since_s):
                continue
            if soonest > best_next or (soonest == best_next and latest < best_last):
                best, best_next, best_last = page, soonest, latest
    return best


@compiled
def _contents(memory: Memory, item: int, page: int, pages: int, demand: Demand) -> tuple[int, int]:
    """The soonest next use and the last use of a stretch; the former is -1 if it must be left alone."""
    while memory.begin[item] > page:
        item -= 1
    soonest, latest = NO_MORE, FRESH
    while item < memory.items[0] and memory.begin[item] < page + pages:
        p = memory.what[item]
        if p == _BORDER:
            return -1, latest
        if p >= 0:
            if demand.needed_by[p] == demand.op or demand.upcoming[p] < demand.keep:
                return -1, latest
            soonest = min(soonest, demand.upcoming[p])
        latest = max(latest, memory.last[item])
        item += 1
    return soonest, latest
