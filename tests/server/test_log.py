"""The log: a record is one line, whatever clients have chosen, and nothing that was suppressed goes unmentioned."""

import io
import json
import logging
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.server.config.config import LogFormat
from cohabit.server.ipc.model import ModelKey
from cohabit.server.log import FloodFilter, configure_logging
from tests.support.server.server_fakes import broken, identity, running, serving
from tests.support.server.server_http import infer, x

pytestmark = pytest.mark.process

DANGEROUS = st.characters(categories=["Cc", "Cf", "Zl", "Zp", "Cs"]) | st.sampled_from('=" {}\\ä%')
TEXTS = (
    st.text()
    | st.text(DANGEROUS)
    | st.sampled_from(["r1\n2026-01-01 ERROR forged", "\x1b[2J", "a\u202eb", "a\x85b"])
)
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@contextmanager
def logging_as(log_format: LogFormat) -> Iterator[Callable[[], str]]:
    """Log to what the function returns that this yields, and then as before."""
    kept, hooks = logging.getLogger().handlers[:], (sys.excepthook, threading.excepthook)
    try:
        configure_logging(log_format)
        (handler,) = logging.getLogger().handlers
        assert isinstance(handler, logging.StreamHandler)
        written = io.StringIO()
        handler.setStream(written)
        (flood,) = [one for one in handler.filters if isinstance(one, FloodFilter)]
        flood._clock = lambda: 0.0  # so that everything happens within one second
        yield written.getvalue
    finally:
        logging.getLogger().handlers[:] = kept
        sys.excepthook, threading.excepthook = hooks
        logging.captureWarnings(capture=False)


def is_dangerous(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") or character in DIRECTIONS


@pytest.mark.parametrize("log_format", ["text", "json"])
@given(message=TEXTS, key=TEXTS, value=TEXTS)
def test_a_record_is_one_line_without_control_characters(
    log_format: LogFormat, message: str, key: str, value: str
) -> None:
    with logging_as(log_format) as written:
        logging.getLogger("cohabit.test").error("%s", message, extra={"fields": {key: value}})
        line = written()
    assert line.endswith("\n")
    assert not [c for c in line[:-1] if is_dangerous(c)]
    assert len(line.splitlines()) == 1


@settings(deadline=None)
@given(text=TEXTS)
def test_a_traceback_has_no_line_of_the_text_of_its_exception(text: str) -> None:
    with logging_as("text") as written:
        try:
            try:
                raise ValueError("inner " + text)
            except ValueError as error:
                raise RuntimeError("outer " + text) from error
        except RuntimeError:
            logging.getLogger("cohabit.test").exception("failed")
        lines = written().split("\n")
    assert not [c for line in lines for c in line if is_dangerous(c)]
    first = [line for line in lines if line.startswith("ValueError: inner ")]
    last = [line for line in lines if line.startswith("RuntimeError: outer ")]
    assert (len(first), len(last)) == (1, 1)
    after_last = lines[lines.index(last[0]) + 1 :]
    assert after_last == [""], "the text of an exception is one line"
    assert any(line.startswith("  File ") for line in lines), "the traceback has its own lines"


def test_a_client_cannot_write_a_line_with_the_id_of_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    kept = logging.getLogger().handlers[:]
    try:
        configure_logging("text")
        with running(serving(broken())) as own:
            body = {"inputs": [x()], "id": "r1\n2026-01-01 00:00:00,000 ERROR cohabit.engine: forged\x1b[2J"}
            assert infer(own, "broken", body).status == 500
    finally:
        logging.getLogger().handlers[:] = kept
    said = capsys.readouterr().err
    assert "request=r1\\n2026-01-01 00:00:00,000 ERROR cohabit.engine: forged\\u001b[2J" in said
    assert not [line for line in said.splitlines() if line.startswith("2026-01-01")]


def test_json_has_the_time_in_utc() -> None:
    before = datetime.now().astimezone()
    with logging_as("json") as written:
        logging.getLogger("cohabit.test").warning("something", extra={"fields": {"model": "m"}})
    event = json.loads(written())
    assert event | {"time": ""} == {
        "time": "", "level": "WARNING", "logger": "cohabit.test", "event": "something", "model": "m",
    }  # fmt: skip
    assert len(event["time"]) == len("2026-01-01T00:00:00.000Z")
    assert event["time"].endswith("Z")
    at = datetime.fromisoformat(event["time"])
    assert abs(at - before) < timedelta(minutes=1)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_start_says_how_many_models_are_not_served_and_why(log_format: LogFormat) -> None:
    """More fail within a second than records of a kind are logged."""
    loaded = serving(identity("sound", "FP32"))
    names = [f"broken_{n:02}" for n in range(19)]
    loaded.failures = {ModelKey(name, 1): "model.pt2 is truncated" for name in names[:18]}
    loaded.failures[ModelKey(names[18], 1)] = "it calls a custom operator"
    with logging_as(log_format) as written, running(loaded, strict_readiness=False):
        lines = written().splitlines()
    assert sum("model not served" in line for line in lines) == 10 + 1, "and the report of the rest"
    assert sum("and 9 more of this kind, which were not logged" in line for line in lines) == 1
    (summary,) = [line for line in lines if "models loaded" in line]
    if log_format == "json":
        event = json.loads(summary)
        assert (event["level"], event["served"], event["not_served"]) == ("WARNING", 1, 19)
        summary = event["reasons"]
    else:
        assert "WARNING" in summary
        assert "served=1 not_served=19" in summary
    assert f"{', '.join(f'{name} version 1' for name in names[:18])}: model.pt2 is truncated; " in summary
    assert summary.endswith("broken_18 version 1: it calls a custom operator")


def test_what_was_suppressed_last_is_reported_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    with logging_as("text") as written:
        for _ in range(12):
            logging.getLogger("cohabit.test").warning("the same")
        assert "and 2 more" not in written()
        (report,) = at_exit
        report()
        assert "and 2 more of this kind, which were not logged kind=the same" in written()


def test_with_json_an_unexpected_error_and_a_warning_of_python_are_records() -> None:
    def fail() -> None:
        raise ValueError("two\nlines")

    with logging_as("json") as written:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logging.captureWarnings(capture=True)
            warnings.warn("something\nis old", stacklevel=1)
        events = [json.loads(line) for line in written().splitlines()]
    failed, warned = events
    assert (failed["level"], failed["event"]) == ("CRITICAL", "unexpected error")
    assert failed["exception"].endswith("ValueError: two\nlines")
    assert "is old" in warned["event"]
