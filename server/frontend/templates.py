"""Chat templates: a model's own rules for turning a conversation into a text, rendered in a sandbox.

A template is a program by the model's author, in Jinja, which Hugging Face's tokenizers use. It gets what transformers
gives it: the same variables, filters and tags. The sandbox denies it access to the server, and bounds its steps, its
time and the strings that it makes; clients' messages are data to it.
"""

import asyncio
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.ipc.model import LanguageDocument

if TYPE_CHECKING:
    from jinja2 import Template

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST_REASON = 300
_KEPT = 16
"""Number of compiled templates kept."""
_THREADS = 2
_STEPS, _STEPS_PER_MESSAGE = 50_000, 500
"""Maximum number of loop iterations and calls of one rendering."""
_MOST_S = 0.5
"""Maximum CPU time of one rendering, in seconds."""
_MOST_CHARACTERS = 4 << 20
"""Maximum length of the text, and of every string that an operation of the template makes."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; transformers fills in the first two."""
_FORMAT_WIDTH = re.compile(r"\d{5,}|\*")


class TemplateLimit(Exception):
    """A rendering has reached a limit."""


class _Budget:
    """What is left of one rendering's limits."""

    def __init__(self, messages: int) -> None:
        self._steps = _STEPS + _STEPS_PER_MESSAGE * messages
        self._end_s = time.thread_time() + _MOST_S

    def step(self) -> None:
        """Count a loop iteration or a call. Raises TemplateLimit."""
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimit("it takes too many steps")
        if time.thread_time() > self._end_s:
            raise TemplateLimit(f"it takes over {_MOST_S} s")


_budget: ContextVar[_Budget] = ContextVar("_budget")


class ChatTemplates:
    """Renders on threads of its own, one rendering per model at a time. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "templates")
        self._turns: dict[str, asyncio.Lock] = {}
        """By model."""

    async def call(self, model: str, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function that renders a model's template, such as `rendered`."""
        async with self._turns.setdefault(model, asyncio.Lock()):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, functools.partial(function, *args, **kwargs))


def rendered(
    model: str,
    document: LanguageDocument,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Return a conversation as the text that the model continues. `tools` are in OpenAI's form.

    Raises InvalidRequest if the template rejects the conversation or reaches a limit, and for a model without a
    template.
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
        template, takes_parts = _compiled(document.chat_template)
        chat = [_as_transformers(message, takes_parts) for message in messages]
        values = {**document.special_tokens, "messages": chat, "tools": tools, "documents": None}
        _budget.set(_Budget(len(chat)))
        return template.render({**values, "add_generation_prompt": True})
    except TemplateLimit as error:
        raise InvalidRequest(
            f"the chat template of model '{model}' was ended, because {error}; send fewer or shorter messages"
        ) from error
    except (
        TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, AttributeError, MemoryError
    ) as error:  # fmt: skip
        reason = f"{error}"[:_MOST_REASON]
        raise InvalidRequest(
            f"the chat template of model '{model}' does not take these messages: {reason}"
        ) from error


def _as_transformers(message: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
    """Return a message as transformers gives it to templates: without nulls, and with a reasoning's other names.

    A content in parts is joined, unless the template takes parts. Arguments of calls are objects. Raises InvalidRequest
    for calls in another form than OpenAI's.
    """
    chat = {key: value for key, value in message.items() if value is not None}
    reasoning = next((chat[key] for key in REASONING if key in chat), None)
    if reasoning is not None:
        chat = {"thinking": reasoning, **chat, "reasoning_content": reasoning}
    if isinstance(chat.get("content"), list) and not takes_parts:
        chat["content"] = "".join(str(part.get("text", "")) for part in chat["content"])
    if "tool_calls" in chat:
        chat["tool_calls"] = [_as_called(call) for call in chat["tool_calls"]]
    return chat


def _as_called(call: Any) -> Mapping[str, Any]:
    """Return a call whose arguments are an object. Raises InvalidRequest."""
    match call:
        case {"function": {"name": str(), "arguments": str(written)}}:
            with suppress(ValueError, RecursionError):
                arguments = json.loads(written)
                if isinstance(arguments, dict):
                    return {**call, "function": {**call["function"], "arguments": arguments}}
        case {"function": {"name": str(), "arguments": dict()}}:
            return call  # type: ignore[no-any-return]
    raise InvalidRequest("a call in tool_calls needs a function, with a name, and arguments that are a JSON object")


@lru_cache(_KEPT)
def _compiled(source: str) -> tuple["Template", bool]:
    """Return a template, and whether it iterates over the parts of a message's content."""
    from jinja2 import nodes

    environment = _environment()
    parsed = environment.parse(source)
    over = (loop.iter for loop in parsed.find_all(nodes.For))
    takes_parts = any(_is_content(expression) for expression in over)
    return environment.from_string(source), takes_parts


def _is_content(expression: Any) -> bool:
    """Whether an expression is the field `content` of something."""
    from jinja2 import nodes

    if isinstance(expression, nodes.Getattr):
        return expression.attr == "content"
    is_item = isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Const)
    return is_item and expression.arg.value == "content"


@lru_cache(1)
def _environment() -> Any:
    """Make the environment of all templates: that of transformers, with limits."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """`{% generation %}` marks what a trained model writes; here its body is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

        def _body(self, caller: Callable[[], str]) -> str:
            return caller()

    class Counting(NodeTransformer):
        """Lets the environment count the iterations of loops, and join strings."""

        def visit_For(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            node.iter = _called("counted", [node.iter])
            return node

        def visit_Concat(self, node: Any) -> Any:  # noqa: N802
            self.generic_visit(node)
            return _called("joined", node.nodes)

    def _called(name: str, values: list[Any]) -> Any:
        return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)

    class Limited(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "%", "**"})

        def _generate(self, source: Any, *args: Any, **kwargs: Any) -> Any:
            counting: nodes.Template = Counting().visit(source)
            counting.set_environment(self)
            return super()._generate(counting, *args, **kwargs)

        def counted(self, values: Iterable[Any]) -> Iterator[Any]:
            budget = _budget.get()
            for value in values:
                budget.step()
                yield value

        def joined(self, *values: Any) -> str:
            return self.concat(map(str, values))

        def concat(self, pieces: Iterable[str]) -> str:
            found, size = list[str](), 0
            for piece in pieces:
                size += len(piece)
                _require_length(size)
                found.append(piece)
            return "".join(found)

        def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            _budget.get().step()
            # The sandbox wraps `str.format`.
            own = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if isinstance(own, str):
                _require_short(function.__name__, own, args, kwargs)
            return super().call(context, function, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _budget.get().step()
            match operator:
                case "*":
                    _require_length(_size(left) * _size(right))
                case "+":
                    _require_length(_size(left) + _size(right) if _is_sized(left) else 0)
                case "**":
                    _require_length(abs(right) * left.bit_length() if type(left) is type(right) is int else 0)
                case "%" if isinstance(left, str):
                    _require_short("format", left, (), {})
            return super().call_binop(context, operator, left, right)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = Limited(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = as_json
    environment.filters = {name: _limited(name, function) for name, function in environment.filters.items()}
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts as a step, and makes no string over the limit."""

    @functools.wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        own = next((arg for arg in args if isinstance(arg, str)), "")
        _require_short(name, own, args[1:], kwargs)
        found = function(*args, **kwargs)
        _require_length(_size(found) if isinstance(found, str) else 0)
        return found

    return filtered


def _require_short(name: str, own: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimit for a filter or a method of the string `own` whose result may be too long."""
    given = [*args, *kwargs.values()]
    _require_length(max((abs(value) for value in given if isinstance(value, int)), default=0))
    if name in ("format", "format_map") and _FORMAT_WIDTH.search(own):
        raise TemplateLimit("it formats a text of great width")
    if name in ("replace", "join"):
        longest = max((len(value) for value in given if isinstance(value, str)), default=0)
        parts = max([len(own) + 1, *(_size(value) for value in given if _is_sized(value))])
        _require_length(longest * parts if longest > 1 << 10 else 0)


def _is_sized(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _size(value: Any) -> int:
    """Return the length of a string or list, and the value of a number."""
    return len(value) if _is_sized(value) else abs(value) if isinstance(value, int) else 0


def _require_length(length: int) -> None:
    if length > _MOST_CHARACTERS:
        raise TemplateLimit(f"it makes a text of over {_MOST_CHARACTERS} characters")
