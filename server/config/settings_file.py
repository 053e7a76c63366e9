"""Reads the TOML file of settings: keys of the server, and a table per model."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server.errors import ConfigError

_MODELS = "models"


@dataclass(frozen=True, slots=True)
class SettingsFile:
    """What a file says. `by_model` holds what stands in the models' tables, in the form that the flags have."""

    path: Path
    values: Mapping[str, Any]
    by_model: Mapping[str, list[str]] = field(default_factory=dict)


def read_settings_file(path: Path) -> SettingsFile:
    """Raises ConfigError if the file cannot be read, or has a table that is none of a model."""
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error
    models = document.pop(_MODELS, {})
    if not isinstance(models, dict):
        raise ConfigError(f"{_MODELS} in {path}: it must be a table of models")
    return SettingsFile(path, document, _by_model(path, models))


def _by_model(path: Path, models: Mapping[str, Any]) -> Mapping[str, list[str]]:
    rates, loaded = [], []
    for model, table in models.items():
        where = f"[{_MODELS}.{model}] in {path}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: it must be a table")
        for key, value in table.items():
            match key, value:
                case "rate", int() | float() if not isinstance(value, bool):
                    rates.append(f"{model}={value}")
                case "rate", _:
                    raise ConfigError(f"{where}: rate must be a number of requests per second")
                case "load", bool():
                    loaded += [model] if value else []
                case "load", _:
                    raise ConfigError(f"{where}: load must be true or false")
                case _:
                    raise ConfigError(f"{where}: a model has no setting '{key}'; there are rate and load")
    return {key: items for key, items in (("model_rate", rates), ("load_model", loaded)) if items}
