"""A bundle: models prepared on one machine for one memory size, to be served on another without their archives.

bundle.json    the manifest, which this module describes; written last
models/        a repository: configurations and label files, and NAME/VERSION/model.lowered instead of archives
cache/         weights, programs, profiles and plans, as in the cache of `cohabit serve`
"""

import zlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cohabit.server.config.setting import Setting, Value
from cohabit.server.errors import ConfigError

FORMAT_VERSION = 3
MANIFEST, MODELS, CACHE = "bundle.json", "models", "cache"
_READ_BYTES = 1 << 20


class BundledFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nbytes: int
    crc32: int


class BundledModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    version: int
    archive: str
    """The archive's fingerprint."""
    weight_bytes: int
    partition_bytes: int
    latency_s: float
    """Predicted for the smallest bucket."""
    resident_s: float
    """The same with all parameters resident."""


class Bundle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The manifest. `machine` is the one that the programs and packed weights are valid for."""

    memory_bytes: int
    workspace_bytes: int
    machine: str
    settings: dict[str, str | bool | None]
    """Settings of `serve` by key. The plans are valid for exactly these."""
    models: tuple[BundledModel, ...]
    files: dict[str, BundledFile]
    """By path in the bundle."""
    pack_weights: bool = True
    """Whether the weights are prepacked for the machine."""
    format_version: int = FORMAT_VERSION

    def damaged(self, folder: Path) -> list[str]:
        """Return the missing, truncated and changed files, with the differences. Reads every file."""
        return [
            f"{name} {reason}"
            for name, written in self.files.items()
            if (reason := _difference(folder / name, written)) is not None
        ]


def is_bundle(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_bundle(folder: Path) -> Bundle:
    """Raises ConfigError."""
    path = folder / MANIFEST
    try:
        bundle = msgspec.json.decode(path.read_bytes(), type=Bundle)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged, or of another version: {error}; export the bundle again") from error
    if bundle.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {bundle.format_version}, this is for version {FORMAT_VERSION};"
            " export the bundle again"
        )
    return bundle


def refuse_others(
    bundle: Bundle, values: Mapping[str, Value], origins: Mapping[str, str], settings: Mapping[str, Setting]
) -> None:
    """Raise ConfigError for a setting that differs from the bundle's."""
    for key, bundled in bundle.settings.items():
        setting, given = settings[key], values[key]
        if setting.read(given, origins[key]) != setting.read(bundled, MANIFEST):
            raise ConfigError(
                f"{origins[key]}: the bundle was exported for {setting.flag} {bundled}, not {given}; leave it out, or"
                f" run cohabit export-bundle with {setting.flag} {given}"
            )


def described(path: Path) -> BundledFile:
    """Raises OSError."""
    checksum = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            checksum = zlib.crc32(block, checksum)
    return BundledFile(path.stat().st_size, checksum)


def _difference(path: Path, written: BundledFile) -> str | None:
    try:
        found = described(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if found.nbytes != written.nbytes:
        return f"has {found.nbytes} bytes instead of {written.nbytes}"
    return None if found == written else "is damaged: its checksum does not fit"
