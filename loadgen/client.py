"""Triton client: HTTP with binary tensors, or gRPC, by the URL's scheme."""

import itertools
import os
import resource
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, shared_memory

from cohabit.loadgen.arrivals import RequestArrival, TextSize
from cohabit.loadgen.errors import ServerFailed, UsageError
from cohabit.loadgen.inputs import InputTensor, RequestInputs, file_of, id_bound, random_tensors, read_requests
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import RequestFailed, Send, TokenTimes
from cohabit.loadgen.texts import TextModel, TextSender

_UNREACHABLE = (aiohttp.ClientError, OSError)
_SCHEMES = ("http", "https", "grpc", "grpcs")

DISTINCT_REQUESTS = 16
"""Number of requests prepared per model and sent in turn, if batches are drawn or rows are read from a file."""

_MAX_ID_GRPC = 1
"""Maximum of drawn integers: gRPC's metadata has no ranges, and the smallest embedding tables have two rows."""

WRONG_ANSWER = "wrong answer"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Bearer token, and certificates to verify the server."""

    token: str | None = None
    ca: Path | None = None
    """CA certificates to verify the server's certificate; None for the system's."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.token is None else {"authorization": f"Bearer {self.token}"}


def address_of(url: str) -> str:
    """Return an address in tritonclient's form: 127.0.0.1:8000 for `http://127.0.0.1:8000/`."""
    scheme, separator, address = url.partition("://")
    if separator and scheme not in _SCHEMES:
        raise UsageError(f"--url {url}: its scheme is none of {', '.join(_SCHEMES)}")
    return (address if separator else url).rstrip("/")


class Client:
    """Client of one server over HTTP or gRPC. Returns answers in the form of KServe's JSON."""

    def __init__(self, url: str, max_in_flight: int, timeout_s: float, credentials: Credentials) -> None:
        self.url = url
        scheme, address = url.partition("://")[0] if "://" in url else "http", address_of(url)
        self._credentials = credentials
        self._context = _tls_context(credentials.ca) if scheme == "https" else None
        self._plain_url = f"{scheme}://{address}"
        self._own: ModuleType
        if scheme.startswith("grpc"):
            from tritonclient import grpc
            from tritonclient.grpc import aio

            self._own = grpc
            self._client = aio.InferenceServerClient(
                address,
                ssl=scheme == "grpcs",
                root_certificates=None if credentials.ca is None else str(credentials.ca),
            )
            self._as_json, self._timeout = {"as_json": True}, {"client_timeout": timeout_s}
        else:
            self._own = tritonclient.http
            self._client = tritonclient.http.aio.InferenceServerClient(
                address, conn_limit=max_in_flight, conn_timeout=timeout_s, ssl=scheme == "https",
                ssl_context=self._context,
            )  # fmt: skip
            self._as_json, self._timeout = {}, {}
        self._sessions: list[aiohttp.ClientSession] = []
        """Sessions for texts, open until `close`."""
        self._max_in_flight, self._timeout_s = max_in_flight, timeout_s
        self._with_sequences: set[str] = set()
        """Models that require sequences: each request is sent as a separate sequence."""
        self._regions: list[shared_memory.SharedMemoryRegion] = []
        """Shared memory with inputs, registered with the server until `close`."""

    @property
    def is_grpc(self) -> bool:
        return bool(self._as_json)

    async def close(self) -> None:
        for region in self._regions:
            with suppress(InferenceServerException, *_UNREACHABLE, TimeoutError):
                name = region._triton_shm_name
                await self._client.unregister_system_shared_memory(name, headers=self._credentials.headers)
            shared_memory.destroy_shared_memory_region(region)
        self._regions.clear()
        for session in self._sessions:
            await session.close()
        await self._client.close()

    async def ready_models(self) -> list[str]:
        """Return the names of the server's ready models, sorted."""
        call = self._client.get_model_repository_index(headers=self._credentials.headers, **self._as_json)
        index = await self._answer(call, "does not list its models; name them with --model")
        entries = index.get("models", []) if self.is_grpc else index
        return sorted({entry["name"] for entry in entries if entry.get("state") == "READY"})

    async def metadata(self, model: str) -> dict[str, Any]:
        """Return the server's description of a model's inputs and outputs."""
        call = self._client.get_model_metadata(model, headers=self._credentials.headers, **self._as_json)
        metadata: dict[str, Any] = await self._answer(call, f"has no model {model!r}")
        return metadata

    async def learn_sequences(self, model: str) -> None:
        """Find out whether a model requires sequences. Call before its first request."""
        try:
            config = await self._client.get_model_config(model, headers=self._credentials.headers, **self._as_json)
        except (InferenceServerException, *_UNREACHABLE, TimeoutError, ValueError):
            return  # plain KServe has neither this endpoint nor sequences
        if "sequence_batching" in (config["config"] if self.is_grpc else config):
            self._with_sequences.add(model)

    def generates(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a model generates texts, judging by its metadata and `learn_sequences`."""
        names = [[tensor["name"] for tensor in metadata[side]] for side in ("inputs", "outputs")]
        return names == [["input_ids"], ["logits"]] and metadata["name"] in self._with_sequences

    def texts(self, seed: int) -> TextSender:
        """Return a sender of texts, usable until `close`. Raises UsageError for gRPC, which has no texts."""
        if self.is_grpc:
            raise UsageError(f"--texts are sent over HTTP, and --url is {self.url}")
        self._sessions.append(
            aiohttp.ClientSession(
                headers=self._credentials.headers,
                timeout=aiohttp.ClientTimeout(self._timeout_s),
                connector=aiohttp.TCPConnector(limit=self._max_in_flight, ssl=self._context or True),
            )
        )
        return TextSender(self._sessions[-1], self._plain_url, seed)

    async def statistics(self) -> list[dict[str, Any]]:
        """Return Triton's statistics of all models; empty if the server keeps none."""
        try:
            call = self._client.get_inference_statistics(headers=self._credentials.headers, **self._as_json)
            found: list[dict[str, Any]] = (await call).get("model_stats", [])
        except (InferenceServerException, *_UNREACHABLE, TimeoutError, ValueError):
            return []
        return found

    async def metrics(self) -> str:
        """Return the metrics in Prometheus' text format; empty if the requests' port does not have them."""
        if self.is_grpc:
            return ""
        try:
            async with (
                aiohttp.ClientSession(headers=self._credentials.headers) as session,
                session.get(f"{self._plain_url}/metrics", ssl=self._context or True) as answer,
            ):
                return await answer.text() if answer.status == 200 else ""
        except (*_UNREACHABLE, TimeoutError, ValueError):
            return ""

    def request(self, given: RequestInputs) -> "PreparedRequest":
        """Serialise a request's inputs for this protocol."""
        inputs = []
        for tensor in given.inputs:
            inputs.append(self._input(tensor))
            inputs[-1].set_data_from_numpy(tensor.values)
        return PreparedRequest(inputs, given.expected)

    async def requests_in_shared_memory(
        self, model: str, requests: Sequence[RequestInputs]
    ) -> "list[PreparedRequest]":
        """Put the inputs of a model's requests into one shared memory region, which the server reads.

        Raises UsageError if the server refuses the region: it runs on another machine, or does not permit this.
        """
        contents = [[_serialised(tensor) for tensor in given.inputs] for given in requests]
        name = f"loadgen-{os.getpid()}-{len(self._regions)}"
        nbytes = max(1, sum(content.nbytes for of_request in contents for content in of_request))
        region = shared_memory.create_shared_memory_region(name, f"/{name}", nbytes, create_only=True)
        self._regions.append(region)
        call = self._client.register_system_shared_memory(
            name, f"/{name}", nbytes, headers=self._credentials.headers
        )
        await self._answer(call, f"does not take the inputs of {model} in shared memory; leave out --shared-memory")
        prepared, offset = [], 0
        for given, of_request in zip(requests, contents, strict=True):
            inputs = []
            for tensor, content in zip(given.inputs, of_request, strict=True):
                shared_memory.set_shared_memory_region(region, [content], offset)
                inputs.append(self._input(tensor))
                inputs[-1].set_shared_memory(name, content.nbytes, offset)
                offset += content.nbytes
            prepared.append(PreparedRequest(inputs, given.expected))
        return prepared

    def _input(self, tensor: InputTensor) -> Any:
        return self._own.InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)

    async def infer(self, model: str, inputs: Sequence[Any]) -> Any:
        """Return tritonclient's result. Raises RequestFailed."""
        try:
            return await self._client.infer(
                model, inputs, headers=self._credentials.headers, **self._sequence(model), **self._timeout
            )
        except InferenceServerException as error:
            status = str(error.status() or "error").removeprefix("StatusCode.")
            if self.is_grpc and status in ("DEADLINE_EXCEEDED", "UNAVAILABLE"):
                kind = "timeout" if status == "DEADLINE_EXCEEDED" else "connection"
                raise RequestFailed(kind, error.message() or status) from error
            raise RequestFailed(f"{'gRPC' if self.is_grpc else 'HTTP'} {status}", error.message() or "") from error
        except TimeoutError as error:
            raise RequestFailed("timeout", _reason(error)) from error
        except _UNREACHABLE as error:
            raise RequestFailed("connection", _reason(error)) from error
        except ValueError as error:
            raise RequestFailed("malformed answer", _reason(error)) from error

    def _sequence(self, model: str) -> dict[str, Any]:
        if model not in self._with_sequences:
            return {}
        return {"sequence_id": secrets.randbits(63) | 1, "sequence_start": True, "sequence_end": True}

    async def _answer(self, call: Awaitable[Any], problem: str) -> Any:
        try:
            return await call
        except InferenceServerException as error:
            if "UNAVAILABLE" in str(error.status()):
                raise ServerFailed(f"no server answers at {self.url}: {error.message()}") from error
            raise UsageError(f"{self.url} {problem} ({error})") from error
        except (*_UNREACHABLE, TimeoutError) as error:
            raise ServerFailed(f"no server answers at {self.url}: {_reason(error)}") from error


@dataclass(slots=True)
class PreparedRequest:
    inputs: Sequence[Any]
    """tritonclient's inputs, for the client's protocol."""
    expected: Mapping[str, NDArray[Any]]
    """Outputs from a file, compared with a tolerance for rounding."""
    first: dict[str, NDArray[Any]] | None = None
    """Outputs of the first answer; later answers must equal them."""

    def check(self, model: str, result: Any, in_bits: bool) -> None:
        """Raise RequestFailed if an answer differs from the first one, or from the expected outputs."""
        names = [output["name"] for output in result.get_response(**_as_json_if_grpc(result))["outputs"]]
        outputs = {name: result.as_numpy(name) for name in names}
        if self.first is None:
            for name, reference in self.expected.items():
                if name not in outputs or not _is_close(outputs[name], reference):
                    raise RequestFailed(WRONG_ANSWER, f"{model}: output {name} is not the one that --inputs gives")
            self.first = outputs
        for name, first in self.first.items():
            got = outputs.get(name)
            same = got is not None and (_has_same_bits(got, first) if in_bits else _is_close(got, first))
            if not same:
                hint = "; its batch may change its rounding, which --verify close allows" if in_bits else ""
                raise RequestFailed(
                    WRONG_ANSWER, f"{model}: output {name} differs from the first answer to the same request{hint}"
                )


@asynccontextmanager
async def connected(
    url: str, max_in_flight: int, timeout_s: float, credentials: Credentials | None = None
) -> AsyncIterator[Client]:
    """Open a client for up to `max_in_flight` concurrent requests, each with a timeout of `timeout_s`."""
    _allow_open_files(max_in_flight + 256)
    client = Client(url, max_in_flight, timeout_s, credentials or Credentials())
    try:
        yield client
    finally:
        await client.close()


Requests = Mapping[str, "list[PreparedRequest] | TextModel"]
"""Requests by model, sent in turn. Texts are drawn one by one instead."""


async def prepare_requests(client: Client, models: Sequence[str], load: Load) -> Requests:
    """Prepare each model's requests before the run."""
    rng = np.random.default_rng(load.seed)
    return {model: await _requests_of(client, model, load, rng) for model in models}


async def _requests_of(
    client: Client, model: str, load: Load, rng: np.random.Generator
) -> list[PreparedRequest] | TextModel:
    metadata = await client.metadata(model)
    await client.learn_sequences(model)
    if load.texts is not None and client.generates(metadata):
        (ids,) = metadata["inputs"]
        return TextModel(model, TextSize(*load.texts), id_bound(ids.get("parameters") or {}))
    path = None if load.inputs is None else file_of(Path(load.inputs), model)
    if isinstance(load.batch, int):
        batches = [load.batch] * (1 if path is None else DISTINCT_REQUESTS)
    else:
        batches = rng.choice(load.batch, DISTINCT_REQUESTS).tolist()
    if path is not None:
        requests = read_requests(path, metadata, batches)
    else:
        if client.is_grpc:
            for spec in metadata["inputs"]:
                spec["parameters"] = {"maximum": _MAX_ID_GRPC}
        requests = [RequestInputs(random_tensors(metadata, batch, rng), {}) for batch in batches]
    if load.shared_memory == "system":
        return await client.requests_in_shared_memory(model, requests)
    return [client.request(given) for given in requests]


def sender(client: Client, requests: Requests, load: Load) -> Send:
    """Return a function that sends an arrival's request and raises RequestFailed."""
    turns = {
        model: itertools.cycle(of_model)
        for model, of_model in requests.items()
        if not isinstance(of_model, TextModel)
    }
    text_models = {model: own for model, own in requests.items() if isinstance(own, TextModel)}
    texts = client.texts(load.seed) if text_models else None

    async def send(arrival: RequestArrival) -> TokenTimes | None:
        model = arrival.model
        if texts is not None and model in text_models:
            return await texts.send(text_models[model], arrival.text)
        request = next(turns[model])
        result = await client.infer(model, request.inputs)
        if load.verify is not None:
            request.check(model, result, in_bits=load.verify == "bits")
        return None

    return send


def _serialised(tensor: InputTensor) -> NDArray[np.uint8]:
    """Return the bytes of an input, as on the wire and in shared memory."""
    made = tritonclient.http.InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)
    made.set_data_from_numpy(tensor.values, binary_data=True)
    return np.frombuffer(made._get_binary_data(), np.uint8)


def _tls_context(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise UsageError(f"--ca {ca}: {error}") from error


def _as_json_if_grpc(result: Any) -> dict[str, bool]:
    return {} if isinstance(result, tritonclient.http.InferResult) else {"as_json": True}


def _has_same_bits(got: NDArray[Any], first: NDArray[Any]) -> bool:
    if got.dtype == np.object_:
        return bool(np.array_equal(got, first))
    return got.shape == first.shape and got.tobytes() == first.tobytes()


def _is_close(got: NDArray[Any], reference: NDArray[Any]) -> bool:
    if got.shape != reference.shape:
        return False
    if np.issubdtype(got.dtype, np.floating):
        return np.allclose(got, reference, rtol=1e-4, atol=1e-5)
    return bool(np.array_equal(got, reference))


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
