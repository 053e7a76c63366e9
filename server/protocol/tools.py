"""Calls of tools in generated texts: the grammar that a text with calls follows, and what it calls."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cohabit.server.errors import InvalidRequest
from cohabit.server.protocol.structured import Schema, json_rule, literal

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""What a text of calls begins with in most models' forms, and no other text has."""
_ANY = r"(.|\n)*"
_OBJECT: Schema = {"type": msgspec.Raw(b'"object"')}


class Function(msgspec.Struct):
    name: str
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class _Name(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's choice of one function."""

    type: Literal["function"]
    function: _Name


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The functions that a text may call."""

    functions: Sequence[Function]
    is_required: bool
    is_parallel: bool
    """Whether it may have several calls."""


def tool_use(tools: Sequence[Tool], choice: str | NamedTool | None, parallel: bool | None) -> ToolUse | None:
    """Return what a text may call; None if nothing. Raises InvalidRequest."""
    functions = {tool.function.name: tool.function for tool in tools}
    for name in functions:
        if not _NAME.fullmatch(name):
            raise InvalidRequest(f"tools: '{name[:80]}' is not a name of 1 to 64 letters, digits, '_', '.' and '-'")
    if len(functions) < len(tools):
        raise InvalidRequest("tools: two functions have the same name")
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            raise InvalidRequest(f"tool_choice: '{choice.function.name[:80]}' is not the name of one of the tools")
        return ToolUse([functions[choice.function.name]], True, False)
    if choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("tool_choice is none, auto, required, or names a function")
    if choice == "required" and not functions:
        raise InvalidRequest("tool_choice is required, and there are no tools; send them")
    if choice == "none" or not functions:
        return None
    return ToolUse([*functions.values()], choice == "required", parallel is not False)


class CallForm(msgspec.Struct, frozen=True):
    """How a model writes calls: `before`, name, `middle`, arguments, and `between` before the next name, or `after`."""

    before: str
    middle: str
    between: str | None
    """None if a text has one call only."""
    after: str

    @property
    def marker(self) -> str | None:
        """What only calls begin with; None if other texts may begin as calls do."""
        found = _MARKER.match(self.before)
        return None if found is None else found[0]

    def grammar(self, use: ToolUse, special: Mapping[str, int], content: str | None) -> str:
        """Return the grammar of texts with calls, and of texts without, unless calls are required.

        `special` are the special tokens, by their texts. `content` is the grammar of texts without calls, if they have
        one. Raises InvalidRequest.
        """
        required, marker = use.is_required, self.marker
        arguments = [
            json_rule(_OBJECT if f.parameters is None else f.parameters, lenient=not (required or f.strict))
            for f in use.functions
        ]
        names = [f.name for f in use.functions]
        rules = [f"call_{n}: {_rule(names[n] + self.middle, special)} {rule}" for n, rule in enumerate(arguments)]
        rules.append("call: " + " | ".join(f"call_{n}" for n in range(len(names))))
        more = ""
        if use.is_parallel and self.between is not None:
            more = f"({_rule(self.between, special)} call)*"
        rest = f"{more} {_rule(self.after, special)}"
        if required:
            return "\n".join([f"start: {_rule(self.before, special)} call {rest}", *rules])
        if content is not None and marker is None:
            raise InvalidRequest("a schema of texts beside tools needs a model that marks calls; set tool_choice")
        # A text with a schema has nothing before its calls.
        text, leading = ("TEXT", "TEXT") if content is None else (content.removeprefix("start: "), "")
        rules += [f"TEXT: /{_ANY}/"] if content is None else []
        if marker is None:
            heads = [f"{self.before}{name}{self.middle}" for name in names]
            others = "|".join(map(_escaped, heads))
            rules += [f"HEAD_{n}: {literal(head)}" for n, head in enumerate(heads)]
            rules += [f"OTHER: /{_ANY}/ & ~/({others}){_ANY}/"]
            first = " | ".join(f"HEAD_{n} {rule}" for n, rule in enumerate(arguments))
            return "\n".join([f"start: OTHER | ({first}) {rest}", *rules])
        body = f"{_rule(self.before.removeprefix(marker), special)} call {rest}"
        if marker in special:
            return "\n".join([f"start: {text} | {leading} <[{special[marker]}]> {body}", *rules])
        if content is not None:
            return "\n".join([f"start: {text} | {literal(marker)} {body}", *rules])
        return "\n".join([f"start: TEXT | head {body}", f"head[lazy]: /{_ANY}{_escaped(marker)}/", *rules])


def _rule(text: str, special: Mapping[str, int]) -> str:
    """Return the part of a rule that stands for a text in which special tokens are tokens."""
    names = sorted((name for name in special if name and name in text), key=len, reverse=True)
    parts = re.split("|".join(f"({re.escape(name)})" for name in names), text) if names else [text]
    return " ".join(f"<[{special[part]}]>" if part in names else literal(part) for part in parts if part)


def _escaped(text: str) -> str:
    """Return a regular expression of a text, between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


class CallParser:
    """Divides a text that arrives in pieces into its content and calls."""

    def __init__(self, form: CallForm, use: ToolUse) -> None:
        self._form = form
        self._heads = [f"{form.before}{function.name}{form.middle}" for function in use.functions]
        self._stage: Literal["content", "name", "arguments", "next"] = "content"
        self._rest = ""
        """Text that is not divided yet."""
        self._may_begin = form.marker is None
        """Whether the text may yet begin as a call does. In forms with a marker, calls may follow other text."""
        self._depth, self._in_string, self._is_escaped = 0, False, False
        self.content = ""
        self.calls: list[dict[str, Any]] = []
        """In OpenAI's form."""

    def push(self, piece: str, *, is_last: bool = False) -> dict[str, Any]:
        """Add a piece, and return what it adds, as OpenAI's delta of a message."""
        self._rest += piece
        deltas: list[dict[str, Any]] = []
        content = self._content(is_last) if self._stage == "content" else ""
        while self._advance(deltas):
            pass
        self.content += content
        return ({"content": content} if content else {}) | ({"tool_calls": deltas} if deltas else {})

    def _content(self, is_last: bool) -> str:
        """Take the text that is certainly not of a call."""
        rest, marker = self._rest, self._form.marker
        sent = len(rest)
        if marker is None and self._may_begin:
            if any(rest.startswith(head) for head in self._heads):
                self._stage, sent = "name", len(self._form.before)
                self._rest = rest[sent:]
                return ""
            self._may_begin = not is_last and any(head.startswith(rest) for head in self._heads)
            sent = 0 if self._may_begin else sent
        elif marker is not None and (place := rest.find(self._form.before)) >= 0:
            self._stage, self._rest = "name", rest[place + len(self._form.before) :]
            return rest[:place].rstrip()
        elif marker is not None and not is_last:
            begins = rest.find(marker)
            held = (n for n in range(min(len(marker), len(rest)), 0, -1) if marker.startswith(rest[-n:]))
            # Space in front of calls is not part of the content.
            sent = len(rest[: begins if begins >= 0 else len(rest) - next(held, 0)].rstrip())
        self._rest = rest[sent:]
        return rest[:sent]

    def _advance(self, deltas: list[dict[str, Any]]) -> bool:
        """Take the next part of a call, and return whether there may be another one."""
        form, rest, index = self._form, self._rest, len(self.calls) - 1
        if self._stage == "name" and (place := rest.find(form.middle)) >= 0:
            # Some models' templates refuse longer identifiers.
            call = {"id": uuid.uuid4().hex[:9], "type": "function"}
            function = {"name": rest[:place], "arguments": ""}
            self.calls.append({**call, "function": dict(function)})
            deltas.append({"index": index + 1, **call, "function": function})
            self._stage, self._rest = "arguments", rest[place + len(form.middle) :]
            return True
        if self._stage == "arguments" and rest:
            taken = self._end_of_object(rest)
            self._rest = rest[taken:]
            self.calls[-1]["function"]["arguments"] += rest[:taken]
            if deltas and deltas[-1]["index"] == index:
                deltas[-1]["function"]["arguments"] += rest[:taken]
            else:
                deltas.append({"index": index, "function": {"arguments": rest[:taken]}})
            self._stage = "arguments" if self._depth else "next"
            return self._stage == "next"
        if self._stage == "next" and form.between is not None and rest.startswith(form.between):
            self._stage, self._rest = "name", rest[len(form.between) :]
            return True
        return False

    def _end_of_object(self, text: str) -> int:
        """Return how much of a text belongs to the object that has begun."""
        for place, letter in enumerate(text):
            if self._is_escaped or letter == "\\":
                self._is_escaped = not self._is_escaped
            elif letter == '"':
                self._in_string = not self._in_string
            elif not self._in_string and letter in "{[":
                self._depth += 1
            elif not self._in_string and letter in "]}":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return len(text)
