"""Every construct of the model zoo runs on a CUDA device as it does on the CPU, captured if it can be."""

from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree as pytree

from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.runtime.test_lowering import real_inputs
from tests.support.runtime import models
from tests.support.runtime.backends import BACKENDS
from tests.support.runtime.plans import streaming_plan, with_room

MIB = 1 << 20
ROOM_BYTES = 64 * MIB
"""Beside the plan's own workspace, for what torch's allocator takes on a device on which nothing was measured."""
NOT_CAPTURED = {"scalar": "reads a number on the host", "branch": "chooses what to run by values"}


@pytest.mark.parametrize("make_backend", [p for p in BACKENDS if p.id in ("fake-cuda", "cuda")])
@pytest.mark.parametrize("name", models.CASES)
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_every_construct_equals_eager_and_has_the_same_bits_at_every_budget(
    name: str, make_backend: Callable[[], Backend], constructs: dict[str, Lowered]
) -> None:
    lowered, inputs = constructs[name], real_inputs(models.CASES[name][1], 4)
    with torch.no_grad():
        expected = pytree.tree_leaves(models.made(name)(**{k: v.clone() for k, v in inputs.items()}))
    backend = make_backend()
    store = backend.open_store("ram", lowered.weights_path, lowered.manifest)
    outputs = []
    for plan in (resident_plan(lowered.graphs[Bucket(4)]), streaming_plan(lowered.graphs[Bucket(4)])):
        roomy = with_room(plan, ROOM_BYTES)
        arena = backend.arena(roomy.memory.nbytes)
        program = backend.build(lowered, roomy, None, arena, Bases(0, plan.memory.partition_bytes), store)
        backend.executor.load(program)
        refused = program.admission.refused
        assert (program.admission.graph is None) == (refused is not None)
        assert refused is None if name not in NOT_CAPTURED else NOT_CAPTURED[name] in refused
        for _ in range(3):
            copies = [inputs[p.name].clone() for p in lowered.inputs]
            results = backend.executor.run(program, copies).outputs
        outputs.append(results)
    backend.close()
    store.close()
    for want, kept, swapped in zip(expected, *outputs, strict=True):
        torch.testing.assert_close(kept, want, atol=1e-4 * float(want.abs().max()), rtol=0)
        assert torch.equal(kept, swapped), "the same bits at every budget"
