"""The settings of `serve`: from flags, the environment, a file and defaults, each with where it came from.

The flags are the one declaration: a setting's key in the file is its flag's name with underscores, its variable that
in capitals behind `COHABIT_`.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from server.config.config import ServeConfig, config_of
from server.config.settings_file import SettingsFile, read_settings_file
from server.errors import ConfigError, FlagError

PREFIX = "COHABIT_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"

Value = str | bool | list[str] | None
Kind = Literal["text", "switch", "list"]
Layer = Literal["flag", "environment", "file", "default"]

_MERGED = frozenset({"model_rate"})
"""Settings by model: a layer adds to those below it, instead of replacing them."""
_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_SERVICE_LINKS = re.compile(rf"{PREFIX}(SERVICE_|PORT(_|$))")
"""What Kubernetes sets in every container beside a service that is called cohabit."""


@dataclass(frozen=True, slots=True)
class Setting:
    key: str
    flag: str
    kind: Kind
    default: Value
    choices: tuple[str, ...] = ()
    required: bool = False

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()


@dataclass(frozen=True, slots=True)
class Origin:
    layer: Layer
    where: str
    """The flag, the variable, or the key and the file that it stands in."""

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True, slots=True)
class Effective:
    """What holds, and where each value came from."""

    config: ServeConfig
    settings: tuple[Setting, ...]
    values: Mapping[str, Value]
    origins: Mapping[str, Origin]


def declare(parser: argparse.ArgumentParser) -> tuple[Setting, ...]:
    """Note every flag of a parser as a setting, and let the parser leave out those that are not given."""
    settings = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        settings.append(
            Setting(
                key=action.dest,
                flag=action.option_strings[0] if action.option_strings else action.dest.upper(),
                kind=_kind(action),
                default=action.default,
                choices=tuple(action.choices or ()),
                required=action.required,
            )
        )
        action.help = (action.help or "").replace("%(default)s", str(action.default))
        action.default, action.required = argparse.SUPPRESS, False
        if not action.option_strings:
            action.nargs, action.type = "?", None
    return tuple(settings)


def add_layer_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file of settings: every flag's name with underscores (also {CONFIG_VARIABLE})."
        f" Flags come before {PREFIX}* variables, these before the file",
    )
    group.add_argument(
        "--print-config", action="store_true", help="print what holds and where it came from, and exit"
    )


def settle(settings: Sequence[Setting], options: argparse.Namespace, environment: Mapping[str, str]) -> Effective:
    """Read every layer and check the outcome. Raises ConfigError, which names the setting and where it came from."""
    path = options.config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    by_key = {setting.key: setting for setting in settings}
    layers = [_defaults(settings)]
    if path is not None:
        layers.append(_of_file(by_key, read_settings_file(path)))
    layers += [_of_environment(by_key, environment), _of_flags(settings, options)]
    values: dict[str, Value] = {}
    origins: dict[str, Origin] = {}
    for layer in layers:
        for key, (value, origin) in layer.items():
            values[key] = _merged(values.get(key), value) if key in _MERGED else value
            origins[key] = origin
    _refuse_missing(settings, values)
    config = _checked(settings, values, origins)
    return Effective(config, tuple(settings), values, origins)


_Read = dict[str, tuple[Value, Origin]]


def _kind(action: argparse.Action) -> Kind:
    if isinstance(action, argparse._AppendAction):
        return "list"
    return "text" if action.nargs != 0 else "switch"


def _defaults(settings: Sequence[Setting]) -> _Read:
    return {s.key: (s.default, Origin("default", "default")) for s in settings}


def _of_flags(settings: Sequence[Setting], options: argparse.Namespace) -> _Read:
    given = vars(options)
    return {
        s.key: (str(given[s.key]) if s.kind == "text" else given[s.key], Origin("flag", s.flag))
        for s in settings
        if s.key in given
    }


def _of_environment(by_key: Mapping[str, Setting], environment: Mapping[str, str]) -> _Read:
    read: _Read = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE or _SERVICE_LINKS.match(variable):
            continue
        setting = by_key.get(variable.removeprefix(PREFIX).lower())
        if setting is None or setting.variable != variable:
            raise ConfigError(f"{variable}: there is no such setting; see cohabit serve --help")
        read[setting.key] = (_from_text(setting, text, variable), Origin("environment", variable))
    return read


def _from_text(setting: Setting, text: str, where: str) -> Value:
    if setting.kind == "switch":
        if text.lower() not in _SWITCH:
            raise ConfigError(f"{where}: '{text}' is neither true nor false")
        return _SWITCH[text.lower()]
    if setting.kind == "list":
        return [part.strip() for part in text.split(",") if part.strip()]
    return _choice(setting, text, where)


def _of_file(by_key: Mapping[str, Setting], file: SettingsFile) -> _Read:
    read: _Read = {}
    for key, value in file.values.items():
        where = f"{key} in {file.path}"
        setting = by_key.get(key)
        if setting is None:
            raise ConfigError(f"{where}: there is no such setting; see cohabit serve --help")
        read[key] = (_from_file(setting, value, where), Origin("file", where))
    for key, items in file.by_model.items():
        if key in read:
            raise ConfigError(f"{key} in {file.path}: it is given both as a list and in the models' tables")
        read[key] = (list(items), Origin("file", f"[models] in {file.path}"))
    return read


def _from_file(setting: Setting, value: object, where: str) -> Value:
    if setting.kind == "switch":
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: it must be true or false")
        return value
    if isinstance(value, list) and all(_is_plain(item) for item in value):
        items = [str(item) for item in value]
        return items if setting.kind == "list" else ",".join(items)
    if setting.kind == "list" or not _is_plain(value):
        raise ConfigError(f"{where}: it must be {'a list' if setting.kind == 'list' else 'a text or a number'}")
    return _choice(setting, str(value), where)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _choice(setting: Setting, text: str, where: str) -> str:
    if setting.choices and text not in setting.choices:
        raise ConfigError(f"{where}: '{text}' is none of {', '.join(setting.choices)}")
    return text


def _merged(below: Value, above: Value) -> Value:
    """Later items win where they are for the same model."""
    assert isinstance(above, list)
    return [*below, *above] if isinstance(below, list) else above


def _refuse_missing(settings: Sequence[Setting], values: Mapping[str, Value]) -> None:
    for setting in settings:
        if setting.required and values[setting.key] is None:
            raise ConfigError(
                f"{setting.flag} is missing; give it on the command line, as {setting.variable},"
                f" or as {setting.key} in a --config file"
            )


def _checked(
    settings: Sequence[Setting], values: Mapping[str, Value], origins: Mapping[str, Origin]
) -> ServeConfig:
    try:
        return config_of(argparse.Namespace(**values))
    except FlagError as error:
        key = next((s.key for s in settings if s.flag == error.flag), None)
        origin = origins.get(key or "")
        if origin is None or origin.layer in ("flag", "default"):
            raise
        raise ConfigError(f"{origin}: {error.reason}") from error
