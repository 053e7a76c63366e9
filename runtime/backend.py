"""The interface of a device: memory, host stores, programs and executors. `runtime.devices` opens one by name.

The rest of the runtime (lowering, binding, plans) is the same for all devices. A device takes the
programs that it built.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from cohabit.planner.plan import Plan, Timeline
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.weights import Manifest
from cohabit.runtime.memory import DeviceArena, HostStore, StoreKind
from cohabit.runtime.recording import OnRecording
from cohabit.runtime.stores.pinned import PinnedMemory

OnProgress = Callable[[str], None]


@dataclass(slots=True)
class Result:
    """Outputs of an inference in the program's order (CPU tensors that belong to the caller), and its cost."""

    outputs: list[torch.Tensor]
    latency_s: float
    stall_s: float
    link_bytes: int
    timeline: Timeline | None = None
    device_s: float | None = None
    """Part of the latency spent on a separate device, from the copies of inputs to those of outputs; None if the host
    computes."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Capture state of one program or several on a device with graphs: their size, or why there are none."""

    graphs: int
    graph_bytes: int
    """Device memory of the graphs outside of the arena, as the driver reports it."""
    refused: str | None
    """Why kernels and copies are issued one by one; None if they are captured."""


class Runner(Protocol):
    """Runs programs one at a time. Methods belong to the thread that owns the device, unless stated otherwise.

    The defaults are those of a device that computes in the calling thread.
    """

    @property
    def lost(self) -> str | None:
        """Why the device is lost; None while it works."""
        ...

    def foresee(self, program: Any) -> None:
        """Note that a program is expected to run after the next one, so that its copies may begin meanwhile.

        Not needed where residents are loaded: plans swap in to the workspace, which the running program uses.
        """
        return

    def run(
        self,
        program: Any,
        inputs: Sequence[torch.Tensor],
        *,
        traced: bool = False,
        on_recording: OnRecording | None = None,
    ) -> Result:
        """Run one inference on CPU tensors of the program's exact shapes, which may be overwritten.

        `traced` measures every step and waits for the last. `on_recording` receives a recording of the lanes without
        slowing them, some time after the last copy, and perhaps in parts. A device that replays graphs records only the
        whole inference, unless it is `traced`. Raises DeviceError if a kernel or a copy fails. The program can then be
        run again, unless the device is `lost`.
        """
        ...

    def launches_ahead(self, program: Any) -> bool:
        """Whether `begin` would launch a program now, while the one that was begun before executes."""
        return False

    def begin(
        self, program: Any, inputs: Sequence[torch.Tensor], *, on_recording: OnRecording | None = None
    ) -> Result | Callable[[], Result]:
        """Begin an inference as `run` does it. Returns its result if the inference has ended.

        Otherwise the device goes on with it: the returned function waits for the result, and raises as `run` does. The
        inputs may be overwritten at once. Another program can be begun before that call if it `launches_ahead`. Every
        other method first waits for what was begun.
        """
        return self.run(program, inputs, on_recording=on_recording)

    def capture(self, program: Any) -> Capture | None:
        """Return how a program is issued; None on devices without graphs, and before it is loaded. Any thread."""
        return None


class Executor(Runner, Protocol):
    """A compute lane of a device, which also loads initial residents and releases programs' resources."""

    @property
    def swap_busy_s(self) -> float | None:
        """Seconds that the swap-in lane has spent copying since the start; None if not measured."""
        ...

    def load(self, program: Any, *, on_recording: OnRecording | None = None) -> float:
        """Copy a program's initial residents in and wait for them. Returns the seconds. Raises DeviceError.

        `on_recording` receives a recording of the copies, if the device knows their times.
        """
        ...

    def begin_load(self, program: Any) -> Callable[[], float]:
        """Begin to copy a program's initial residents in, while other programs run. Their bytes must be free.

        The returned function waits for them, returns the seconds that it waited, and raises DeviceError. It must be
        called before the program is run or loaded. A device may make all copies in that call.
        """
        return partial(self.load, program)

    def load_in_pieces(self, programs: Sequence[Any], *, in_place: bool = False) -> Iterator[None]:
        """Load programs of one model, which share their residents; each step of the iterator loads one piece.

        Other programs may run between two pieces. With `in_place`, a model of the same family is loaded: runs exchange
        the residents that differ, so that none need be copied here. Raises DeviceError.
        """
        ...

    def invalidate(self, program: Any) -> None:
        """Mark a model's residents as missing: its next run loads them first."""
        ...

    def release(self, program: Any) -> None:
        """Release a program's resources; it will not run again."""
        ...

    def settle(self) -> None:
        """Wait until the swap-in lane is idle."""
        ...


class Backend(Protocol):
    """One device. Its memory, stores and programs only work with each other."""

    name: str
    """The device's name in profiles and output."""
    pinned_memory: PinnedMemory | None = None
    """The use of pinned host memory; None on devices without it."""

    @property
    def outside_bytes(self) -> int | None:
        """Device memory of the process outside of arenas, as of the last load; None if there is none."""
        return None

    def arena(self, nbytes: int) -> DeviceArena[Any]:
        """Allocate device memory. Raises MemoryExceeded."""
        ...

    def open_store(self, kind: StoreKind, path: Path, manifest: Manifest) -> HostStore[Any]:
        """Open a model's parameters, in host memory or in their file."""
        ...

    @property
    def executor(self) -> Executor:
        """The executor of the first compute lane."""
        return self.executors(1)[0]

    def executors(self, count: int) -> Sequence[Executor]:
        """Return one executor per compute lane. Each is for one thread, and for programs with a separate workspace."""
        ...

    def measure(
        self,
        lowered: Lowered,
        store: HostStore[Any],
        cache: Path | None,
        on_progress: OnProgress,
        *,
        quick: bool = False,
        known_only: bool = False,
    ) -> tuple[Lowered, dict[Bucket, Profile]]:
        """Return the model with the scratch sizes of kernels on this device, and its profiles by bucket.

        Earlier measurements are read from the cache. With `quick`, profiles may be provisional. With `known_only`,
        nothing is measured, and NotCached is raised if the cache lacks any.
        """
        ...

    def build(
        self,
        lowered: Lowered,
        plan: Plan,
        profile: Profile | None,
        arena: DeviceArena[Any],
        bases: Bases,
        store: HostStore[Any],
    ) -> Program:
        """Check a plan and bind it. Any thread.

        Raises InvalidPlan, FingerprintMismatch, MemoryExceeded or UnsupportedPlan.
        """
        ...

    def close(self) -> None: ...


class SharedLayout(Runner, Protocol):
    """Runs programs of models that share one region of the arena, instead of a partition each."""

    def add(self, lowered: Lowered, plan: Plan, profile: Profile | None, store: HostStore[Any]) -> Program:
        """Prepare a plan that keeps every parameter, and return the program to run.

        Raises MemoryExceeded if it can never run here, and the errors of `Backend.build`.
        """
        ...


OpenLayout = Callable[[Backend, DeviceArena[Any], int, int], SharedLayout]
"""Opens a layout in an arena: called with the bytes of the workspace at its start and of the region after it."""
