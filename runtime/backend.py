"""What a device has to offer: memory, host stores that feed it, an executor. `runtime.devices` opens one by its name.

Everything else of the runtime (lowering, binding, plans) is the same for all devices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from planner.plan import Plan
from planner.profile import Profile
from planner.timeline import Timeline
from runtime.binding.program import Bases, Program
from runtime.captures import Capture
from runtime.lowering.lower import Lowered
from runtime.lowering.weights import Manifest
from runtime.memory import Memory, Source, StoreKind
from runtime.recording import Follow
from runtime.shared_region.moving import Movable

OnProgress = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """What an inference gave: outputs in the program's order (CPU tensors that nobody else holds), and its cost."""

    outputs: list[torch.Tensor]
    latency_s: float
    stall_s: float
    link_bytes: int
    timeline: Timeline | None = None
    prefetched: bool = False
    """Whether the leading copies had begun beside the run before."""


class Runner(Protocol):
    """Runs programs one at a time. Every method is called by the one thread that owns the device."""

    changes_threads: bool
    """Whether the thread that owns the device may be another one between two runs."""

    @property
    def lost(self) -> str | None:
        """Why nothing can run any more, or None while the device is well."""
        ...

    def expect(self, program: Program | None, *, followed: bool = False) -> None:
        """Say what runs behind the next run, so that its leading copies may start beside that one.

        `followed` says that its run will probably be given a `follow`.
        """
        ...

    def expect_behind(self, program: Program, *, followed: bool = False) -> None:
        """Say what runs behind the run under way, if one is, where that was not known when it began. Any thread."""
        ...

    def run(
        self,
        program: Program,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        follow: Follow | None = None,
        serial: bool = False,
    ) -> Result:
        """Run one inference on CPU tensors of the program's exact shapes, which may be changed.

        `traced` measures the time of every step and waits for the last; `follow` gets what the lanes did without
        changing it, some time after the last copy has ended, and perhaps in pieces. A device that replays graphs
        knows no times of steps then. `serial` lets no copy overlap with computation. Raises DeviceError if a kernel
        or a copy fails: the program can be run again, unless the device is `lost`.
        """
        ...

    def capture(self, program: Program) -> Capture | None:
        """How a program is issued; None on devices without graphs, and before it is loaded. Any thread."""
        ...


class Executor(Runner, Protocol):
    """A device's own runner: it also brings residents in, and gives back what programs hold."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self) -> None: ...

    def close(self) -> None:
        """Let the lanes finish what they have, and end."""
        ...

    def load(self, program: Program, *, follow: Follow | None = None) -> float:
        """Put a program's initial residents in place and wait for them. Returns the seconds. Raises DeviceError.

        `follow` gets a recording of the copies, where the device knows their times.
        """
        ...

    def dismiss(self, program: Program) -> None:
        """Give back what a program holds that will not be run any more."""
        ...

    def settle(self) -> None:
        """Wait until the swap-in lane has nothing left to do."""
        ...


class Backend(Protocol):
    """One device. Memory, stores and programs of one backend work with one another alone."""

    @property
    def name(self) -> str:
        """The device as profiles and people call it."""
        ...

    def arena(self, nbytes: int) -> Memory[Any]:
        """Take this much device memory. Raises MemoryExceeded."""
        ...

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> Source[Any]:
        """A model's parameters in host memory, or in their file."""
        ...

    @property
    def executor(self) -> Executor:
        """That of the first compute lane."""
        ...

    def executors(self, count: int) -> Sequence[Executor]:
        """One per compute lane, each for a thread of its own and programs with a workspace of their own."""
        ...

    def measure(
        self, lowered: Lowered, store: Source[Any], cache: Path | None, on_progress: OnProgress
    ) -> tuple[Lowered, dict[int, Profile]]:
        """What the model needs and takes on this device: its graphs with the scratch that kernels take here,
        and profiles by batch size. From the cache where that was measured before."""
        ...

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[Any],
        bases: Bases,
        store: Source[Any],
    ) -> Program:
        """Check a plan and bind it. Raises InvalidPlan, FingerprintMismatch, MemoryExceeded or UnsupportedPlan."""
        ...

    def movable(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: Memory[Any],
        bases: Bases,
        store: Source[Any],
    ) -> Movable:
        """Check a plan that keeps every parameter, and bind it to no place of the partition. Raises as `build`."""
        ...

    def close(self) -> None: ...
