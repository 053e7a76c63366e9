"""From a method and a path to a handler."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

import httptools

from server.http.errors import error_response
from server.http.message import Handler, Request, Response

Route = tuple[str, str, Handler]
"""Method, path and handler. A path may have names, for a segment or for what a pattern says: `/v2/{a}/{b:[0-9]+}`."""

_NAME = re.compile(r"\{(\w+)(?::([^{}]+))?\}")
_MOST_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Target:
    """Who answers, and what the path says by name."""

    handler: Handler
    parameters: Mapping[str, str] = field(default_factory=dict)


class Routes:
    """What comes first is found first. Paths that were found once are remembered."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = [(method.encode(), _pattern(path), handler) for method, path, handler in routes]
        self._found: dict[tuple[bytes, bytes], Target] = {}

    def find(self, method: bytes, target: bytes) -> Target:
        """Find the handler of a request; if there is none, one that says so."""
        found = self._found.get((method, target))
        if found is not None:
            return found
        try:
            path = (httptools.parse_url(target).path or b"").decode("latin-1")
        except httptools.HttpParserInvalidURLError:
            return Target(_invalid)
        allowed = []
        for known, pattern, handler in self._routes:
            if (match := pattern.fullmatch(path)) is None:
                continue
            if known == method:
                found = Target(handler, {name: unquote(value) for name, value in match.groupdict().items()})
                self._remember(method, target, found)
                return found
            allowed.append(known.decode())
        return Target(_refuses(allowed)) if allowed else Target(_unknown)

    def _remember(self, method: bytes, target: bytes, found: Target) -> None:
        if len(self._found) >= _MOST_REMEMBERED:
            self._found.clear()
        self._found[method, target] = found


def _pattern(path: str) -> re.Pattern[str]:
    """Make a regular expression of a path, whose names are groups."""
    written, end = "", 0
    for name in _NAME.finditer(path):
        written += re.escape(path[end : name.start()]) + f"(?P<{name[1]}>{name[2] or '[^/]+'})"
        end = name.end()
    return re.compile(written + re.escape(path[end:]))


async def _unknown(request: Request) -> Response:
    return error_response(404, "Not Found")


async def _invalid(request: Request) -> Response:
    return error_response(400, "the request's target is no URL")


def _refuses(allowed: Iterable[str]) -> Handler:
    async def refuse(request: Request) -> Response:
        return error_response(405, "Method Not Allowed", {"Allow": ", ".join(sorted(set(allowed)))})

    return refuse
