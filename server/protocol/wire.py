"""KServe v2's inference messages as msgspec structs. Tensor data stays raw until its datatype is known."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

Dim = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Parameters = dict[str, bool | Int64 | float | str]

NO_DATA = Raw(b"")
"""The values of a tensor without `data`; compared by identity."""


class InputBody(msgspec.Struct):
    """A tensor that the client sends. `data` is `NO_DATA` where the values are not in the JSON."""

    name: str
    datatype: str
    shape: list[Dim]
    data: Raw = NO_DATA
    parameters: Parameters = {}


class WantedBody(msgspec.Struct):
    """An output that the client asks for."""

    name: str
    parameters: Parameters = {}


class RequestBody(msgspec.Struct):
    inputs: list[InputBody]
    id: str = ""
    outputs: list[WantedBody] = []
    parameters: Parameters = {}


class OutputBody(msgspec.Struct, omit_defaults=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, int | str] | UnsetType = UNSET
    data: Raw | UnsetType = UNSET


class ResponseBody(msgspec.Struct, omit_defaults=True):
    model_name: str
    model_version: str
    outputs: list[OutputBody]
    id: str | UnsetType = UNSET
