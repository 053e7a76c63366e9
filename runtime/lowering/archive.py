"""Reads a `.pt2` archive of `torch.export.save` without unpickling or evaluating its contents.

`torch.export.load` is unsafe for untrusted files: it unpickles sample inputs and legacy weights, passes shape
expressions to `sympify` (which evaluates them), resolves any name below `torch`, and runs compiled libraries. Here
weights must be raw records, sample inputs are not read, and names and expressions are checked first.
"""

import copy
import hashlib
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._export.serde import schema
from torch._export.serde.serialize import (
    ExportedProgramDeserializer,
    _bytes_to_dataclass,
    _dict_to_dataclass,
    deserialize_scalar_type,
    deserialize_size,
    deserialize_storage_offset,
    deserialize_stride,
)
from torch.export import ExportedProgram

from cohabit.runtime.errors import ArchiveError, UnsupportedModel
from cohabit.runtime.lowering.allowed_ops import allows_target
from cohabit.runtime.lowering.archive_file import ArchiveFile

_MODEL = "models/model.json"
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_MAX_JSON_BYTES = 256 << 20

# Torch imports the modules named by these. A structure is JSON with nested JSON strings, in which escapes hide words.
_NOT_IN_SPECS = ("default_factory_module", "__enum__", "\\u")

# Shape expressions as `sympy.srepr` writes them: `Mul(Integer(2), Symbol('s77', positive=True, integer=True))`.
# `sympify` evaluates its text, so only these words may reach it.
_EXPRESSION = re.compile(r"[A-Za-z0-9_+\-*/%(), .<>=!&|~']*")
_NAME = re.compile(r"[A-Za-z_0-9]*", re.ASCII)
_QUOTED = re.compile(r"'([^']*)'")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SYMBOL = re.compile(r"[suz][a-z]*\d+")
_FUNCTIONS = frozenset(
    _IDENTIFIER.findall(
        """
        Symbol Integer Float Rational Add Mul Pow Max Min Mod PythonMod FloorDiv ModularIndexing CleanDiv CeilDiv
        CeilToInt FloorToInt TruncToInt RoundToInt RoundDecimal IntTrueDiv FloatTrueDiv TrueDiv ToFloat PowByNatural
        FloatPow Where Piecewise ExprCondPair Identity Abs floor ceiling sqrt LShift RShift Tuple Eq Ne Lt Le Gt Ge
        Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan And Or Not true false True False
        precision positive negative integer nonnegative nonzero oo int_oo
        """
    )
)


class _Read(NamedTuple):
    program: ExportedProgram
    guards: list[str]
    digest: str
    """Digest of all that is not values of weights."""


_last: _Read | None = None
"""The last program that this process read, without weights: models of a family are often read one after the other."""


def read(archive: ArchiveFile) -> tuple[ExportedProgram, list[str]]:
    """Load an exported program, and the separately stored conditions on its inputs' sizes.

    The program's weights are views of the mapped file. Archives read in turn that differ in the values of their weights
    only share a `graph_module`, which must not be changed. The conditions are Python source, which must not be
    executed. Raises ArchiveError for a bad file.
    """
    global _last
    records = _Records(archive)
    records.refuse_unsafe()
    weights = records.tensors(_WEIGHTS, "data/weights/")
    constants = records.tensors(_CONSTANTS, "data/constants/")
    texts = [records.checked(name, _MAX_JSON_BYTES) for name in (_MODEL, _WEIGHTS, _CONSTANTS)]
    digest = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    known = _last
    if known is None or known.digest != digest:
        program, guards = _deserialized(archive.path, texts[0], weights, constants)
        _last = known = _Read(_with_weights(program, {}, {}), guards, digest)
    return _with_weights(known.program, weights, constants), list(known.guards)


def _with_weights(
    program: ExportedProgram, weights: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]
) -> ExportedProgram:
    """Return a program that shares its graph with another, and has these weights of the same names and forms."""
    other = copy.copy(program)
    other._state_dict, other._constants = weights, dict(constants)
    return other


def _deserialized(
    path: Path, raw: bytes, weights: dict[str, torch.Tensor], constants: dict[str, torch.Tensor]
) -> tuple[ExportedProgram, list[str]]:
    serialized, guards = _check_program(path, raw)
    try:
        program = ExportedProgramDeserializer().deserialize(serialized, weights, constants, None)
    except Exception as error:  # the deserializer raises any type
        reason = str(error).split("\n", 1)[0][:300]
        if "not registered" in reason:  # a class of a library that is not imported here
            reason += (
                "; export a module that takes and returns tensors, alone or in tuples, lists and dictionaries, or let"
                " `cohabit import` export the model"
            )
        raise ArchiveError(f"{path.name}: not a program that torch {torch.__version__} reads: {reason}") from error
    return program, guards


class _Records:
    """The records of one archive, by their names below the archive's root folder."""

    def __init__(self, archive: ArchiveFile) -> None:
        self.path = archive.path
        self.archive = archive
        self.infos = {i.filename.split("/", 1)[-1]: i for i in archive.records.infolist()}

    def refuse_unsafe(self) -> None:
        if (kind := self.archive.other_kind) is not None:
            raise ArchiveError(f"{self.path.name} {kind}")
        for name, info in self.infos.items():
            if info.compress_type != zipfile.ZIP_STORED:
                raise ArchiveError(
                    f"{self.path.name}: record {name} is compressed, to {info.compress_size} of {info.file_size} bytes;"
                    " torch.export.save compresses nothing"
                )
            if name.startswith("data/aotinductor/"):
                raise ArchiveError(
                    f"{self.path.name}: holds a compiled library ({name}); export without AOTInductor"
                )
            if re.fullmatch(r"data/(weights|constants)/[^/]*\.pt", name):
                raise ArchiveError(
                    f"{self.path.name}: has pickled weights ({name}), and pickles are never loaded;"
                    " save it again with torch.export.save of torch >= 2.9"
                )

    def checked(self, name: str, limit_bytes: int) -> bytes:
        """Read a record and verify its checksum. Raises ArchiveError."""
        info = self.infos.get(name)
        if info is None:
            raise ArchiveError(
                f"{self.path.name}: has no record {name}: truncated, or not written by torch.export.save"
            )
        if info.file_size > limit_bytes:
            raise ArchiveError(
                f"{self.path.name}: record {name} has {info.file_size} bytes, the limit is {limit_bytes}"
            )
        try:
            return self.archive.records.read(info)
        except (zipfile.BadZipFile, OSError, NotImplementedError, EOFError) as error:
            raise ArchiveError(f"{self.path.name}: record {name} is damaged: {error}") from error

    def tensors(self, config_name: str, folder: str) -> dict[str, torch.Tensor]:
        """Return the tensors that a payload config lists: views of the mapped file; tied ones share a storage."""
        try:
            document = json.loads(self.checked(config_name, _MAX_JSON_BYTES))
            config = _dict_to_dataclass(schema.PayloadConfig, document).config  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, KeyError, AttributeError, AssertionError) as error:
            raise ArchiveError(f"{self.path.name}: record {config_name} is damaged: {error}") from error
        flat: dict[str, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name, meta in config.items():
            if meta.use_pickle or meta.tensor_meta is None:
                raise ArchiveError(f"{self.path.name}: weight {name} is pickled, and pickles are never loaded")
            path_name = meta.path_name
            try:
                dtype = deserialize_scalar_type(meta.tensor_meta.dtype)
                if path_name not in flat:
                    flat[path_name] = self._raw(folder + path_name, dtype)
                size = deserialize_size(meta.tensor_meta.sizes)
                stride = deserialize_stride(meta.tensor_meta.strides)
                offset = deserialize_storage_offset(meta.tensor_meta.storage_offset)
                tensor = torch.as_strided(flat[path_name], size, stride, offset)
                tensors[name] = torch.nn.Parameter(tensor, requires_grad=False) if meta.is_param else tensor
            except (RuntimeError, KeyError, TypeError, AssertionError, ValueError) as error:
                raise ArchiveError(f"{self.path.name}: weight {name} does not fit its record: {error}") from error
        return tensors

    def _raw(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        info = self.infos.get(name)
        if info is None:
            raise ArchiveError(f"{self.path.name}: has no record {name}")
        if info.file_size == 0:
            return torch.empty(0, dtype=dtype)
        mapped = self.archive.mapped
        try:
            name_length, extra_length = struct.unpack_from("<HH", mapped, info.header_offset + 26)
        except struct.error as error:
            raise ArchiveError(f"{self.path.name}: record {name} is cut off") from error
        start = info.header_offset + 30 + name_length + extra_length
        if start + info.file_size > len(mapped):
            raise ArchiveError(f"{self.path.name}: record {name} is cut off")
        if zlib.crc32(memoryview(mapped)[start : start + info.file_size]) != info.CRC:
            raise ArchiveError(f"{self.path.name}: record {name} is damaged: its checksum does not fit")
        return torch.frombuffer(mapped, dtype=dtype, count=info.file_size // dtype.itemsize, offset=start)


def _check_program(path: Path, raw: bytes) -> tuple[Any, list[str]]:
    """Check a serialized program. Returns it without its guards, and the guards."""
    try:
        document = json.loads(raw)
        for kind, text in _texts(document):
            if kind == "expr_str":
                _check_expression(path, text)
            elif kind == "spec" and any(word in text for word in _NOT_IN_SPECS):
                raise UnsupportedModel(
                    f"{path.name}: inputs or outputs hold an enum, a defaultdict or a name that is not ASCII;"
                    " use plain containers"
                )
            elif kind == "name" and not _NAME.fullmatch(text):
                raise ArchiveError(f"{path.name}: name {text[:80]!r} of the program is not an identifier")
            elif kind == "target" and not allows_target(text):
                raise UnsupportedModel(
                    f"{path.name}: the program calls {text[:80]!r}, which is not an operator that a model may use:"
                    " compute operators of torch.ops.aten and control flow; decompose or rewrite it before export"
                )
        guards = [text for text in document.get("guards_code", ()) if isinstance(text, str)]
        document["guards_code"] = []
        return _bytes_to_dataclass(schema.ExportedProgram, json.dumps(document).encode()), guards
    except ArchiveError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as error:
        raise ArchiveError(f"{path.name}: the program ({_MODEL}) is damaged: {error}") from error


def _texts(document: Any) -> Iterator[tuple[str, str]]:
    """Yield every shape expression, container structure, operator and name of a serialized program.

    Names matter: torch writes them into Python code, which it runs when it loads the program.
    """
    pending = [document]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            if isinstance(item.get("expr_str"), str):
                yield "expr_str", item["expr_str"]
            if isinstance(item.get("target"), str) and "inputs" in item and "outputs" in item:
                yield "target", item["target"]
                item["metadata"] = {}  # drops stack traces, by which torch would look functions up
            if isinstance(item.get("as_operator"), str):
                yield "target", item["as_operator"]
            for key in ("name", "as_name"):
                if isinstance(item.get(key), str):
                    yield "name", item[key]
            for spec in ("in_spec", "out_spec"):
                if isinstance(item.get(spec), str):
                    yield "spec", item[spec]
            pending.extend(item.values())


def _check_expression(path: Path, text: str) -> None:
    names = _IDENTIFIER.findall(_QUOTED.sub("", text))
    quoted = _QUOTED.findall(text)
    if (
        not _EXPRESSION.fullmatch(text)
        or any(n not in _FUNCTIONS and not _SYMBOL.fullmatch(n) for n in names)
        or not all(_SYMBOL.fullmatch(q) or re.fullmatch(r"[-+0-9.e]+", q) for q in quoted)
    ):
        raise ArchiveError(f"{path.name}: shape expression {text[:80]!r} is not one that torch.export writes")
