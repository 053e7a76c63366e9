"""`cohabit.Server`: runs a Cohabit server during a `with` block, for tests and notebooks."""

import asyncio
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import tritonclient.http as triton
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server

START_TIMEOUT_S: Final = 600.0
"""Maximum seconds for a start, which measures models missing from the cache."""
_PORTS = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "off")


class Server:
    """Runs `cohabit serve` in a separate process, ready inside the `with` block and stopped after it.

        with cohabit.Server("models", "64MiB") as server:
            scores = server.infer("scorer", features=features)["score"]

    The server listens on a free HTTP port. For other requests, use `client`, a tritonclient.
    """

    def __init__(
        self, repository: str | Path, memory: str, *flags: str, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """`flags` are further flags of `cohabit serve`; ports among them replace the defaults."""
        self._command = [sys.executable, "-m", "cohabit.server.cli", "serve", str(repository)]
        self._command += ["--memory", memory, *_PORTS, *flags]
        self._start_timeout_s = start_timeout_s
        self._ready: Future[str] = Future()
        self._known_datatypes: dict[str, dict[str, str]] = {}
        self._thread = threading.Thread(target=self._run, name="cohabit-server", daemon=True)

    def __enter__(self) -> Self:
        """Wait until all models are served. Raises `cohabit.loadgen.errors.ServerFailed` with the end of the log."""
        self._thread.start()
        try:
            self.url: str = self._ready.result()
            """URL of the HTTP port."""
        except BaseException:  # also on an interrupt
            self._stop()
            raise
        self.client: triton.InferenceServerClient = triton.InferenceServerClient(address_of(self.url))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._stop()

    def infer(self, model: str, **inputs: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Return a model's outputs by name, given its inputs by name.

        Shapes are those of the model's metadata: [batch, ...] if the model is batched. Numbers are converted to the
        input's datatype if that loses at most a float's last digits. Raises
        `tritonclient.utils.InferenceServerException` with the server's message.
        """
        sent = []
        for name, array in inputs.items():
            values = np.ascontiguousarray(_converted(array, self._datatypes(model).get(name)))
            sent.append(triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)))
            sent[-1].set_data_from_numpy(values)
        try:
            answer = self.client.infer(model, sent)
        except InferenceServerException:
            self._known_datatypes.pop(model, None)  # another version may have been loaded
            raise
        return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}

    def _datatypes(self, model: str) -> dict[str, str]:
        if model not in self._known_datatypes:
            metadata = self.client.get_model_metadata(model)
            self._known_datatypes[model] = {given["name"]: given["datatype"] for given in metadata["inputs"]}
        return self._known_datatypes[model]

    def _run(self) -> None:
        """Run the process on a separate event loop: a notebook runs one in the main thread."""
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._serving = self._loop.create_task(self._serve())
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        try:
            async with running_server(self._command, self._start_timeout_s) as url:
                self._ready.set_result(url)
                await asyncio.Event().wait()  # until cancelled
        except Exception as error:
            self._ready.set_exception(error)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()


def _converted(array: NDArray[Any], datatype: str | None) -> NDArray[Any]:
    """Encode texts, and convert numbers to `datatype` if only a float's last digits are lost."""
    values = np.asarray(array)
    wanted = None if datatype is None else triton_to_np_dtype(datatype)
    if values.dtype.kind == "U":
        values = np.char.encode(values, "utf-8").astype(np.object_)
    if wanted is None or values.dtype == wanted or values.dtype.kind not in "iuf":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(wanted)
    is_kept = np.array_equal(np.isfinite(made), np.isfinite(values)) if made.dtype.kind == "f" else True
    if values.dtype.kind == "f" and made.dtype.kind == "f":
        return made if is_kept else values
    return made if made.dtype.kind in "iuf" and np.array_equal(made, values) else values
