"""What HTTP's endpoints share: JSON answers, small JSON bodies, and which model a path means."""

from typing import Any, TypeVar

import msgspec

from server.errors import InvalidRequest
from server.http.message import JSON, Request, Response
from server.protocol.body_memory import BodyMemory

_T = TypeVar("_T")
_SMALL_BODY_BYTES = 1 << 20


def json_response(body: Any) -> Response:
    return Response(msgspec.json.encode(body), content_type=JSON)


def which(request: Request) -> tuple[str, str | None]:
    """Return the model and version that a path names."""
    return request.parameters["model"], request.parameters.get("version")


async def read_json(request: Request, of_type: type[_T]) -> _T:
    """Read a body as JSON of this form; an empty one is `{}`. Raises InvalidRequest or PayloadTooLarge."""
    with BodyMemory(2 * _SMALL_BODY_BYTES).share() as share:
        body = await request.read(_SMALL_BODY_BYTES, share)
    try:
        return msgspec.json.decode(body or b"{}", type=of_type)
    except RecursionError as error:
        raise InvalidRequest("failed to parse the request JSON: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from error
