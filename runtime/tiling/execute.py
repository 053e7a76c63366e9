"""Executes a tiled program: one worker's part, tile by tile.

Maps, folds and joins compute on local tiles. Partial results are DTensors, which DTensor reduces. Other changes of a
tiling are one all-to-all of the bytes that each worker lacks. DTensor would go axis by axis of the mesh, and with gloo
would gather the whole array (torch 2.13).
"""

import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cohabit.planner.tiling.arrays import Expression, Fold, NewArray, Region, View
from cohabit.planner.tiling.costs import Exchange, Form, Moved, bounds, exchanged, flattened, intersection, whole
from cohabit.planner.tiling.graph import in_view
from cohabit.planner.tiling.search import Step, TilingPlan
from cohabit.runtime.tiling.counting import CountedCollectives
from cohabit.runtime.tiling.kernels import compute, torch_dtype
from cohabit.runtime.tiling.worker import Worker


def measured(plan: TilingPlan, worker: Worker, repeats: int = 1) -> tuple[list[DTensor], Moved, list[float]]:
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
        if worker.device.type == "cuda":
            torch.cuda.synchronize()
        slowest = torch.tensor(time.perf_counter() - begin, device=worker.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(float(slowest))
    totals = torch.tensor([counted.moved.logical, counted.moved.wire], device=worker.device)
    dist.all_reduce(totals)
    logical, wire = totals.tolist()
    return outputs, Moved(logical, wire), seconds


class TiledRun:
    """One worker's part of a plan, and the tiles that it holds."""

    def __init__(self, plan: TilingPlan, worker: Worker) -> None:
        self.plan, self.graph, self.worker, self.mesh = plan, plan.graph, worker, plan.graph.mesh
        self.held: dict[int, dict[Form, Tensor]] = {}
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
                    form: torch.from_numpy(np.array(data[self._slices(expression, form)])).to(self.worker.device)
                    for form in self.plan.tiling(expression).forms
                }

    def run(self) -> list[DTensor]:
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

    def _tiles(self, expression: Expression) -> dict[Form, Tensor]:
        """Compute an expression in every form that is kept."""
        if isinstance(expression.operator, View):
            axes = expression.operator.axes
            tiles = self.held[id(expression.inputs[0])]
            return {in_view(form, axes): viewed(tile, axes) for form, tile in tiles.items()}
        tiles = {}
        for step in self.steps[id(expression)]:
            result = self._computed(expression, step)
            tiles |= {form: self._stored(result, expression, step.output, form) for form in step.forms}
        return tiles

    def _computed(self, expression: Expression, step: Step) -> Tensor:
        """Read the inputs, and compute this worker's tile of the result."""
        inputs = [
            self.exchange(self.held[id(source)][exchange.source], exchange)
            for source, exchange in zip(expression.inputs, step.reads, strict=True)
        ]
        if not isinstance(expression.operator, Region):
            return compute(expression, inputs)
        tile = bounds(expression.shape, step.output, self.mesh)[self.worker.rank]
        result = inputs[0].new_empty(tuple(tile[:, 1] - tile[:, 0]), dtype=torch_dtype(expression.dtype))
        for part, exchange in zip(inputs, step.reads, strict=True):
            place = exchange.wanted()[self.worker.rank] - np.array(exchange.offset)[:, None]
            _part(result, place, tile).copy_(part)
        return result

    def exchange(self, tile: Tensor, exchange: Exchange) -> Tensor:
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
        # Flat pieces, since all-to-all splits one axis only; the received ones are copied into their places.
        pieces = [
            _part(tile, parts[rank, to], held[rank]).reshape(-1)[: counts[rank, to]] for to in range(len(held))
        ]
        moved = funcol.all_to_all_single(
            torch.cat(pieces), counts[:, rank].tolist(), counts[rank].tolist(), self.worker.flat.get_group()
        )
        received: Tensor = funcol.wait_tensor(moved)  # type: ignore[no-untyped-call]
        result = tile.new_empty(tuple(wanted[rank, :, 1] - wanted[rank, :, 0]))
        for sender, piece in enumerate(torch.split(received, counts[:, rank].tolist())):
            if len(piece):
                place = _part(result, parts[sender, rank], wanted[rank])
                place.copy_(piece.reshape(place.shape))
        return result

    def _stored(self, tile: Tensor, expression: Expression, output: Form, form: Form) -> Tensor:
        """Convert a result from form `output` to `form`."""
        if "partial" in output:
            kind = expression.operator.partial if isinstance(expression.operator, Fold) else "sum"
            tile, output = self._reduced(tile, expression.shape, output, form, kind or "sum")
        if output == form:
            return tile
        offset, size = (0,) * len(expression.shape), expression.dtype.itemsize
        return self.exchange(
            tile, Exchange(expression.shape, output, expression.shape, form, offset, size, self.mesh)
        )

    def _reduced(
        self, tile: Tensor, shape: tuple[int, ...], output: Form, form: Form, kind: str
    ) -> tuple[Tensor, Form]:
        """Reduce partial tiles: by reduce-scatter if the target is split along the whole mesh, else by all-reduce."""
        target = form if set(output) == {"partial"} and None not in form else whole(output)
        partial = self._dtensor(tile.contiguous(), output if len(set(target)) > 1 else ("partial",), shape, kind)
        placed = placements(flattened(target, self.mesh)[0])
        return partial.redistribute(partial.device_mesh, placed).to_local(), target

    def _result(self, expression: Expression) -> DTensor:
        form, tile = next(iter(self.held[id(expression)].items()))
        return self._dtensor(tile, flattened(form, self.mesh)[0], expression.shape)

    def _slices(self, expression: Expression, form: Form) -> tuple[slice, ...]:
        return tuple(
            slice(first, end) for first, end in bounds(expression.shape, form, self.mesh)[self.worker.rank]
        )

    def _dtensor(self, tile: Tensor, form: Form, shape: tuple[int, ...], kind: str = "sum") -> DTensor:
        mesh = self.worker.flat if len(form) == 1 else self.worker.grid
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            tile, mesh, placements(form, kind), run_check=False, shape=torch.Size(shape), stride=stride
        )


def placements(form: Form, kind: str = "sum") -> list[Placement]:
    """Return DTensor's placements for a form."""
    return [Partial(kind) if a == "partial" else Replicate() if a is None else Shard(a) for a in form]


def _part(tile: Tensor, wanted: np.ndarray, held: np.ndarray) -> Tensor:
    """Return the wanted part of a tile as a view; both ranges are [start, end) per axis."""
    return tile[
        tuple(slice(int(a - first), int(b - first)) for (a, b), (first, _) in zip(wanted, held, strict=True))
    ]


def viewed(tile: Tensor, axes: tuple[int | None, ...]) -> Tensor:
    kept = [a for a in axes if a is not None]
    dropped = [a for a in range(tile.ndim) if a not in kept]
    tile = tile.permute(*kept, *dropped).reshape([tile.shape[a] for a in kept]) if tile.ndim else tile
    return tile[tuple(None if a is None else slice(None) for a in axes)]
