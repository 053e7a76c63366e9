"""Interface of a loaded model."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cohabit.planner.shapes import Bucket
from cohabit.server.ipc.model import GraphCapture, Inputs, ModelInfo
from cohabit.server.ipc.request import Answer

if TYPE_CHECKING:
    from cohabit.runtime.recording import OnRecording


class Servable(Protocol):
    @property
    def info(self) -> ModelInfo: ...

    @property
    def predicted_s(self) -> Mapping[Bucket, float]:
        """Predicted seconds of one execution in each planned bucket."""
        ...

    @property
    def recovery_s(self) -> float:
        """Seconds lost directly after an execution of the same model, while its residents are still copied back."""
        ...

    @property
    def lost(self) -> str | None:
        """Why the device can no longer execute, or None while it works."""
        ...

    @property
    def captures(self) -> Mapping[Bucket, GraphCapture]:
        """How executions are issued on a device with graphs, by bucket. Any thread."""
        ...

    def foresee(self, inputs: Inputs, rows: int) -> None:
        """Note that rows like these are expected to be executed next, after the next execution of any model.

        Compute lane's thread.
        """
        ...

    def launches_ahead(self, inputs: Inputs, rows: int) -> bool:
        """Whether `begin` would return while the device executes these rows, after what it executes now.

        Compute lane's thread.
        """
        ...

    def begin(
        self, requests: Sequence[Inputs], rows: int, on_recording: "OnRecording | None" = None
    ) -> Answer | Callable[[], Answer]:
        """Begin one execution, on the compute lane's thread. `on_recording` receives the spans of the device's lanes.

        Returns the answer or, if the device goes on by itself, a function that waits for it.

        Every request has every input. Their rows are concatenated along the first dimension and add up to `rows`;
        without a batch (`max_batch_size` is 0) there is one request, and `rows` is 1. Inputs are little-endian, may be
        unaligned, must not be written to, and are valid until there is an answer or an error. BF16 arrays are uint16,
        also for outputs. The answer has all rows and the execution's cost. Its arrays belong to the caller.

        Raises InvalidRequest for values that the model cannot take. Any other exception fails this request alone.
        """
        ...

    def execute(self, requests: Sequence[Inputs], rows: int, on_recording: "OnRecording | None" = None) -> Answer:
        """Begin an execution, and wait for it."""
        ...
