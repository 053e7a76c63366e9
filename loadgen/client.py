"""A Triton client: HTTP with binary tensors."""

import resource
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from cohabit.loadgen.errors import ServerFailed, UsageError
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.openloop import RequestFailed, Send

_UNREACHABLE = (aiohttp.ClientError, OSError)


def address_of(url: str) -> str:
    """Return an address as tritonclient takes it: 127.0.0.1:8000 for `http://127.0.0.1:8000/`."""
    if url.startswith("https://"):
        raise UsageError(f"--url {url}: https is not supported; give HOST:PORT of a plain HTTP endpoint")
    return url.removeprefix("http://").rstrip("/")


@asynccontextmanager
async def connected(url: str, max_in_flight: int, timeout_s: float) -> AsyncIterator[InferenceServerClient]:
    """Open a client that sends up to `max_in_flight` requests at once, each for `timeout_s` at most."""
    _allow_open_files(max_in_flight + 256)
    async with InferenceServerClient(address_of(url), conn_limit=max_in_flight, conn_timeout=timeout_s) as client:
        yield client


async def ready_models(client: InferenceServerClient, url: str) -> list[str]:
    """Return the names of the models that the server has ready, in order."""
    index: list[dict[str, Any]]
    index = await _answer(
        client.get_model_repository_index(), url, "does not list its models; name them with --model"
    )
    return sorted({entry["name"] for entry in index if entry.get("state") == "READY"})


async def model_metadata(client: InferenceServerClient, url: str, model: str) -> dict[str, Any]:
    """Return the server's description of a model's inputs and outputs."""
    metadata: dict[str, Any] = await _answer(client.get_model_metadata(model), url, f"has no model {model!r}")
    return metadata


async def _answer(call: Awaitable[Any], url: str, problem: str) -> Any:
    try:
        return await call
    except InferenceServerException as error:
        raise UsageError(f"{url} {problem} ({error})") from error
    except (*_UNREACHABLE, TimeoutError) as error:
        raise ServerFailed(f"no server answers at {url}: {_reason(error)}") from error


async def prepare_requests(
    client: InferenceServerClient, url: str, models: Sequence[str], batch: int, seed: int
) -> dict[str, list[InferInput]]:
    """Make each model's inputs before the run."""
    rng = np.random.default_rng(seed)
    return {m: random_inputs(await model_metadata(client, url, m), batch, rng) for m in models}


def sender(client: InferenceServerClient, requests: Mapping[str, list[InferInput]]) -> Send:
    """Return the function that sends a model's request; it raises RequestFailed."""

    async def send(model: str) -> None:
        try:
            await client.infer(model, requests[model])
        except InferenceServerException as error:
            raise RequestFailed(f"HTTP {error.status() or 'error'}", error.message() or "") from error
        except TimeoutError as error:
            raise RequestFailed("timeout", _reason(error)) from error
        except _UNREACHABLE as error:
            raise RequestFailed("connection", _reason(error)) from error
        except ValueError as error:
            raise RequestFailed("malformed answer", _reason(error)) from error

    return send


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _allow_open_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
