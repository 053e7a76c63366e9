"""Page map of the memory that parameters share while a search plays an inference: items in page order.

The partition comes first, then one border page that no parameter may use (so that none spans the border), then the
window: the workspace without the pool of counted bytes. An item is a parameter, a free range or the border. All
functions run inside compiled loops and change the map in place."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.compiled import compiled

NOWHERE: Final = -1
"""Page of a parameter that is not in memory."""
NO_MORE: Final = 1 << 40
"""Next use of a parameter without further use in this inference."""
UNUSED: Final = -1
"""Last user of bytes that no op has used in this inference."""

_FREE: Final = -1
_BORDER: Final = -2


class PageMap(NamedTuple):
    """Item i covers pages `begin[i]` to `begin[i + 1]`; the arrays are longer than needed."""

    begin: Ints
    what: Ints
    """Parameter of each item, or _FREE or _BORDER."""
    last: Ints
    """Last op that used each item's bytes, or UNUSED."""
    items: Ints
    """Number of items; shape [1]."""
    where: Ints
    """Page of each parameter, or NOWHERE."""


class Hole(NamedTuple):
    """Criteria of a search for a hole."""

    op: int
    op_end_s: Floats
    """Op k ends at `op_end_s[k + 1]`, as far as known."""
    link_s: float
    """Time at which the link can begin another transfer."""
    fit: int
    """Rule among holes that are free in time: 0 prefers the longest idle, 1 the tightest, 2 the next after `cursor`."""
    cursor: int
    """End of the latest transfer's bytes, for rule 2."""


@compiled
def empty_page_map(partition_pages: int, window_pages: int, parameters: int, most_items: int) -> PageMap:
    begin = np.empty(most_items + 1, dtype=np.int64)
    what = np.empty(most_items + 1, dtype=np.int64)
    last = np.full(most_items + 1, UNUSED)
    begin[0], begin[1], begin[2] = 0, partition_pages, partition_pages + 1
    begin[3] = partition_pages + 1 + window_pages
    what[0], what[1], what[2] = _FREE, _BORDER, _FREE
    return PageMap(begin, what, last, np.array([3]), np.full(parameters, NOWHERE))


@compiled
def item_at(memory: PageMap, page: int) -> int:
    """Return the item that covers a page."""
    begin = memory.begin
    low, high = 0, memory.items[0]
    while high - low > 1:
        middle = (low + high) // 2
        if begin[middle] <= page:
            low = middle
        else:
            high = middle
    return low


@compiled
def use(memory: PageMap, parameter: int, op: int) -> None:
    memory.last[item_at(memory, memory.where[parameter])] = op


@compiled
def remove(memory: PageMap, parameter: int) -> None:
    memory.what[item_at(memory, memory.where[parameter])] = _FREE
    memory.where[parameter] = NOWHERE


@compiled
def put(memory: PageMap, parameter: int, page: int, pages: int) -> int:
    """Overwrite pages with a parameter. Returns the last op that used these bytes, or UNUSED."""
    at, latest = _overwrite(memory, parameter, page, pages)
    memory.last[at] = latest
    memory.where[parameter] = page
    return latest


@compiled
def _overwrite(memory: PageMap, item: int, page: int, pages: int) -> tuple[int, int]:
    """Overwrite pages with an item. Returns its index and the last op that used its bytes before.

    Overlapping items are removed as a whole; their parts outside the pages become free.
    """
    begin, what, last, items = memory.begin, memory.what, memory.last, memory.items[0]
    first = item_at(memory, page)
    stop, latest = first, UNUSED
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
            _copy_item(begin, what, last, i, i + grown)
    elif grown < 0:
        for i in range(stop, items + 1):
            _copy_item(begin, what, last, i, i + grown)
    at = first + head
    begin[at], what[at] = page, item
    if tail:
        begin[at + 1], what[at + 1], last[at + 1] = page + pages, _FREE, tail_last
    memory.items[0] += grown
    return at, latest


@compiled
def tidy(memory: PageMap, next_use: Ints, op_end_s: Floats, link_s: float) -> None:
    """Merge adjacent ranges that are not needed any more and are free when the link is."""
    begin, what, last = memory.begin, memory.what, memory.last
    kept, was_dead = 0, False
    for i in range(memory.items[0]):
        p = what[i]
        dead = (p == _FREE or (p >= 0 and next_use[p] >= NO_MORE)) and op_end_s[last[i] + 1] <= link_s
        if dead and p >= 0:
            memory.where[p] = NOWHERE
            what[i] = _FREE
        if dead and was_dead:
            last[kept - 1] = max(last[kept - 1], last[i])
        else:
            if kept < i:
                _copy_item(begin, what, last, i, kept)
            kept += 1
        was_dead = dead
    begin[kept] = begin[memory.items[0]]
    memory.items[0] = kept


@compiled
def _copy_item(begin: Ints, what: Ints, last: Ints, source: int, target: int) -> None:
    begin[target] = begin[source]
    what[target] = what[source]
    last[target] = last[source]


@compiled
def find_hole(memory: PageMap, pages: int, locked: Ints, hole: Hole) -> int:
    """Return the first page of a range without locked contents, or NOWHERE.

    Ranges that are free when the link is come first, then those that are free earliest. Ranges begin or end at
    boundaries of items.
    """
    begin, what, last, items = memory.begin, memory.what, memory.last, memory.items[0]
    op, op_end_s, link_s, fit, cursor = hole.op, hole.op_end_s, hole.link_s, hole.fit, hole.cursor
    best, best_late_s, best_rank = NOWHERE, np.inf, np.inf
    run_first = run_stop = 0  # the current run of items that are not locked
    while run_stop < items:
        run_first = run_stop
        if not _is_open(what[run_first], last[run_first], locked, op):
            run_stop += 1
            continue
        while run_stop < items and _is_open(what[run_stop], last[run_stop], locked, op):
            run_stop += 1
        low, high = begin[run_first], begin[run_stop]
        if high - low < pages:
            continue
        for i in range(run_first, run_stop):
            for side in range(2):
                page = begin[i] if side == 0 else begin[i + 1] - pages
                if page < low or page + pages > high:
                    continue
                latest = _latest_use(begin, last, i, page, pages)
                late_s = max(op_end_s[latest + 1] - link_s, 0.0)
                if late_s > best_late_s:
                    continue
                if fit == 0:
                    rank = float(latest)
                elif fit == 1:
                    rank = float(high - low)
                else:
                    rank = float(page - cursor if page >= cursor else page - cursor + begin[items] + 1)
                if late_s < best_late_s or rank < best_rank:
                    best, best_late_s, best_rank = page, late_s, rank
    return best


@compiled
def _is_open(parameter: int, last: int, locked: Ints, op: int) -> bool:
    return bool(last < op and parameter != _BORDER and (parameter < 0 or locked[parameter] < op))


@compiled
def _latest_use(begin: Ints, last: Ints, item: int, page: int, pages: int) -> int:
    """Return the last op that used any byte of a range that begins near an item."""
    while begin[item] > page:
        item -= 1
    latest = UNUSED
    while begin[item] < page + pages:
        latest = max(latest, last[item])
        item += 1
    return latest


@compiled
def find_free(memory: PageMap, pages: int, op: int, next_use: Ints, early: Ints) -> int:
    """Return the first page of the range to evict: needed last, then idle longest. NOWHERE if there is none.

    Ranges begin or end at boundaries of items. Excluded are ranges with parameters that this op reads, or with
    copies issued ahead (`early`) that no op has read yet.
    """
    begin, items = memory.begin, memory.items[0]
    best, best_next, best_last = NOWHERE, op, op
    for i in range(items):
        for page in (begin[i], begin[i + 1] - pages):
            if page < 0 or page + pages > begin[items]:
                continue
            soonest, latest = _contents(memory, i, page, pages, op, next_use, early)
            if latest < op < soonest and (soonest > best_next or (soonest == best_next and latest < best_last)):
                best, best_next, best_last = page, soonest, latest
    return best


@compiled
def _contents(
    memory: PageMap, item: int, page: int, pages: int, op: int, next_use: Ints, early: Ints
) -> tuple[int, int]:
    """Return the soonest next use and the last use of a range; the former is -1 if the range is excluded."""
    begin, what, last = memory.begin, memory.what, memory.last
    while begin[item] > page:
        item -= 1
    soonest, latest = NO_MORE, UNUSED
    while begin[item] < page + pages:
        p = what[item]
        if p == _BORDER or (p >= 0 and early[p] > op):
            return -1, latest
        if p >= 0:
            soonest = min(soonest, next_use[p])
        latest = max(latest, last[item])
        item += 1
    return soonest, latest
