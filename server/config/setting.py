"""The declaration of one setting: its flag, environment variable, key in the file, help text and parser."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from cohabit.server.errors import ConfigError

PREFIX = "COHABIT_"

Value = str | bool | list[str] | None
"""A setting's value before it is parsed: text, a switch, or the items of a repeatable setting."""


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").lower()


@dataclass(frozen=True, slots=True)
class Setting:
    """The declaration of a config field; `declared` adds the properties of the field itself."""

    flag: str
    help: str
    parse: Callable[[str], Any] = str
    metavar: str | None = None
    write: Callable[[Any], str] = _text
    """The inverse of `parse`, for the default in `--help` and `--print-config`."""
    repeatable: bool = False
    group: str = ""
    """The group in `--help`; if empty, that of the previous setting."""
    aliases: tuple[str, ...] = ()
    """Earlier names of the flag. They work everywhere, but `--help` leaves them out."""

    field: str = ""
    type: Any = str
    default: Any = None
    is_required: bool = False
    choices: Collection[str] | None = None
    """By default, those of a Literal type."""

    @property
    def key(self) -> str:
        """The key in the settings file."""
        return _key(self.flag)

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the flag and of its aliases."""
        return tuple(map(_key, (self.flag, *self.aliases)))

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def is_switch(self) -> bool:
        return self.type in (bool, bool | None)

    @property
    def is_mapping(self) -> bool:
        """Whether an item is parsed to a dict. Sources of such a setting are merged instead of overridden."""
        return get_origin(self.type) is Mapping

    @property
    def default_value(self) -> Value:
        """The default before parsing, if any."""
        if self.default is None or isinstance(self.default, bool):
            return self.default
        return [self.write(item) for item in self.default] if self.repeatable else self.write(self.default)

    def read(self, value: Value, origin: str) -> Any:
        """Parse a value. Raises ConfigError, which starts with `origin`."""
        if isinstance(value, list):
            items = [self._parsed(item, origin) for item in value]
            if self.is_mapping:
                return {key: own for item in items for key, own in item.items()}
            return tuple(dict.fromkeys(items))
        return self._parsed(value, origin) if isinstance(value, str) else value

    def _parsed(self, text: str, origin: str) -> Any:
        if self.choices is not None and text not in self.choices:
            raise ConfigError(f"{origin}: '{text}' is none of {', '.join(self.choices)}")
        return parsed(origin, text, self.parse)


def parsed(origin: str, text: str, parse: Callable[[str], Any]) -> Any:
    """Parse a text. Raises ConfigError, which starts with its origin, such as the flag."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from error


def flag(*args: Any, **options: Any) -> Mapping[str, Setting]:
    """Return the metadata of a required dataclass field; the arguments are those of Setting."""
    return {"setting": Setting(*args, **options)}


def setting(default: Any, *args: Any, **options: Any) -> Any:
    """Return a dataclass field. `default` is a value, or a type to call for one; the rest are Setting's arguments."""
    metadata = flag(*args, **options)
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared(owner: type) -> Iterator[Setting]:
    """Yield the settings of a dataclass in order of its fields."""
    hints = get_type_hints(owner)
    group = ""
    for each in fields(owner):
        if "setting" not in each.metadata:
            continue
        found: Setting = each.metadata["setting"]
        group = found.group or group
        kind = hints[each.name]
        default = each.default if each.default_factory is MISSING else each.default_factory()
        yield replace(
            found,
            group=group,
            field=each.name,
            type=kind,
            default=None if default is MISSING else default,
            is_required=default is MISSING,
            choices=get_args(kind) if get_origin(kind) is Literal else found.choices,
        )
