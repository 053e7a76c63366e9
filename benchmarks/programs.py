"""Programs that benchmarks run themselves: a plan's, in memory of its own, and ONNX Runtime's beside it."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial

import torch

from cohabit.planner.graph import aligned
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Result
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.stores.host import Store


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program whose residents are in memory, and its executor."""

    lowered: Lowered
    bucket: Bucket
    program: Program
    executor: CpuExecutor

    def run(self, inputs: Sequence[torch.Tensor] | None = None) -> Result:
        """Run once, by default on example inputs. The next run overwrites the outputs."""
        given = self.lowered.examples(self.bucket) if inputs is None else inputs
        return self.executor.run(self.program, given)

    def settled_run_s(self) -> float:
        """Run once, and wait until its copies have ended, too. Returns the latency in seconds."""
        latency_s = self.run().latency_s
        self.executor.settle()
        return latency_s


@contextmanager
def loaded(
    lowered: Lowered,
    bucket: Bucket,
    plan: Plan,
    profile: Profile | None,
    store: Store,
    backend: CpuBackend | None = None,
) -> Iterator[LoadedProgram]:
    """Load a plan's program into an arena of its own, as large as the plan's memory, with an executor of its own.

    `profile` is None for a plan that copies nothing.
    """
    backend = backend or CpuBackend()
    workspace_bytes = aligned(plan.memory.workspace_bytes, BLOCK_BYTES)
    with backend.arena(workspace_bytes + plan.memory.partition_bytes) as arena, CpuExecutor() as executor:
        bases = Bases(partition=workspace_bytes, workspace=0)
        program = backend.build(lowered, plan, profile, arena, bases, store)
        executor.load(program)
        yield LoadedProgram(lowered, bucket, program, executor)


def onnxruntime_call(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor], threads: int
) -> Callable[[], object]:
    """Export a module to ONNX and return a run of it in ONNX Runtime, on these inputs."""
    import onnxruntime

    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(module, (), kwargs=dict(inputs), dynamo=True, verbose=False)
    assert exported is not None
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = threads, 1
    settings.add_session_config_entry("session.force_spinning_stop", "1")  # not in the next engine's turn
    serialized = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(serialized, settings, providers=["CPUExecutionProvider"])
    given = {port.name: inputs[port.name].numpy() for port in session.get_inputs()}
    return partial(session.run, None, given)
