"""Calls of tools: what chat templates show, what texts say, and how answers tell it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from transformers import PreTrainedTokenizerFast

from cohabit.server.errors import InvalidRequest
from cohabit.server.frontend.call_forms import call_form
from cohabit.server.frontend.templates import rendered
from cohabit.server.ipc.model import LanguageDocument
from cohabit.server.protocol.tools import CallForm, CallParser, Function, ToolUse
from tests.support.server.noise_model import Noise, byte_fallback, byte_level, served
from tests.support.server.server_http import ask
from tests.support.server.tool_templates import HERMES, LLAMA, MISTRAL, TAGGED
from tests.support.server.transport_fakes import Ports

SPECIAL = {"bos_token": "", "eos_token": "<end>"}
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "tagged": TAGGED}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
TREE = {
    "type": "function",
    "function": {
        "name": "plant",
        "parameters": {
            "type": "object",
            "properties": {"root": {"$ref": "#/$defs/node"}},
            "required": ["root"],
            "additionalProperties": False,
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}},
                    "required": ["left"],
                    "additionalProperties": False,
                }
            },
        },
    },
}
TOOLS = [WEATHER, TREE]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"place": "Sao \\"Tom\\u00e9\\"", "unit": "C"}'},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "Is it warm?"}],
    "result": [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "31 C"},
    ],
    "thanks": [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "31 C"},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "Thanks."},
    ],
}


def document(template: str) -> LanguageDocument:
    return LanguageDocument(chat_template=template, special_tokens=SPECIAL)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_tools_and_their_results_are_rendered_as_by_transformers(
    template: str, tools: list[Any] | None, conversation: str
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<end>", bos_token="")
    messages = CONVERSATIONS[conversation]
    theirs = json.loads(json.dumps(messages))
    for message in theirs:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if message["content"] is None:
            del message["content"]
    try:
        whole = tokenizer.apply_chat_template(
            theirs, tools=tools, chat_template=TEMPLATES[template], tokenize=False, add_generation_prompt=True
        )
    except Exception:
        with pytest.raises(InvalidRequest):
            rendered("m", document(TEMPLATES[template]), messages, tools)
    else:
        assert rendered("m", document(TEMPLATES[template]), messages, tools) == whole


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (
            HERMES,
            CallForm(
                '<tool_call>\n{"name": "',
                '", "arguments": ',
                '}\n</tool_call>\n<tool_call>\n{"name": "',
                "}\n</tool_call>",
            ),
        ),
        (LLAMA, CallForm('{"name": "', '", "parameters": ', None, "}")),
        (MISTRAL, CallForm('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]")),
        (TAGGED, CallForm("<function=", ">", "</function><function=", "</function>")),
    ],
    ids=TEMPLATES,
)
def test_the_form_of_calls_is_that_of_the_template(template: str, form: CallForm) -> None:
    assert call_form("m", document(template), ["<end>"]) == form


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for m in messages %}{{ m.content }}<end>{% endfor %}", "shows no tools"),
        (
            "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<end>{% endfor %}",
            "does not show how it calls",
        ),
        (HERMES.replace("tool_call.arguments | tojson", "tool_call.arguments | items | list"), "does not show how"),
        (HERMES.replace("<end>", "<stop>"), "does not show how"),
    ],
)
def test_templates_that_show_no_calls_are_refused(template: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        call_form("m", document(template), ["<end>"])


FORMS = {name: call_form("m", document(template), ["<end>"]) for name, template in TEMPLATES.items()}
USE = ToolUse([Function("f"), Function("long.name")], False, True)


def said_calls(form: CallForm, calls: list[tuple[str, str]]) -> str:
    between = form.between or ""
    return form.before + between.join(f"{name}{form.middle}{arguments}" for name, arguments in calls) + form.after


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("content", ["", "I look it up.", "a < b <tool", '{"name": 1'])
@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_a_text_in_pieces_has_the_calls_of_the_whole(name: str, count: int, content: str, size: int) -> None:
    form = FORMS[name]
    if count and ((content and form.marker is None) or (count > 1 and form.between is None)):
        return  # these texts have one call, or nothing else
    calls = [("f", '{"a": "}\\n</tool_call> \\\\"}'), ("long.name", '{"b": [{}, {"c": "\\"}]"}]}')][:count]
    space = "\n\n" if content and count else ""
    text = content + space + (said_calls(form, calls) if calls else "")
    parser = CallParser(form, USE)
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    deltas = [parser.push(piece, is_last=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
    assert parser.content == "".join(delta.get("content", "") for delta in deltas) == content
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in parser.calls] == calls
    streamed = [["", ""] for _ in calls]
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        streamed[call["index"]][0] += call["function"].get("name", "")
        streamed[call["index"]][1] += call["function"]["arguments"]
    assert [tuple(call) for call in streamed] == calls


@pytest.fixture(
    scope="module",
    params=[*((byte_level, name) for name in TEMPLATES), (byte_fallback, "mistral")],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def chatting(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Ports, Noise, str]]:
    make, name = request.param
    with served(tmp_path_factory.mktemp("models"), make(), of_end(TEMPLATES[name])) as (ports, noise):
        yield ports, noise, name


def of_end(template: str) -> str:
    """Return the template with its special tokens put in."""
    return template.replace("eos_token", "'<end>'").replace("bos_token", "''")


def chat(ports: Ports, **more: Any) -> Any:
    body = {"model": "lm", "messages": CONVERSATIONS["question"], "tools": TOOLS, "seed": 1, "max_tokens": 900}
    return ask(ports, "POST", "/v1/chat/completions", json.dumps({**body, **more}).encode())


def require_valid(message: dict[str, Any], names: set[str]) -> None:
    assert message["content"] is None
    assert message["tool_calls"]
    for call in message["tool_calls"]:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "plant"}),
        ({"type": "function", "function": {"name": "plant"}}, {"plant"}),
    ],
)
def test_required_calls_are_valid_and_streamed_as_they_are_answered(
    chatting: tuple[Ports, Noise, str], choice: Any, names: set[str]
) -> None:
    ports, _, _ = chatting
    answer = chat(ports, tool_choice=choice, n=2, parallel_tool_calls=False).json
    for own in answer["choices"]:
        assert own["finish_reason"] == "tool_calls"
        require_valid(own["message"], names)
    body = chat(ports, tool_choice=choice, stream=True).body
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line and line != b"data: [DONE]"]
    assert events[-1]["choices"][0]["finish_reason"] in ("tool_calls", "length")
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert calls[0]["function"]["name"] in names
    jsonschema.validate(json.loads(arguments), SCHEMAS[calls[0]["function"]["name"]])


BEGUN = {
    "hermes": ('Well.\n<tool_call>{"name": "get_weather"', "Well."),
    "llama": ('{"name": "get_weather", "parameters": {', None),
    "mistral": ("[TOOL_CALLS]", None),
    "tagged": ("<function=plant>{", None),
}


def test_a_call_that_the_model_begins_is_valid(chatting: tuple[Ports, Noise, str]) -> None:
    ports, noise, name = chatting
    said, content = BEGUN[name]
    noise.say(said)
    (own,) = chat(ports, parallel_tool_calls=False, temperature=0).json["choices"]
    assert (own["finish_reason"], own["message"]["content"]) == ("tool_calls", content)
    require_valid(own["message"] | {"content": None}, {"get_weather", "plant"})


@pytest.mark.parametrize("said", ["No tools.<end>", '{"name": "Bob"}<end>', "a <tool_cal<end>"])
def test_a_text_without_calls_is_content(chatting: tuple[Ports, Noise, str], said: str) -> None:
    ports, noise, _ = chatting
    noise.say(said)
    (own,) = chat(ports, temperature=0).json["choices"]
    assert own["message"]["content"].strip() == said.removesuffix("<end>")
    assert (own["finish_reason"], "tool_calls" in own["message"]) == ("stop", False)


def test_a_schema_beside_tools_is_that_of_texts_without_calls(chatting: tuple[Ports, Noise, str]) -> None:
    ports, noise, name = chatting
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [["x"]]}}}
    if FORMS[name].marker is None:
        assert "a model that marks calls" in chat(ports, response_format=shape).json["error"]["message"]
        return
    noise.say("[")
    (own,) = chat(ports, response_format=shape, temperature=0).json["choices"]
    assert (json.loads(own["message"]["content"]), own["finish_reason"]) == (["x"], "stop")
    noise.say(FORMS[name].marker or "")
    (own,) = chat(ports, response_format=shape, temperature=0, parallel_tool_calls=False).json["choices"]
    require_valid(own["message"], {"get_weather", "plant"})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tool_choice": "any"}, "tool_choice is none, auto, required, or names a function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}},
            "'g' is not the name of one of the tools",
        ),
        ({"tool_choice": "required", "tools": None}, "there are no tools"),
        ({"tools": [WEATHER, WEATHER]}, "two functions have the same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "is not a name"),
        ({"tools": [{"type": "code_interpreter"}]}, "code_interpreter"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "JSON object"),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
    ],
)
def test_tools_that_are_none_are_refused_by_name(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    with served(tmp_path, byte_level(), HERMES) as (ports, _):
        answer = chat(ports, **more)
        assert (answer.status, said in answer.json["error"]["message"]) == (400, True), answer.json
