"""A CUDA device as a backend: it can also measure models on itself."""

from pathlib import Path

import torch

from planner.profile import Profile
from runtime.backend import OnProgress
from runtime.cuda.device import CudaDevice
from runtime.cuda.profiling.measure import measured
from runtime.lowering.lower import Lowered
from runtime.memory import Source


class CudaBackend(CudaDevice):
    """What `runtime.backend.Backend` asks for."""

    def measure(
        self, lowered: Lowered, store: Source[torch.Tensor], cache: Path | None, on_progress: OnProgress
    ) -> tuple[Lowered, dict[int, Profile]]:
        return measured(self, lowered, store, cache, on_progress)
