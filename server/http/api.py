"""HTTP's endpoints of inference, health and descriptions: from requests to the data plane and back."""

import asyncio

from server.errors import RequestError
from server.frontend.dataplane import DataPlane
from server.http import generate
from server.http.answers import json_response, which
from server.http.codec import EncodedResponse, decode_request, encode_response, parse_header_length
from server.http.compression import chosen_encoding, compress
from server.http.errors import error_response
from server.http.forms import Forms
from server.http.message import JSON, Request, Response
from server.protocol import descriptions
from server.protocol.model import ModelInfo
from server.protocol.model_config import config_as_json
from server.protocol.request import InferRequest, InferResponse

HEADER_LENGTH = "Inference-Header-Content-Length"
_HEADER_LENGTH = HEADER_LENGTH.lower().encode()

_BINARY = "application/octet-stream"
_QUICK_JSON_BYTES = 64 << 10
"""JSON up to this is handled on the event loop, well within a millisecond."""
_QUICK_BINARY_BYTES = 4 << 20


class InferenceApi:
    """Every method is a handler, on the event loop's thread."""

    def __init__(self, plane: DataPlane, max_body_bytes: int) -> None:
        self._plane = plane
        self._max_body_bytes = max_body_bytes
        self._forms = Forms()

    async def live(self, request: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, request: Request) -> Response:
        reason = self._plane.not_ready()
        return json_response({"ready": True}) if reason is None else error_response(400, reason)

    async def server_metadata(self, request: Request) -> Response:
        return json_response(descriptions.server_metadata(self._plane.extensions))

    async def model_ready(self, request: Request) -> Response:
        name, version = which(request)
        if not self._plane.is_ready(name, version):
            return error_response(400, "Model version not ready")
        return json_response({"name": name, "ready": True})

    async def model_metadata(self, request: Request) -> Response:
        return json_response(descriptions.model_metadata(self._plane.registry.find(*which(request)).info))

    async def model_config(self, request: Request) -> Response:
        return json_response(config_as_json(self._plane.config(*which(request))))

    async def statistics(self, request: Request) -> Response:
        name, version = request.parameters.get("model"), request.parameters.get("version")
        return json_response(descriptions.statistics(self._plane.registry.listed(name, version)))

    async def infer(self, request: Request) -> Response:
        """Refuse what can be refused before the body is read; the rest is decode, queue, execute, encode."""
        info = self._plane.servable(*which(request))
        header_length = parse_header_length(request.header(_HEADER_LENGTH))
        whole = request.whole(min(_QUICK_JSON_BYTES, self._max_body_bytes))
        if whole is not None:
            infer_request = await self._decode(whole, header_length, info)
        else:
            with self._plane.bodies.share() as share:
                body = await request.read(self._max_body_bytes, share)
                infer_request = await self._decode(body, header_length, info)
                del body  # the tensors hold what they view
        encoded = await _encode(await self._plane.infer(infer_request, info))
        return await _infer_response(encoded, request.header(b"accept-encoding"))

    async def generate(self, request: Request) -> Response:
        """Infer with plain JSON values."""
        return Response(await self._generate(request), content_type=JSON)

    async def generate_stream(self, request: Request) -> Response:
        """Send what generate does as the one event of a stream: models here answer once."""
        event = b"data: %b\n\n" % await self._generate(request)
        return Response(event, content_type="text/event-stream; charset=utf-8")

    async def _generate(self, request: Request) -> bytes:
        info = self._plane.servable(*which(request))
        with self._plane.bodies.share() as share:
            body = await request.read(self._max_body_bytes, share)
            if len(body) <= _QUICK_JSON_BYTES:
                decoded = generate.decode_request(body, info, self._plane.regions)
            else:
                decoded = await asyncio.to_thread(generate.decode_request, body, info, self._plane.regions)
        response = await self._plane.infer(decoded, info)
        return await asyncio.to_thread(generate.encode_response, response)

    async def _decode(self, body: memoryview, header_length: int | None, info: ModelInfo) -> InferRequest:
        json_bytes = len(body) if header_length is None else header_length
        if json_bytes <= _QUICK_JSON_BYTES and not self._plane.regions.slow:
            return decode_request(body, header_length, info, self._plane.regions, self._forms)
        return await asyncio.to_thread(decode_request, body, header_length, info, self._plane.regions)


async def _encode(response: InferResponse) -> EncodedResponse:
    json_bytes = binary_bytes = 0
    for output in response.outputs:
        binary_bytes += output.array.nbytes
        if not (output.binary or output.window):
            json_bytes += 8 * output.array.size
    try:
        if json_bytes <= _QUICK_JSON_BYTES and binary_bytes <= _QUICK_BINARY_BYTES:
            return encode_response(response)
        return await asyncio.to_thread(encode_response, response)
    except RequestError as error:
        error.of_request(response.id)
        raise


async def _infer_response(encoded: EncodedResponse, accept_encoding: str | None) -> Response:
    headers: dict[str, str] = {}
    if encoded.header_length is not None:
        headers[HEADER_LENGTH] = str(encoded.header_length)
    body = encoded.body
    encoding = chosen_encoding(accept_encoding, len(body))
    if encoding is not None:
        body = await asyncio.to_thread(compress, body, encoding)
        headers["Content-Encoding"] = encoding
    return Response(body, 200, JSON if encoded.header_length is None else _BINARY, headers)
