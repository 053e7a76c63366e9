"""ModelInferResponse as bytes: what protobuf says of a response is remembered, its tensors are written behind that.

protobuf for Python copies a tensor into the message and again out of it. Most responses of a model differ in nothing
but their tensors, whose field is the last one.
"""

from functools import lru_cache

from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from server.protocol.request import InferResponse
from server.protocol.tensors import to_binary

_FINAL = "triton_final_response"

_LENGTH_DELIMITED = 2
_TENSOR = bytes([ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
_RESPONSE = bytes([ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])


_Place = tuple[str, int, int]
"""Where in shared memory an output is: a region's name, a length and an offset."""
_Described = tuple[str, str, tuple[int, ...], _Place | None]
"""All of an output but its values: a name, a datatype, a shape and a place, if it does not travel."""


def encode_response(response: InferResponse, final: bool = False) -> bytes:
    """Write a ModelInferResponse, which may be the last one of its request.

    What goes to shared memory is written there, and leaves an empty tensor here. Raises InvalidRequest where there is
    no room for it.
    """
    described: list[_Described] = []
    tensors: list[bytes] = []
    for output in response.outputs:
        tensor, window, place = output.tensor, output.window, None
        binary = to_binary(output.array, tensor.datatype)
        if window is not None:
            window.write(memoryview(binary))
            binary, place = b"", (window.region.name, window.nbytes, window.offset)
        described.append((tensor.name, tensor.datatype, output.array.shape, place))
        tensors += (_TENSOR, _varint(len(binary)), binary)
    beginning = _remembered if response.id is None else _beginning
    return b"".join((beginning(response.model, response.version, response.id, tuple(described), final), *tensors))


def as_stream_response(response: bytes) -> bytes:
    """Make a ModelStreamInferResponse of a ModelInferResponse."""
    return b"".join((_RESPONSE, _varint(len(response)), response))


def failed_stream_response(text: str, request_id: str) -> bytes:
    """Write a ModelStreamInferResponse of a request that has failed."""
    response = ModelStreamInferResponse(error_message=text)
    response.infer_response.id = request_id
    response.infer_response.parameters[_FINAL].bool_param = True
    written: bytes = response.SerializeToString()
    return written


def _beginning(
    model: str, version: int, request_id: str | None, outputs: tuple[_Described, ...], final: bool
) -> bytes:
    message = ModelInferResponse(model_name=model, model_version=str(version), id=request_id or "")
    if final:
        message.parameters[_FINAL].bool_param = True
    for name, datatype, shape, place in outputs:
        described = message.outputs.add(name=name, datatype=datatype, shape=shape)
        if place is not None:
            region, nbytes, offset = place
            described.parameters["shared_memory_region"].string_param = region
            described.parameters["shared_memory_byte_size"].int64_param = nbytes
            if offset:
                described.parameters["shared_memory_offset"].int64_param = offset
    written: bytes = message.SerializeToString()
    return written


_remembered = lru_cache(maxsize=1024)(_beginning)


def _varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
