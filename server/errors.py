"""The server's errors. They know no HTTP: `server.http_errors` maps them to status codes.

CohabitError
├── ConfigError              a flag that cannot be; the server does not start
├── RepositoryError          the model repository cannot be read; the server does not start
├── LoadFailed               no model could be loaded
└── RequestError             this request gets no answer; others do
    ├── InvalidRequest       the client's mistake
    │   └── ModelNotListed   statistics of a model that is not there
    ├── ModelNotFound        no such model or version, or it failed to load
    ├── ModelNotReady        it is still loading
    ├── PayloadTooLarge      a body over the limit
    ├── Unsupported          sound by the protocol, but not done here
    │   └── UnknownEncoding  a Content-Encoding other than gzip and deflate
    ├── QueueFull            too many requests wait for this model
    ├── RequestTimedOut      it waited longer than its own timeout
    ├── ShuttingDown         the server drains
    └── ExecutionFailed      the model failed while it computed
"""

from planner.errors import CohabitError, format_bytes


class ConfigError(CohabitError):
    """A flag that cannot be; the message names it."""


class RepositoryError(CohabitError):
    """The model repository cannot be read at all."""


class LoadFailed(CohabitError):
    """No model could be loaded, so there is nothing to serve."""


class RequestError(CohabitError):
    """One request cannot be answered."""


class InvalidRequest(RequestError):
    """The request breaks the protocol or does not fit the model."""


class ModelNotListed(InvalidRequest):
    """Statistics were asked of a model that is not there; Triton answers this one differently."""

    def __init__(self, model: str) -> None:
        super().__init__(f"requested model '{model}' is not available")


class ModelNotFound(RequestError):
    """No such model or version can be served."""

    def __init__(self, model: str, version: int | None = None, reason: str | None = None) -> None:
        which = f"'{model}'" if version is None else f"'{model}' version {version}"
        what = "is not found" if reason is None else f"has no available versions: {reason}"
        super().__init__(f"Request for unknown model: {which} {what}")


class ModelNotReady(RequestError):
    """The model is known and may be ready soon."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}' is not ready: {reason}")


class PayloadTooLarge(RequestError):
    """A body, or what it inflates to, is over the limit."""

    def __init__(self, what: str, limit_bytes: int) -> None:
        super().__init__(
            f"{what} is over the limit of {limit_bytes} bytes ({format_bytes(limit_bytes)});"
            " send a smaller batch, or start the server with a larger --max-body"
        )


class Unsupported(RequestError):
    """Part of the protocol that this server does not speak."""


class UnknownEncoding(Unsupported):
    """A Content-Encoding that cannot be undone here."""

    def __init__(self, encoding: str) -> None:
        super().__init__(f"Unable to decompress request body, unknown Content-Encoding '{encoding}'")


class QueueFull(RequestError):
    """The model's queue is at its bound."""

    def __init__(self, model: str, limit: int) -> None:
        super().__init__(
            f"Exceeds maximum queue size: {limit} requests wait for model '{model}' already;"
            " send fewer, or start the server with a larger --queue-limit"
        )


class RequestTimedOut(RequestError):
    """The request waited longer than it was willing to."""

    def __init__(self, model: str, timeout_s: float) -> None:
        super().__init__(
            f"Request timeout expired: it waited more than {timeout_s * 1e3:g} ms in the queue of model '{model}'"
        )


class ShuttingDown(RequestError):
    """The server takes no new requests."""

    def __init__(self) -> None:
        super().__init__("Server is stopping, not accepting new requests")


class ExecutionFailed(RequestError):
    """The model failed on this request; the next one may well succeed."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}' failed to execute: {reason}")
