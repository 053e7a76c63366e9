"""Reads settings from flags, environment variables, a TOML file and defaults, in this order of precedence."""

import argparse
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cohabit.server.config.bundle import CACHE, MANIFEST, MODELS, is_bundle, read_bundle, refuse_others
from cohabit.server.config.config import BY_KEY, BY_NAME, SETTINGS, ServeConfig, check_consistent
from cohabit.server.config.setting import PREFIX, Setting, Value
from cohabit.server.config.sizes import write_size
from cohabit.server.errors import ConfigError

CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_NO_SETTINGS = (CONFIG_VARIABLE, f"{PREFIX}INTERPRET", f"{PREFIX}PINNED_MEMORY")
"""Variables with our prefix that are not settings. The second belongs to `cohabit.planner.compiled`."""

_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_ORIGIN_COLUMN = 40

QUEUE_SHARE = 16
"""Requests may take 1/QUEUE_SHARE of --process-memory, unless --queue-memory is given."""

_Layer = dict[str, tuple[Value, str]]
"""Values and their origins by key."""


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The effective settings, and the origin of each value: a flag, a variable, a key in a file, or `default`."""

    config: ServeConfig
    values: Mapping[str, Value]
    origins: Mapping[str, str]
    takes_memory_left: bool = False
    """Whether no memory size was given, so that --process-memory is the free memory."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `serve`. Flags that are not given leave no attribute in the namespace."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for setting in SETTINGS:
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        add_flag(groups[setting.group], setting)
    group = parser.add_argument_group("settings")
    group.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file of settings; its keys are the flags' names with underscores (also {CONFIG_VARIABLE})."
        f" Flags override {PREFIX}* variables, which override the file",
    )
    group.add_argument("--print-config", action="store_true", help="print every setting with its origin, and exit")


def add_flag(parser: argparse._ActionsContainer, setting: Setting) -> None:
    """Declare one setting's flag, with its default in the help text."""
    notes = ["repeatable"] if setting.repeatable else []
    default = setting.default_value
    if isinstance(default, bool):
        notes.append(f"default: {'yes' if default else 'no'}")
    elif default:
        notes.append(f"default: {default if isinstance(default, str) else ', '.join(default)}")
    text = f"{setting.help} ({'; '.join(notes)})" if notes else setting.help
    options: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if not setting.flag.startswith("-"):
        parser.add_argument(setting.key, nargs="?", metavar=setting.metavar, **options)
    else:
        if setting.is_switch:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"choices": setting.choices, "metavar": setting.metavar}
        if setting.repeatable:
            options["action"] = "append"
        parser.add_argument(setting.flag, **options)
        for alias in setting.aliases:
            parser.add_argument(alias, **options | {"dest": setting.key, "help": argparse.SUPPRESS})


def typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse that reports the message of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def given(options: argparse.Namespace, keys: Iterable[str]) -> dict[str, Value]:
    """Return the values of these settings, if their flags were given."""
    return {key: vars(options)[key] for key in keys if key in vars(options)}


def config_of(values: Mapping[str, Value], origins: Mapping[str, str] | None = None) -> ServeConfig:
    """Parse values by key; missing keys get their defaults. Raises ConfigError with the value's origin."""
    read = {
        s.field: s.read(values[s.key], (origins or {}).get(s.key, s.flag))
        for s in SETTINGS
        if values.get(s.key) is not None
    }
    return ServeConfig(**read)


def read_settings(
    options: argparse.Namespace,
    environment: Mapping[str, str],
    memory_left: Callable[[], tuple[int, str]] | None = None,
) -> ResolvedConfig:
    """Read every source and check the result. Raises ConfigError, which names the setting and its origin.

    `memory_left` returns --process-memory in bytes, and its origin, for the case that no memory size is given.
    """
    path = options.config or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    layers: list[_Layer] = [
        {s.key: (s.default_value, "default") for s in SETTINGS},
        {} if path is None else _from_file(path),
        _from_environment(environment),
        {s.key: (vars(options)[s.key], s.flag) for s in SETTINGS if s.key in vars(options)},
    ]
    values, origins = _overlaid(layers)
    named = values["repository"]
    # A bundle's settings take precedence over defaults only; others must equal them.
    bundle = read_bundle(Path(named)) if isinstance(named, str) and is_bundle(Path(named)) else None
    if bundle is not None:
        bundled: _Layer = {key: (value, MANIFEST) for key, value in bundle.settings.items()}
        values, origins = _overlaid([layers[0], bundled, *layers[1:]])
        refuse_others(bundle, values, origins, BY_KEY)
    # Defaults that depend on the machine or on other settings.
    takes_memory_left = memory_left is not None and _may_take_memory_left(values)
    if memory_left is not None and takes_memory_left:
        nbytes, where = memory_left()
        values["process_memory"], origins["process_memory"] = write_size(nbytes), f"what {where} has left"
    _share_process_memory(values, origins, memory_is_bundled=bundle is not None)
    for setting in SETTINGS:
        if setting.is_required and values[setting.key] is None:
            raise ConfigError(
                f"{setting.flag} is missing; give it on the command line, as {setting.variable},"
                f" or as {setting.key} in a --config file"
            )
    config = config_of(values, origins)
    # A bundle's folder contains both the repository and the cache.
    if bundle is not None:
        folder = config.repository
        config = replace(
            config,
            repository=folder / MODELS,
            cache=folder / CACHE,
            bundle=folder,
            pack_weights=bundle.pack_weights,
        )
    check_consistent(config)
    return ResolvedConfig(config, values, origins, takes_memory_left)


def _may_take_memory_left(values: Mapping[str, Value]) -> bool:
    """Whether no memory size is given, on a CPU, which is the device that --process-memory is for."""
    is_given = values["memory"] is not None or values["process_memory"] is not None
    return not is_given and values["device"] == "cpu"


def _share_process_memory(values: dict[str, Value], origins: dict[str, str], *, memory_is_bundled: bool) -> None:
    """With --process-memory, set --memory to its upper bound, and --queue-memory to its default.

    Raises ConfigError if --memory is given as well, unless it is a bundle's.
    """
    whole = values["process_memory"]
    if not isinstance(whole, str):
        return
    if values["memory"] is None:
        values["memory"], origins["memory"] = whole, origins["process_memory"]
    elif values["memory"] != whole and not memory_is_bundled:
        raise ConfigError(f"{origins['memory']} and {origins['process_memory']}: give one of them")
    if origins["queue_memory"] == "default":
        nbytes = max(1, BY_KEY["process_memory"].read(whole, origins["process_memory"]) // QUEUE_SHARE)
        values["queue_memory"], origins["queue_memory"] = write_size(nbytes), origins["process_memory"]


def _overlaid(layers: Sequence[_Layer]) -> tuple[dict[str, Value], dict[str, str]]:
    """Return values and origins by key; later layers take precedence."""
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, (value, origin) in layer.items():
            values[key] = _merged(values[key], value) if key in values and BY_KEY[key].is_mapping else value
            origins[key] = origin
    return values, origins


def as_toml(effective: ResolvedConfig) -> str:
    """Return a settings file that `--config` reads back, with the origin of each value as a comment."""
    lines = []
    for key, value in effective.values.items():
        if value is None or value == []:
            lines.append(f"# {key} is not set\n")
        else:
            written = msgspec.json.encode(value).decode().replace('","', '", "')
            lines.append(f"{key} = {written}".ljust(_ORIGIN_COLUMN) + f"  # {effective.origins[key]}\n")
    return "".join(lines)


def _merged(below: Value, above: Value) -> Value:
    """Merge items by the name in NAME=VALUE; `above` takes precedence."""
    if not isinstance(above, list):
        return above
    merged: dict[str, str] = {}
    for item in [*(below if isinstance(below, list) else ()), *above]:
        name = item.rpartition("=")[0] or item
        merged.pop(name, None)  # the last item of a name is read last, also after a file that has the name
        merged[name] = item
    return list(merged.values())


def _from_environment(environment: Mapping[str, str]) -> _Layer:
    layer: _Layer = {}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        setting = _known(variable.removeprefix(PREFIX).lower() if variable.isupper() else "", variable)
        value: Value = text
        if setting.is_switch:
            if text.lower() not in _SWITCH:
                raise ConfigError(f"{variable}: '{text}' is neither true nor false")
            value = _SWITCH[text.lower()]
        elif setting.repeatable:
            value = [part.strip() for part in text.split(",") if part.strip()]
        layer[setting.key] = (value, variable)
    return layer


def _known(key: str, origin: str) -> Setting:
    if key not in BY_NAME:
        raise ConfigError(f"{origin}: there is no such setting; see cohabit serve --help")
    return BY_NAME[key]


def _from_file(path: Path) -> _Layer:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from error
    layer: _Layer = {}
    for name, value in document.items():
        origin = f"{name} in {path}"
        setting = _known(name, origin)
        layer[setting.key] = (_from_toml(setting, value, origin), origin)
    return layer


def _from_toml(setting: Setting, value: object, origin: str) -> Value:
    if setting.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{origin}: it must be true or false")
        return value
    if isinstance(value, list) and all(map(_is_plain, value)):
        items = [str(item) for item in value]
        return items if setting.repeatable else ",".join(items)
    if not _is_plain(value):
        raise ConfigError(f"{origin}: it must be {'a list' if setting.repeatable else 'a text or a number'}")
    return [str(value)] if setting.repeatable else str(value)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
