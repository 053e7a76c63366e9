"""Executes a tiled program: one worker's part, tile by tile.

NumPy computes on local tiles. Tiles move between workers by one kind of collective, an all-to-all of bytes: gloo
reduces and gathers only some of NumPy's types, and its minimum and maximum lose NaN (torch 2.13).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from cohabit.planner.tiling.costs import Exchange, Form, Moved, bounds, exchanged, index_of, intersection, whole
from cohabit.planner.tiling.expressions import Expression, NewArray, Region, View, combined, compute, viewed
from cohabit.planner.tiling.graph import in_view
from cohabit.planner.tiling.search import Step, TilingPlan
from cohabit.runtime.tiling.counting import CountedCollectives
from cohabit.runtime.tiling.worker import Worker


@dataclass(frozen=True)
class TiledArray:
    """One worker's tile of a result."""

    tile: np.ndarray
    expression: Expression
    form: Form
    run: "TiledRun"

    def full_tensor(self) -> Tensor:
        """Return the whole array. Collective: every worker calls this."""
        whole_form = (None,) * len(self.form)
        return torch.from_numpy(self.run.converted(self.tile, self.expression, self.form, whole_form).copy())


def measured(plan: TilingPlan, worker: Worker, repeats: int = 1) -> tuple[list[TiledArray], Moved, list[float]]:
    """Execute a plan `repeats` times; every worker calls this with an equal plan.

    Returns the outputs, the bytes that all workers moved in the last run, and the slowest worker's seconds of each run,
    without loading the inputs.
    """
    tiled, seconds = TiledRun(plan, worker), []
    tiled.load()
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        with CountedCollectives() as counted:
            outputs = tiled.run()
        slowest = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    totals = torch.tensor([counted.moved.logical, counted.moved.wire])
    dist.all_reduce(totals)
    logical, wire = totals.tolist()
    return outputs, Moved(logical, wire), seconds


class TiledRun:
    """One worker's part of a plan, and the tiles that it holds."""

    def __init__(self, plan: TilingPlan, worker: Worker) -> None:
        self.plan, self.graph, self.worker, self.mesh = plan, plan.graph, worker, plan.graph.mesh
        self.held: dict[int, dict[Form, np.ndarray]] = {}
        computed = (e for e in plan.graph.expressions if not isinstance(e.operator, NewArray | View))
        self.steps = {id(e): plan.steps(e) for e in computed}

    def load(self) -> None:
        """Load this worker's tiles of the inputs. Raises ValueError if an input has no data."""
        for expression in self.graph.expressions:
            if isinstance(expression.operator, NewArray):
                data = expression.operator.data
                if data is None:
                    what = expression.name or expression.shape
                    raise ValueError(f"array {what} has no data; pass an array to newarray")
                self.held[id(expression)] = {
                    form: np.array(data[index_of(self._bounds(expression, form)[self.worker.rank])])
                    for form in self.plan.tiling(expression).forms
                }

    def run(self) -> list[TiledArray]:
        """Compute the outputs; the inputs stay loaded."""
        last = {id(e): by for by in self.graph.expressions for e in by.inputs}
        kept = {
            id(e) for e in self.graph.expressions if isinstance(e.operator, NewArray) or e in self.graph.outputs
        }
        for expression in self.graph.expressions:
            if not isinstance(expression.operator, NewArray):
                self.held[id(expression)] = self._tiles(expression)
            for source in expression.inputs:
                if last[id(source)] is expression and id(source) not in kept:
                    self.held.pop(id(source), None)
        return [self._result(output) for output in self.graph.outputs]

    def _tiles(self, expression: Expression) -> dict[Form, np.ndarray]:
        """Compute an expression in every form that is kept."""
        if isinstance(expression.operator, View):
            axes = expression.operator.axes
            tiles = self.held[id(expression.inputs[0])]
            return {in_view(form, axes): viewed(tile, axes) for form, tile in tiles.items()}
        tiles = {}
        for step in self.steps[id(expression)]:
            result = self._computed(expression, step)
            tiles |= {form: self.converted(result, expression, step.output, form) for form in step.forms}
        return tiles

    def _computed(self, expression: Expression, step: Step) -> np.ndarray:
        """Read the inputs, and compute this worker's tile of the result. Raises ValueError if it has another shape."""
        inputs = [
            self.exchange(self.held[id(source)][exchange.source], exchange)
            for source, exchange in zip(expression.inputs, step.reads, strict=True)
        ]
        tile = self._bounds(expression, step.output)[self.worker.rank]
        shape = tuple((tile[:, 1] - tile[:, 0]).tolist())
        if isinstance(expression.operator, Region):
            result = np.empty(shape, expression.dtype)
            for part, exchange in zip(inputs, step.reads, strict=True):
                place = exchange.wanted()[self.worker.rank] - np.array(exchange.offset)[:, None]
                _part(result, place, tile)[...] = part
            return result
        result = compute(expression, inputs)
        if result.shape != shape:
            called = expression.operator.call.name  # type: ignore[union-attr]
            raise ValueError(f"{called} made a tile of shape {result.shape}, not {shape}, of {expression.shape}")
        return result

    def exchange(self, tile: np.ndarray, exchange: Exchange) -> np.ndarray:
        """Return the part of the source that the target wants: a view if all of it is local, else by an all-to-all."""
        # Nothing to do, or a local view: no collective.
        if exchange.source == exchange.target and exchange.shape == exchange.target_shape:
            return tile
        rank, wanted = self.worker.rank, exchange.wanted()
        held = bounds(exchange.shape, exchange.source, self.mesh)
        if exchanged(exchange) == Moved():
            return _part(tile, wanted[rank], held[rank])
        parts = intersection(wanted[None], held[:, None])  # [sender, receiver, axis, 2]
        parts[..., 1] = np.maximum(parts[..., 0], parts[..., 1])
        # If a part has several copies, the first one is sent, to workers without a copy.
        copies = (held[:, None] == held[None]).all(axis=(2, 3))
        is_sent = np.eye(len(held), dtype=bool) | (
            ~copies & (copies.argmax(axis=1) == np.arange(len(held)))[:, None]
        )
        counts = np.where(is_sent, (parts[..., 1] - parts[..., 0]).prod(axis=-1), 0)
        pieces = [
            _part(tile, parts[rank, to], held[rank]).reshape(-1)[: counts[rank, to]] for to in range(len(held))
        ]
        result = np.empty(tuple(wanted[rank, :, 1] - wanted[rank, :, 0]), tile.dtype)
        for sender, piece in enumerate(all_to_all(pieces, counts[:, rank].tolist())):
            if len(piece):
                place = _part(result, parts[sender, rank], wanted[rank])
                place[...] = piece.reshape(place.shape)
        return result

    def converted(self, tile: np.ndarray, expression: Expression, output: Form, form: Form) -> np.ndarray:
        """Convert a result from form `output` to `form`."""
        if "partial" in output:
            if set(output) == {"partial"} and None not in form:
                return self._scattered(tile, expression, form)
            tile, output = self._reduced(tile, expression, output), whole(output)
        offset, size = (0,) * len(expression.shape), expression.dtype.itemsize
        return self.exchange(
            tile, Exchange(expression.shape, output, expression.shape, form, offset, size, self.mesh)
        )

    def _scattered(self, tile: np.ndarray, expression: Expression, form: Form) -> np.ndarray:
        """Merge partial tiles of the whole array into tiles: a reduce-scatter."""
        whole_array = self._bounds(expression, (None,) * len(form))[0]
        parts = [_part(tile, place, whole_array) for place in self._bounds(expression, form)]
        own, pieces = parts[self.worker.rank], [part.reshape(-1) for part in parts]
        received = all_to_all(pieces, [own.size] * len(parts))
        return combined(expression, np.stack(received)).reshape(own.shape)

    def _reduced(self, tile: np.ndarray, expression: Expression, output: Form) -> np.ndarray:
        """Merge the partial tiles of workers along the partial axes of the mesh: an all-reduce, piece by piece."""
        workers = np.arange(self.graph.workers).reshape(self.mesh)
        rank = self.worker.rank
        place = np.unravel_index(rank, self.mesh)
        group = workers[
            tuple(slice(None) if a == "partial" else p for a, p in zip(output, place, strict=True))
        ].ravel()
        pieces = np.array_split(tile.reshape(-1), len(group))
        own = pieces[int(np.flatnonzero(group == rank)[0])]

        def among(sent: list[np.ndarray], counts: list[int]) -> list[np.ndarray]:
            """Send a piece to each worker of the group, and nothing to others."""
            all_sent, all_counts = [np.empty(0, tile.dtype)] * workers.size, [0] * workers.size
            for worker, piece, count in zip(group, sent, counts, strict=True):
                all_sent[worker], all_counts[worker] = piece, count
            received = all_to_all(all_sent, all_counts)
            return [received[worker] for worker in group]

        own = combined(expression, np.stack(among(pieces, [own.size] * len(group))))
        merged = among([own] * len(group), [piece.size for piece in pieces])
        return np.concatenate(merged).reshape(tile.shape)

    def _bounds(self, expression: Expression, form: Form) -> np.ndarray:
        return bounds(expression.shape, form, self.mesh)

    def _result(self, expression: Expression) -> TiledArray:
        form, tile = next(iter(self.held[id(expression)].items()))
        return TiledArray(tile, expression, form, self)


def all_to_all(pieces: Sequence[np.ndarray], counts: Sequence[int]) -> list[np.ndarray]:
    """Send a flat piece to each worker, and receive `counts` elements from each."""
    sent = np.concatenate(pieces)
    size = sent.itemsize
    moved = funcol.all_to_all_single(
        torch.from_numpy(sent.view(np.uint8)),
        [int(count) * size for count in counts],
        [piece.size * size for piece in pieces],
        dist.group.WORLD,
    )
    received: Tensor = funcol.wait_tensor(moved)  # type: ignore[no-untyped-call]
    return np.split(received.numpy().view(sent.dtype), np.cumsum(counts)[:-1])


def _part(tile: np.ndarray, wanted: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Return the wanted part of a tile as a view; both ranges are [start, end) per axis."""
    return tile[index_of(wanted - held[:, :1])]
