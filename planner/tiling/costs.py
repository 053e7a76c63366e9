"""Bytes moved to convert an array from one distribution over the workers to another.

The workers form a mesh of one or two axes. A *form* has, for each axis of the mesh, the array axis that it splits,
`None` for copies, or "partial" for summands of the array: DTensor's Shard, Replicate and Partial. A form with equal
entries is a form of the mesh as a single axis. Tiles are also DTensor's: `ceil(n / workers)` long, the last ones
shorter."""

import itertools
import math
from dataclasses import dataclass
from functools import cache
from types import EllipsisType
from typing import Literal

import numpy as np

from cohabit.planner.tiling.expressions import Shape

Mesh = tuple[int, ...]
Form = tuple[int | Literal["partial"] | None, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of collectives, summed over the workers.

    `logical` bytes are read or updated by workers, including their own parts, as in the thesis: a retiled array counts
    once, an array that all read whole p times. `wire` bytes cross between workers: (p - 1) / p of the logical ones.
    """

    logical: int = 0
    wire: int = 0

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.logical + other.logical, self.wire + other.wire)


def mesh_of(workers: int) -> Mesh:
    """Return the mesh closest to a square; one axis for a prime number of workers."""
    rows = next(n for n in range(math.isqrt(workers), 0, -1) if workers % n == 0)
    return (workers,) if rows == 1 else (rows, workers // rows)


@cache
def bounds(shape: Shape, form: Form, mesh: Mesh) -> np.ndarray:
    """Return every worker's tile: first and one past the last index per axis; shape [workers, axes, 2]."""
    form, mesh = flattened(form, mesh)
    tiles = np.empty((math.prod(mesh), len(shape), 2), np.int64)
    for tile, place in zip(tiles, itertools.product(*map(range, mesh)), strict=True):
        tile[:, 0], tile[:, 1] = 0, shape
        for axis, count, index in zip(form, mesh, place, strict=True):
            if isinstance(axis, int):
                first, end = tile[axis]
                length = -(-(end - first) // count)
                tile[axis] = min(first + index * length, end), min(first + (index + 1) * length, end)
    return tiles


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tiles of `source` become tiles of `target`, whose origin is at `offset` in the source."""

    shape: Shape
    source: Form
    target_shape: Shape
    target: Form
    offset: Shape
    itemsize: int
    mesh: Mesh

    def wanted(self) -> np.ndarray:
        """Return the part of the source that every worker needs, as `bounds` does."""
        offset = np.array(self.offset, np.int64).reshape(1, -1, 1)
        ends = np.array(self.shape, np.int64).reshape(1, -1, 1)
        return np.clip(bounds(self.target_shape, self.target, self.mesh) + offset, 0, ends)


@cache
def exchanged(exchange: Exchange) -> Moved:
    """Count the bytes of an exchange, in which every worker receives its missing elements; zero if none are missing."""
    wanted, held = exchange.wanted(), bounds(exchange.shape, exchange.source, exchange.mesh)
    sizes, own = volumes(wanted), volumes(intersection(wanted, held))
    if (sizes == own).all():
        return Moved()
    return Moved(int(sizes.sum()) * exchange.itemsize, int((sizes - own).sum()) * exchange.itemsize)


@cache
def reduced(shape: Shape, source: Form, target: Form, itemsize: int, mesh: Mesh) -> Moved:
    """Count the bytes of merging partial tiles: a reduce-scatter if the target is split, else an all-reduce.

    For a form with a partial and a split axis, the former is all-reduced, and the rest is an exchange.
    """
    if set(source) == {"partial"} and None not in target:
        nbytes, count = math.prod(shape) * itemsize, math.prod(mesh)
        return Moved(nbytes * count, nbytes * (count - 1))
    summed = whole(source)
    count = math.prod(n for axis, n in zip(source, mesh, strict=True) if axis == "partial")
    nbytes = 2 * int(volumes(bounds(shape, summed, mesh)).sum()) * itemsize
    total = Moved(nbytes, nbytes * (count - 1) // count)
    return total + exchanged(Exchange(shape, summed, shape, target, (0,) * len(shape), itemsize, mesh))


def converted(shape: Shape, source: Form, target: Form, itemsize: int, mesh: Mesh) -> Moved:
    """Count the bytes of storing a result, computed as `source`, as `target`."""
    if "partial" in source:
        return reduced(shape, source, target, itemsize, mesh)
    return exchanged(Exchange(shape, source, shape, target, (0,) * len(shape), itemsize, mesh))


def flattened(form: Form, mesh: Mesh) -> tuple[Form, Mesh]:
    """Return a form with equal entries as a form of the mesh as a single axis; other forms are unchanged."""
    return (form[:1], (math.prod(mesh),)) if len(set(form)) == 1 else (form, mesh)


def whole(form: Form) -> Form:
    """Return the form after its partial axes are summed."""
    return tuple(None if axis == "partial" else axis for axis in form)


def intersection(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])], axis=-1)


def index_of(place: np.ndarray) -> tuple[slice | EllipsisType, ...]:
    """Return the index of ranges [start, end) per axis; it makes a view even of an array without axes."""
    return (*[slice(int(start), int(end)) for start, end in place], ...)


def volumes(tiles: np.ndarray) -> np.ndarray:
    """Return the number of elements of tiles [..., axes, 2]; zero for an empty intersection."""
    sizes: np.ndarray = np.maximum(tiles[..., 1] - tiles[..., 0], 0).prod(axis=-1)
    return sizes
