"""Chat templates: a model's own rules for turning a conversation into a text, rendered in a sandbox.

A template is a program by the model's author, in Jinja, which Hugging Face's tokenizers use. The sandbox denies it
access to the server; clients' messages are data to it.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.ipc.model import LanguageDocument

if TYPE_CHECKING:
    from jinja2 import Template

_MOST_REASON = 300
_KEPT = 16
"""Number of compiled templates kept."""


def rendered(model: str, document: LanguageDocument, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as the text that the model continues.

    Raises InvalidRequest if the template rejects the conversation, and for a model without a template.
    """
    if document.chat_template is None:
        raise InvalidRequest(
            f"model '{model}' has no chat template, so that it cannot tell messages apart; send a text to"
            " /v1/completions"
        )
    try:
        from jinja2 import TemplateError
    except ModuleNotFoundError as error:
        text = "conversations need the package jinja2; install it with pip install 'cohabit[text]'"
        raise Refused("Unsupported", text) from error
    try:
        template = _compiled(document.chat_template)
        return template.render(messages=messages, add_generation_prompt=True, **document.special_tokens)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        reason = f"{error}"[:_MOST_REASON]
        raise InvalidRequest(
            f"the chat template of model '{model}' does not take these messages: {reason}"
        ) from error


@lru_cache(_KEPT)
def _compiled(source: str) -> "Template":
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)
