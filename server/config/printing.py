"""Writes the settings that hold as a TOML file, with where each came from beside it."""

from collections.abc import Iterator

import msgspec

from server.config.layers import Effective, Setting, Value

_COLUMN = 40


def as_toml(effective: Effective) -> str:
    """A file that `--config` reads back to the same settings."""
    return "".join(f"{line}\n" for line in _lines(effective))


def _lines(effective: Effective) -> Iterator[str]:
    for setting in effective.settings:
        origin = effective.origins[setting.key]
        value = effective.values[setting.key]
        if value is None or value == []:
            yield f"# {setting.key} is not set"
        else:
            yield f"{setting.key} = {_written(setting, value)}".ljust(_COLUMN) + f"  # {origin}"


def _written(setting: Setting, value: Value) -> str:
    if setting.key == "model_rate":  # later layers win
        assert isinstance(value, list)
        value = list({item.rpartition("=")[0]: item for item in value}.values())
    return msgspec.json.encode(value).decode().replace('","', '", "')
