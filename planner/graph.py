"""The planner's input graph: ops in an executable order, and the storages they read and write.

A *tensor* here is a storage: all its aliases (views, tied weights) are one tensor. Parameters come first, with the
same ids in the graphs of all buckets of a model, so that buckets can share residents."""

import hashlib
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cohabit.planner.errors import FormatError, InvalidGraph
from cohabit.planner.shapes import Bucket

FORMAT_VERSION = 1

_T = TypeVar("_T")

TensorKind = Literal["parameter", "state", "input", "activation"]

SCRATCH_ALIGNMENT = 256


def aligned(nbytes: int, alignment: int) -> int:
    """Round up to a multiple of the alignment."""
    return -(-nbytes // alignment) * alignment


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One storage.

    A parameter always has a copy in the host store, so evicting it is free. State is a parameter that ops may
    change in place (such as trained weights): once changed, it must be swapped out or stay in memory for the next
    inference. An input is in memory before the first op; an activation is written by one op.
    """

    name: str
    nbytes: int
    kind: TensorKind
    alignment: int = 64
    codec: str | UnsetType = UNSET
    """Encoding of most of its bytes in the host store; unset if they are stored as in memory."""

    @property
    def aligned_bytes(self) -> int:
        return aligned(self.nbytes, self.alignment)

    @property
    def is_weight(self) -> bool:
        """Whether this is a parameter or state, which the host store has from the start."""
        return self.kind in ("parameter", "state")


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel call, or one opaque group of calls. Reads and writes are tensor ids without repeats."""

    name: str
    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scratch_bytes: int = 0
    mutates: tuple[int, ...] = ()
    """Subset of `reads` that the op changes in place. Reordering ops keeps every other user of these tensors on its
    side of this op, before or after it."""

    @property
    def touched(self) -> tuple[int, ...]:
        """Tensors that the op reads or writes, without repeats."""
        return tuple(dict.fromkeys((*self.reads, *self.writes)))

    @property
    def aligned_scratch_bytes(self) -> int:
        return aligned(self.scratch_bytes, SCRATCH_ALIGNMENT)


class Graph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, weakref=True):
    """A model in one bucket. `ops` are in an executable order."""

    name: str
    batch: int
    weights: str
    """Fingerprint of the layout of the weights file: the same for models whose weights differ in their values only."""
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    outputs: tuple[int, ...]
    """Tensors that must be in memory when the last op has finished."""
    format_version: int = FORMAT_VERSION
    sizes: tuple[int, ...] | UnsetType = UNSET
    """The bucket's largest sizes of dynamic dimensions other than the batch. Tensor and scratch bytes are for these
    sizes. Unset if there are none."""

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.batch, self.sizes or ())

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the graph's canonical JSON without its name, so that a model under two names is planned
        once."""
        return fingerprint(msgspec.structs.replace(self, name=""))

    def named(self, name: str) -> "Graph":
        """Return the graph of the same model under another name. It shares what was computed for this one."""
        other = msgspec.structs.replace(self, name=name)
        other.__dict__.update(self.__dict__)
        return other

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Ids of the parameters, in the order of the weights file."""
        return tuple(i for i, t in enumerate(self.tensors) if t.kind == "parameter")

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.tensors) if t.kind == "input")

    @cached_property
    def needed(self) -> tuple[tuple[int, ...], ...]:
        """Per op, the tensors that must be in memory when it ends: those it touches; for the last op also all
        outputs."""
        last = len(self.ops) - 1
        outputs = [self.outputs if k == last else () for k in range(len(self.ops))]
        return tuple(tuple(dict.fromkeys((*op.touched, *out))) for op, out in zip(self.ops, outputs, strict=True))

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(self.tensors[i].nbytes for i in self.parameters)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and state."""
        return sum(t.nbytes for t in self.tensors if t.is_weight)

    def validate(self) -> None:
        """Check sizes and ids, and that activations are written once, before they are read. Raises InvalidGraph."""
        written: set[int] = set()
        count = len(self.tensors)
        for tensor in self.tensors:
            if tensor.nbytes < 0 or tensor.alignment < 1 or tensor.alignment & (tensor.alignment - 1):
                raise InvalidGraph(
                    f"{self.name}: tensor {tensor.name} has {tensor.nbytes} bytes at alignment"
                    f" {tensor.alignment}; sizes are >= 0 and alignments powers of two"
                )
        for op in self.ops:
            for ids, verb in ((op.reads, "reads"), (op.writes, "writes")):
                if len(set(ids)) != len(ids) or any(not 0 <= i < count for i in ids):
                    raise InvalidGraph(f"{self.name}: op {op.name} {verb} tensors {ids} of {count}")
            for i in op.reads:
                if self.tensors[i].kind == "activation" and i not in written:
                    raise InvalidGraph(
                        f"{self.name}: op {op.name} reads {self.tensors[i].name} before it is written"
                    )
            for i in op.mutates:
                if i not in op.reads or self.tensors[i].kind == "parameter":
                    raise InvalidGraph(
                        f"{self.name}: op {op.name} changes {self.tensors[i].name}, which is a"
                        f" {self.tensors[i].kind} or not among its reads; parameters are constant"
                    )
            for i in op.writes:
                if self.tensors[i].kind != "activation" or i in written:
                    raise InvalidGraph(
                        f"{self.name}: op {op.name} writes {self.tensors[i].name}, which is a"
                        f" {self.tensors[i].kind} or was written before"
                    )
                written.add(i)
        for i in self.outputs:
            if not 0 <= i < count or (self.tensors[i].kind == "activation" and i not in written):
                raise InvalidGraph(f"{self.name}: output {i} is never written")


def fingerprint(data: Any) -> str:
    """Hex SHA-256 of a value's canonical JSON: fields in the order of their declaration, no spaces."""
    return hashlib.sha256(msgspec.json.encode(data, order="deterministic")).hexdigest()


def encode(data: Graph) -> bytes:
    return msgspec.json.encode(data)


def decode(raw: bytes) -> Graph:
    """Decode and validate a graph. Raises FormatError or InvalidGraph."""
    graph = decode_as(raw, _decoder, "graph", FORMAT_VERSION)
    graph.validate()
    return graph


class _Header(msgspec.Struct):
    format_version: int


# Decoders are created at import: when two threads make msgspec inspect a type for the first time, one may see a
# half-inspected type and crash.
_decoder = msgspec.json.Decoder(Graph)
_header_decoder = msgspec.json.Decoder(_Header)


def decode_as(raw: bytes, decoder: msgspec.json.Decoder[_T], what: str, newest: int) -> _T:
    """Decode versioned JSON. Raises FormatError, which names an unsupported version."""
    try:
        version = _header_decoder.decode(raw).format_version
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not a {what} file, or a truncated one: {error}") from error
    if version != newest:
        raise FormatError(
            f"{what} file has format version {version}, this version of Cohabit reads {newest};"
            f" {'upgrade Cohabit' if version > newest else f'make the {what} again'}"
        )
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise FormatError(f"{what} file is damaged: {error}") from error
