"""A Cohabit server for the length of a `with` block, in tests and notebooks: `cohabit.Server`."""

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
"""Seconds that a start may take: models that the cache lacks are measured first."""
_PORTS = ("--http-port", "0", "--grpc-port", "off", "--metrics-port", "off")


class Server:
    """`cohabit serve` as a process of its own, which is ready inside the `with` block and stopped after it.

        with cohabit.Server("models", "64MiB") as server:
            scores = server.infer("scorer", features=features)["score"]

    Its HTTP port is one that is free. `client` is tritonclient's, for everything else.
    """

    def __init__(
        self, repository: str | Path, memory: str, *flags: str, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """`flags` are further ones of `cohabit serve`; ports among them replace ours."""
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
            """Of the HTTP port."""
        except BaseException:  # also an interrupt
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
        """Return a model's outputs by name, for inputs by name.

        The shapes are those of the model's metadata, [batch, ...] where it is batched. Numbers are converted to the
        input's datatype where that loses no more than a float's last digits. Raises
        `tritonclient.utils.InferenceServerException`, which has the server's words.
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
        """Return the datatypes of a model's inputs by name."""
        if model not in self._known_datatypes:
            metadata = self.client.get_model_metadata(model)
            self._known_datatypes[model] = {given["name"]: given["datatype"] for given in metadata["inputs"]}
        return self._known_datatypes[model]

    def _run(self) -> None:
        """Run the process on an event loop of its own: a notebook has one in the main thread."""
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._serving = self._loop.create_task(self._serve())
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._serving)

    async def _serve(self) -> None:
        try:
            async with running_server(self._command, self._start_timeout_s) as url:
                self._ready.set_result(url)
                await asyncio.Event().wait()  # until it is cancelled
        except Exception as error:
            self._ready.set_exception(error)

    def _stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()


def _converted(array: NDArray[Any], datatype: str | None) -> NDArray[Any]:
    """Return an array in a datatype if its numbers are of that kind and in its range, and else as it is."""
    values = np.asarray(array)
    wanted = None if datatype is None else triton_to_np_dtype(datatype)
    if wanted is None or values.dtype == wanted or values.dtype.kind not in "iuf":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        made = values.astype(wanted)
    is_kept = np.array_equal(np.isfinite(made), np.isfinite(values)) if made.dtype.kind == "f" else True
    if values.dtype.kind == "f" and made.dtype.kind == "f":
        return made if is_kept else values
    return made if made.dtype.kind in "iuf" and np.array_equal(made, values) else values
