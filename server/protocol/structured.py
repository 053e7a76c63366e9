"""Requests for texts of a given structure: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`.

Each becomes a grammar in the syntax of llguidance.
"""

import json
import re
from typing import Literal

import msgspec

from cohabit.server.errors import InvalidRequest

_WHITESPACE = r"\x20|\n[\x20\x09]{0,32}"
"""Whitespace between the parts of a JSON text. It is limited, so that a model does not fill the text with it."""
_MOST_CHOICES = 1024
_ESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL)

Schema = dict[str, msgspec.Raw]

_OBJECT: Schema = {"type": msgspec.Raw(b'"object"')}


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    """A schema is obeyed whether `strict` or not."""

    schema: Schema | None = None
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    def grammar(self) -> str | None:
        """Raises InvalidRequest."""
        match self.type, self.json_schema:
            case "text", _:
                return None
            case "json_object", _:
                return grammar_of_json(_OBJECT)
            case _, NamedSchema(schema=dict(schema)):
                return grammar_of_json(schema)
        raise InvalidRequest("response_format is json_schema without a json_schema that has a schema; send it")


class TextStructure(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's `structured_outputs`, and its `guided_*` fields. One of the fields is given."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None

    def grammar(self) -> str:
        """Raises InvalidRequest."""
        given = [getattr(self, field) for field in self.__struct_fields__]
        if sum(value is not None and value is not False for value in given) != 1:
            raise InvalidRequest("structured_outputs needs exactly one of json, json_object, regex and choice")
        if self.regex is not None:
            return f"start: {_pattern(self.regex)}"
        if self.choice is not None:
            return _choice(self.choice)
        return grammar_of_json(_OBJECT if self.json is None else self.json)


def grammar_of_json(schema: Schema) -> str:
    return f"start: {json_rule(schema)}"


def json_rule(schema: Schema, *, lenient: bool = False) -> str:
    """Return the part of a rule that stands for JSON texts of this schema.

    `lenient` ignores keywords that are not supported, which otherwise are errors.
    """
    options = {"whitespace_pattern": _WHITESPACE, "whitespace_flexible": True, "lenient": lenient}
    return f"%json {msgspec.json.encode({**schema, 'x-guidance': options}).decode()}"


def literal(text: str) -> str:
    """Return the part of a rule that stands for this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pattern(regex: str) -> str:
    """Return the terminal of texts that match as a whole: slashes end a terminal, and line breaks its line."""

    def escaped(found: re.Match[str]) -> str:
        return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])

    return f"/{_ESCAPED.sub(escaped, regex)}/"


def _choice(texts: list[str]) -> str:
    if not 0 < len(texts) <= _MOST_CHOICES or "" in texts:
        raise InvalidRequest(f"a choice is between 1 to {_MOST_CHOICES} texts that are not empty")
    return "start: " + " | ".join(literal(text) for text in texts)
