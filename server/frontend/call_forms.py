"""How a language model writes calls of tools, which its chat template shows."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from cohabit.server.errors import InvalidRequest
from cohabit.server.frontend.templates import ChatTemplates, rendered
from cohabit.server.ipc.model import LanguageDocument
from cohabit.server.protocol.tools import CallForm

_OFFERED, _CALLED, _CONTENT = "offered_tool", ("first_called", "second_called"), "A said text."
_IDS = ("aB3dE5gH7", "zY9xW7vU5")
_ARGUMENTS = {"key_of_call": "value_of_call"}
_PARAMETERS = {"type": "object", "properties": {"key_of_call": {"type": "string"}}}
_TOOLS = [{"type": "function", "function": {"name": _OFFERED, "description": "It is.", "parameters": _PARAMETERS}}]
_KNOWN = (
    "a name, and arguments as JSON, as in <tool_call>{...}</tool_call> of Hermes and Qwen, [TOOL_CALLS] [{...}] of"
    ' Mistral, and {"name": ..., "parameters": ...} of Llama 3'
)


class CallForms:
    """By model. Belongs to the event loop's thread; templates are rendered on others."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates
        self._found: dict[str, tuple[LanguageDocument, CallForm]] = {}

    async def of(self, model: str, document: LanguageDocument, ends: Sequence[str]) -> CallForm:
        """Return how a model writes calls. `ends` are the texts of tokens that end a text.

        Raises InvalidRequest as `call_form` does.
        """
        known = self._found.get(model)
        if known is None or known[0] != document:
            form = await self._templates.call(model, call_form, model, document, ends)
            known = self._found[model] = document, form
        return known[1]


def call_form(model: str, document: LanguageDocument, ends: Sequence[str]) -> CallForm:
    """Find the form in renderings of a conversation, with and without calls.

    Raises InvalidRequest if the template shows no tools, or shows calls in another form than names and JSON.
    """

    def text_of(answer: dict[str, Any], ids: Sequence[str] = ()) -> str:
        results = [{"role": "tool", "tool_call_id": one, "name": _CALLED[0], "content": "{}"} for one in ids]
        if ids:
            results.append({"role": "assistant", "content": "So it is."})
        # Templates may treat the messages after the user's last one differently, and earlier ones alike.
        asked, thanked = ({"role": "user", "content": text} for text in ("Is it?", "Thanks."))
        messages = [asked, {"role": "assistant", **answer}, *results, thanked]
        return rendered(model, document, messages, _TOOLS)

    def calling(count: int) -> str:
        calls = [
            {"id": one, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}
            for one, name in zip(_IDS[:count], _CALLED, strict=False)
        ]
        return text_of({"content": "", "tool_calls": calls}, _IDS[:count])

    said = text_of({"content": _CONTENT})
    if _OFFERED not in said:
        raise InvalidRequest(f"the chat template of model '{model}' shows no tools to it; leave tools out")
    unknown = InvalidRequest(
        f"the chat template of model '{model}' does not show how it calls tools; known forms have {_KNOWN}; leave tools"
        " out"
    )
    try:
        once = calling(1)
        start, name_end, arguments, end = _places(once, _CALLED[0])
    except (InvalidRequest, ValueError) as error:
        raise unknown from error
    try:
        twice = calling(2)
        between = twice[_places(twice, _CALLED[0])[-1] : _places(twice, _CALLED[1])[0]]
    except (InvalidRequest, ValueError):
        between = None  # the template takes one call only
    header = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(once, said, strict=False)))
    header = min(header, said.index(_CONTENT))
    places = [place for text in ends if (place := once.find(text, end)) >= 0]
    if not places or start < header:
        raise unknown
    if between is not None and any(text in between for text in ends):
        between = None
    form = CallForm(
        _without_id(once[header:start]),
        _without_id(once[name_end:arguments]),
        None if between is None else _without_id(between),
        _without_id(once[end : min(places)]),
    )
    if any(one in part for one in _IDS for part in (form.before, form.middle, form.between or "", form.after)):
        raise unknown
    return form


def _places(text: str, name: str) -> tuple[int, int, int, int]:
    """Return the start and end of a called name, and those of its arguments. Raises ValueError without them."""
    start = text.index(name)
    end = start + len(name)
    for found in re.finditer(r"\{", text[end:]):
        place = end + found.start()
        with suppress(ValueError):
            value, arguments_end = json.JSONDecoder().raw_decode(text, place)
            if value == _ARGUMENTS:
                return start, end, place, arguments_end
    raise ValueError("the arguments are not JSON")


def _without_id(text: str) -> str:
    """Return a part of calls without the identifier that the client gave: models write none."""
    one = f'"id": ?"({"|".join(_IDS)})"'
    return re.sub(f", ?{one}|{one}, ?", "", text)
