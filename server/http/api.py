"""HTTP's endpoints for inference, health and descriptions."""

from collections.abc import Sequence

from aiohttp import hdrs, web

from cohabit.server.errors import SEND_LESS_JSON, too_large
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.generation import generates
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.threads import call
from cohabit.server.http import generate
from cohabit.server.http.answers import JSON, LeasedResponse, json_response, model_of
from cohabit.server.http.body import read_body
from cohabit.server.http.codec import decode_request, encode_response, parse_header_length
from cohabit.server.http.completions import MOST_TEXT_BYTES, CompletionsApi, parsed_generate
from cohabit.server.http.compression import chosen_encoding, compress
from cohabit.server.http.errors import error_response
from cohabit.server.ipc.model import ModelInfo
from cohabit.server.ipc.request import Answer, Request
from cohabit.server.protocol.matching import errors_of
from cohabit.server.protocol.shared_memory import RegionUse
from cohabit.server.triton.model_config import config_as_json

HEADER_LENGTH = "Inference-Header-Content-Length"

_BINARY = "application/octet-stream"
_EVENTS = "text/event-stream; charset=utf-8"
_QUICK_JSON_BYTES = 16 << 10
"""Largest JSON that the event loop parses and writes; threads handle the rest."""
_JSON_BYTES = 8
"""Approximate size of a number in JSON."""
_QUICK_BINARY_BYTES = 4 << 20
_QUICK_COMPRESSION_BYTES = 8 << 10


class InferenceApi:
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane, texts: CompletionsApi, max_body_bytes: int) -> None:
        self._plane = plane
        self._texts = texts
        self._max_body_bytes = max_body_bytes

    @property
    def _json_limit(self) -> tuple[int, str]:
        """The limit of JSON in bytes, and a hint for clients that exceed it."""
        json_bytes = self._plane.max_json_bytes
        return (json_bytes, SEND_LESS_JSON) if json_bytes < self._max_body_bytes else (self._max_body_bytes, "")

    async def live(self, request: web.Request) -> web.Response:
        return json_response({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        reason = self._plane.not_ready()
        return json_response({"ready": True}) if reason is None else error_response(400, reason)

    async def server_metadata(self, request: web.Request) -> web.Response:
        return json_response(self._plane.server_metadata())

    async def model_ready(self, request: web.Request) -> web.Response:
        name, version = model_of(request)
        if not self._plane.is_ready(name, version):
            return error_response(400, "Model version not ready")
        return json_response({"name": name, "ready": True})

    async def model_metadata(self, request: web.Request) -> web.Response:
        return json_response(self._plane.metadata(*model_of(request)))

    async def model_config(self, request: web.Request) -> web.Response:
        return json_response(config_as_json(await self._plane.config(*model_of(request))))

    async def statistics(self, request: web.Request) -> web.Response:
        name, version = request.match_info.get("model"), request.match_info.get("version")
        return json_response(await self._plane.statistics(name, version))

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """Check the head before reading the body; then read, decode, infer and encode."""
        name, version = model_of(request)
        info = self._plane.require_ready(name, version)
        header_length = parse_header_length(request.headers.get(HEADER_LENGTH))
        with self._plane.memory.lease() as lease, self._plane.regions.use() as regions:
            most_json, way_out = self._json_limit
            limit = (most_json, way_out) if header_length is None else (self._max_body_bytes, "")
            body = await read_body(request, lease, *limit)
            json_bytes = len(body) if header_length is None else header_length
            if most_json < json_bytes <= len(body):
                raise too_large(f"the request JSON of {json_bytes} bytes", most_json, way_out)
            slow = json_bytes > _QUICK_JSON_BYTES or self._plane.regions.slow
            with self._plane.answering(info.key):
                with self._plane.fitting(info.key):
                    decoded = await self._plane.decode(slow, decode_request, body, header_length, info, regions)
                answer = await self._plane.infer(decoded, info, lease, version)
                parts = await _encode(decoded, answer, info, regions)
            return await _infer_response(parts, request.headers.get(hdrs.ACCEPT_ENCODING), lease)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Infer with plain JSON values, or continue a text."""
        return await self._generate(request, streams=False)

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        """Stream the answer of `generate`: one event, or one for each token of a text."""
        return await self._generate(request, streams=True)

    async def _generate(self, request: web.Request, *, streams: bool) -> web.StreamResponse:
        name, version = model_of(request)
        info = self._plane.require_ready(name, version)
        with self._plane.memory.lease() as lease, self._plane.regions.use() as regions:
            has_text = generates(info)
            limit = (min(MOST_TEXT_BYTES, self._max_body_bytes), "") if has_text else self._json_limit
            body = await read_body(request, lease, *limit)
            slow = len(body) > _QUICK_JSON_BYTES
            asked = None
            if has_text:
                with self._plane.fitting(info.key):
                    asked = await self._plane.decode(slow, parsed_generate, body, info)
            if asked is None:
                with self._plane.answering(info.key):
                    with self._plane.fitting(info.key):
                        decoded = await self._plane.decode(slow, generate.decode_request, body, info, regions)
                    answer = await self._plane.infer(decoded, info, lease, version)
                    slow = _JSON_BYTES * sum(a.size for a in answer.outputs.values()) > _QUICK_JSON_BYTES
                    written = await call(slow, generate.encode_response, decoded, answer, info)
                before, after = (b"data: ", b"\n\n") if streams else (b"", b"")
                headers: dict[str, str] = {hdrs.CONTENT_TYPE: _EVENTS if streams else JSON}
                return LeasedResponse(lease, (before, written, after), headers)
        return await self._texts.generate(*asked, info, streams=streams)


async def _encode(
    request: Request, answer: Answer, info: ModelInfo, regions: RegionUse
) -> list[bytes | memoryview]:
    """Encode an answer. Runs on a thread if the answer is large, or has much JSON or classification."""
    nbytes = json_bytes = 0
    for asked in request.outputs:
        array = answer.outputs[asked.name]
        nbytes += array.nbytes
        if asked.classes or not (asked.binary or asked.in_region):
            json_bytes += _JSON_BYTES * array.size
    slow = nbytes > _QUICK_BINARY_BYTES or json_bytes > _QUICK_JSON_BYTES
    with errors_of(request.id):
        return await call(slow, encode_response, request, answer, info, regions)


async def _infer_response(
    parts: Sequence[bytes | memoryview], accept_encoding: str | None, lease: Lease
) -> web.StreamResponse:
    headers: dict[str, str] = {hdrs.CONTENT_TYPE: JSON}
    if len(parts) > 1:
        headers = {hdrs.CONTENT_TYPE: _BINARY, HEADER_LENGTH: str(len(parts[0]))}
    encoding = chosen_encoding(accept_encoding)
    if encoding is not None:
        parts = [await call(sum(map(len, parts)) > _QUICK_COMPRESSION_BYTES, compress, parts, encoding)]
        headers[hdrs.CONTENT_ENCODING] = encoding
    return LeasedResponse(lease, parts, headers)
