"""The server's errors, and the table of the statuses that clients get for them: `ANSWERS`.

CohabitError
├── ConfigError              an invalid setting; the server does not start
├── RepositoryError          the model repository cannot be read; the server does not start
├── RemoteError              another server does not answer, or refuses
├── StartFailed              no model, or a required one, could be loaded at start
├── ImportFailed             a model cannot become a repository entry
└── RequestError             this request gets no answer; others do
    ├── Refused              refused for one of the reasons in `RefusalKind`
    ├── Unauthenticated      no token, or an unknown one
    ├── InvalidRequest       the request breaks the protocol or does not fit the model
    │   ├── TensorMismatch   its tensors do not fit the model
    │   └── SequenceLost     the state of its sequence is missing
    ├── ModelNotFound        no such model or version, or it failed to load
    ├── Overloaded           a retry may succeed after `retry_after_s`
    │   ├── QueueFull        too many requests wait
    │   │   └── LevelFull    of this priority
    │   ├── RateLimited      the model's config allows no more requests now
    │   └── EngineUnavailable  the engine's process is down
    ├── RequestTimedOut      it cannot be answered within its timeout
    ├── ExecutionFailed      the model failed while it computed
    └── LoadFailed           a model cannot be loaded; the message says why
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, get_args

import msgspec

from cohabit.planner import errors as planner_errors
from cohabit.planner.errors import CohabitError, format_bytes


class ConfigError(CohabitError):
    """A setting is invalid; the message names it."""


class RepositoryError(CohabitError):
    """The model repository cannot be read."""


class RemoteError(CohabitError):
    """Another server does not answer, or refuses a call."""


class StartFailed(CohabitError):
    """No model, or a required one, could be loaded at start."""


class ImportFailed(CohabitError):
    """A model cannot become an entry of the repository; the message has the reason and the way out."""


RefusalKind = Literal[
    "PermissionMissing",  # the call's token does not permit it
    "ForeignSite",  # a call that changes the server comes from a page of another site
    "ModelNotListed",  # statistics of a model that is not served; Triton has a separate status for this
    "AlreadyRegistered",  # the name of a registered shared memory region
    "RegionNotFound",  # no such shared memory region
    "ModelNotReady",  # the model is known, and may be ready soon
    "PayloadTooLarge",  # a body is over the limit, as sent or inflated
    "ClientTooSlow",  # a body arrives too slowly
    "Unsupported",  # valid in the protocol, but not supported
    "UnknownEncoding",  # a Content-Encoding that is not supported
    "ShuttingDown",  # the server takes no new requests
    "EngineFailed",  # the engine's process died while it executed this request, and again during the retry
    "DeviceUnavailable",  # the device is lost, with everything in its memory
    "ControlOff",  # the configuration does not allow loading and unloading by request
    "NotInRepository",  # the repository has no such model, or cannot be read
]


class RequestError(CohabitError):
    """One request cannot be answered."""

    names_request: ClassVar[bool] = False
    """Whether Triton prefixes such errors with the request's id, or with `<id_unknown>` if the client gave none."""

    @property
    def kind(self) -> str:
        """Its key in `ANSWERS`, and its name on the wire and in traces."""
        return type(self).__name__

    def of_request(self, request_id: str | None) -> None:
        """Prefix the message with the client's id, unless it has one already."""
        if (request_id or self.names_request) and not str(self).startswith("[request id: "):
            self.args = (f"[request id: {request_id or '<id_unknown>'}] {self}",)


class Refused(RequestError):
    """A refusal that the server only passes on: its kind and its text."""

    def __init__(self, kind: RefusalKind, text: str) -> None:
        super().__init__(text)
        self._kind = kind

    @property
    def kind(self) -> RefusalKind:
        return self._kind


def model_not_ready(model: str, reason: str) -> Refused:
    return Refused("ModelNotReady", f"model '{model}' is not ready: {reason}")


def too_large(what: str, limit_bytes: int, way_out: str = "") -> Refused:
    """Return the refusal of a body. `way_out` is advice; by default, a smaller batch or a larger --max-body."""
    way_out = way_out or "send a smaller batch, or start the server with a larger --max-body"
    text = f"{what} is over the limit of {limit_bytes} bytes ({format_bytes(limit_bytes)}); {way_out}"
    return Refused("PayloadTooLarge", text)


def shutting_down() -> Refused:
    return Refused("ShuttingDown", "Server is stopping, not accepting new requests")


def device_unavailable(reason: str) -> Refused:
    return Refused("DeviceUnavailable", f"the device is lost: {reason}")


class Unauthenticated(RequestError):
    """The call has no token, or an unknown one."""

    def __init__(self, message: str, wrong_token: bool = False) -> None:
        super().__init__(message)
        self.wrong_token = wrong_token
        self.ends_connection = False
        """Whether the refusal ends the connection, which slows down a client that guesses tokens."""


class InvalidRequest(RequestError):
    """The request breaks the protocol or does not fit the model."""


class TensorMismatch(InvalidRequest):
    """The request's tensors do not fit the model."""

    names_request = True


class SequenceLost(InvalidRequest):
    """A request continues a sequence, but the state of earlier requests is missing."""


class ModelNotFound(RequestError):
    """No such model or version can be served."""

    def __init__(self, model: str, version: int | None = None, reason: str | None = None) -> None:
        which = f"'{model}'" if version is None else f"'{model}' version {version}"
        what = "is not found"
        if reason is not None:
            state = "has no available versions" if version is None else "is not at ready state"
            what = f"{state}: {reason}"
        super().__init__(f"Request for unknown model: {which} {what}")


SEND_LESS_JSON = "send tensors as binary data (HTTP) or raw_input_contents (gRPC) instead"
"""Advice for a request that is too large apart from its tensors' bytes."""
ONLY_INFERENCE = "only inference takes larger ones"


RETRY_S = 1.0
"""Default time until a retry, in seconds."""


class Overloaded(RequestError):
    """The server cannot take the request now."""

    def __init__(self, message: str, retry_after_s: float = RETRY_S) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Overloaded):
    """A queue is at its limit."""

    names_request = True

    @classmethod
    def of_model(cls, model: str, limit: int, retry_after_s: float) -> "QueueFull":
        return cls(
            f"Exceeds maximum queue size: {limit} requests wait for model '{model}' already;"
            " send fewer, or try again later",
            retry_after_s,
        )


class LevelFull(QueueFull):
    """The queue of one priority level is at its limit; other levels may have room."""


class RateLimited(Overloaded):
    """The model's config allows no more requests now."""


class RequestTimedOut(RequestError):
    """The request cannot be answered within its timeout."""

    def __init__(self, model: str, timeout_s: float, needed_s: float | None = None) -> None:
        why = "" if needed_s is None else f"; from its arrival on it would have taken {needed_s * 1e3:.3g} ms"
        super().__init__(
            f"Request timeout expired: model '{model}' cannot answer within {timeout_s * 1e3:g} ms{why}"
        )


class ExecutionFailed(RequestError):
    """The model failed on this request; others may succeed."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model '{model}' failed to execute: {reason}")


class LoadFailed(RequestError):
    """A model, or some of its versions, cannot be loaded. See `Lifecycle.serve` for what is served then."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"load failed for model '{model}': {reason}")


def load_reason(model: str, error: Exception) -> str:
    """Return why a model cannot be loaded, without its name as a prefix; the caller's text has the name."""
    return str(error).removeprefix(f"{model}: ")


class EngineUnavailable(Overloaded):
    """The engine's process is down, and restarts have failed so far."""


class Statuses(NamedTuple):
    """A client's status for an error: HTTP's code, and gRPC's name."""

    http: int
    grpc: str


ANSWERS: Mapping[str, Statuses] = {
    "Unauthenticated": Statuses(401, "UNAUTHENTICATED"),
    "PermissionMissing": Statuses(403, "PERMISSION_DENIED"),
    "ForeignSite": Statuses(403, "PERMISSION_DENIED"),
    "InvalidRequest": Statuses(400, "INVALID_ARGUMENT"),
    "TensorMismatch": Statuses(400, "INVALID_ARGUMENT"),
    "SequenceLost": Statuses(400, "INVALID_ARGUMENT"),
    "ModelNotListed": Statuses(400, "INVALID_ARGUMENT"),
    "AlreadyRegistered": Statuses(400, "ALREADY_EXISTS"),
    "RegionNotFound": Statuses(404, "NOT_FOUND"),
    "ModelNotFound": Statuses(404, "NOT_FOUND"),
    "ModelNotReady": Statuses(503, "UNAVAILABLE"),
    "PayloadTooLarge": Statuses(413, "RESOURCE_EXHAUSTED"),
    "ClientTooSlow": Statuses(408, "DEADLINE_EXCEEDED"),
    "Unsupported": Statuses(501, "UNIMPLEMENTED"),
    "UnknownEncoding": Statuses(501, "UNIMPLEMENTED"),
    "Overloaded": Statuses(503, "UNAVAILABLE"),
    "QueueFull": Statuses(503, "UNAVAILABLE"),
    "LevelFull": Statuses(503, "UNAVAILABLE"),
    "RateLimited": Statuses(429, "UNAVAILABLE"),
    "EngineUnavailable": Statuses(503, "UNAVAILABLE"),
    "RequestTimedOut": Statuses(503, "DEADLINE_EXCEEDED"),
    "ShuttingDown": Statuses(503, "UNAVAILABLE"),
    "ExecutionFailed": Statuses(500, "INTERNAL"),
    "EngineFailed": Statuses(500, "INTERNAL"),
    "DeviceUnavailable": Statuses(503, "UNAVAILABLE"),
    "ControlOff": Statuses(503, "UNAVAILABLE"),
    "LoadFailed": Statuses(400, "INVALID_ARGUMENT"),
    "NotInRepository": Statuses(500, "INTERNAL"),
}
"""By `RequestError.kind`. Differences from Triton are in docs/migrating-from-triton.md."""


def statuses_of(error: RequestError) -> Statuses:
    return ANSWERS[error.kind]


class WireError(msgspec.Struct, frozen=True):
    """An error as sent between the engine and the front end."""

    kind: str
    message: str
    retry_after_s: float | None = None


def to_wire(error: CohabitError) -> WireError:
    kind = error.kind if isinstance(error, RequestError) else type(error).__name__
    return WireError(kind, str(error), getattr(error, "retry_after_s", None))


def from_wire(wire: WireError) -> CohabitError:
    """Restore the error with its message; an unknown kind becomes a StartFailed."""
    for kind in get_args(RefusalKind):
        if kind == wire.kind:
            return Refused(kind, wire.message)
    known = _BY_NAME.get(wire.kind, StartFailed)
    error = known.__new__(known)
    error.args = (wire.message,)
    if isinstance(error, Overloaded):
        error.retry_after_s = wire.retry_after_s or RETRY_S
    return error


_BY_NAME = {
    name: kind
    for name, kind in (vars(planner_errors) | globals()).items()
    if isinstance(kind, type) and issubclass(kind, CohabitError)
}


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known name, or nothing."""
    near = difflib.get_close_matches(wrong, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""
