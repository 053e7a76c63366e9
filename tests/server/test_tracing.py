"""Traced requests: traceparent over both protocols, trace settings, and spans in a file that Perfetto opens."""

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from cohabit.server.errors import ConfigError
from cohabit.server.log import configure_logging
from cohabit.server.observe.request_trace import CURRENT, new_context
from cohabit.server.observe.trace_file import TraceFile
from tests.support.server.server_fakes import FakeServable, Running, broken, eventually, identity, running, serving
from tests.support.server.server_http import ask, infer, x

pytestmark = pytest.mark.process

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"


def standard() -> tuple[FakeServable, ...]:
    return identity("id", "FP32"), broken()


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[Running, Path]]:
    path = tmp_path / "trace.json"
    with running(serving(*standard()), trace={"file": str(path), "rate": "1"}) as handle:
        yield handle, path


def written(handle: Running, path: Path) -> list[dict[str, Any]]:
    handle.stop()
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def spans(events: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Starts and ends in microseconds, by request and name."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "b":
            found.setdefault(event["id"], {})[event["name"]] = (event["ts"], float("nan"))
        elif event["ph"] == "e":
            start, _ = found[event["id"]][event["name"]]
            found[event["id"]][event["name"]] = (start, event["ts"])
    return found


def test_a_traced_request_is_a_sequence_of_spans(tmp_path: Path) -> None:
    slow = FakeServable(identity("id", "FP32").info, lambda x: time.sleep(0.3) or {"y": x})  # longer than its stall
    with running(serving(slow), trace={"file": str(tmp_path / "trace.json"), "rate": "1"}) as handle:
        assert infer(handle, "id", {"inputs": [x()]}).status == 200
        (request,) = spans(written(handle, tmp_path / "trace.json")).values()
    names = ["decode", "queue", "prepare", "swap stall", "compute", "encode"]
    assert list(request) == ["id", *names]
    for before, after in pairwise(names):
        assert request[before][1] == request[after][0]
    assert request["id"] == (request["decode"][0], request["encode"][1])
    assert all(start <= end for start, end in request.values())
    stall_us = request["swap stall"][1] - request["swap stall"][0]
    assert stall_us == pytest.approx(0.25e6)  # what the fake says that it waited


def test_spans_nest_in_the_order_of_the_file(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    for _ in range(3):
        assert infer(handle, "id", {"inputs": [x()]}).status == 200
    open_spans: dict[str, list[str]] = {}
    last_us: dict[str, float] = {}
    for event in (e for e in written(handle, path) if e["ph"] in "be"):
        stack = open_spans.setdefault(event["id"], [])
        assert event["ts"] >= last_us.get(event["id"], 0.0)
        last_us[event["id"]] = event["ts"]
        if event["ph"] == "b":
            stack.append(event["name"])
        else:
            assert stack.pop() == event["name"]
    assert len(open_spans) == 3
    assert not any(open_spans.values())


def test_executions_are_on_the_devices_track(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    assert infer(handle, "id", {"inputs": [x([0] * 8, shape=[2, 4])]}, {"traceparent": HEADER}).status == 200
    events = written(handle, path)
    (execution,) = [event for event in events if event["ph"] == "X"]
    assert (execution["name"], execution["args"]["rows"]) == ("id", 2)
    assert execution["args"]["swapped_bytes"] == 1000
    assert execution["args"]["trace_id"] == TRACE
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        "requests",
        "device",
        "compute lane",
        "swap-in lane",
        "swap-out lane",
    }


def test_errors_are_traced_with_their_kind(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    assert infer(handle, "broken", {"inputs": [x()]}).status == 500
    (begin,) = [event for event in written(handle, path) if event["ph"] == "b"]
    assert begin["args"]["error"] == "ExecutionFailed"


def test_every_nth_request_of_a_model_is_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with running(serving(*standard()), trace={"file": str(path), "rate": "3"}) as handle:
        assert all(infer(handle, "id", {"inputs": [x()]}).status == 200 for _ in range(7))
        assert all(infer(handle, "broken", {"inputs": [x()]}).status == 500 for _ in range(2))
        assert len(spans(written(handle, path))) == 2


def test_settings_show_what_the_flag_says(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    settings = ask(handle, "GET", "/v2/models/id/trace/setting").json
    assert settings["trace_file"] == str(path)
    assert (settings["trace_level"], settings["trace_rate"]) == (["TIMESTAMPS"], "1")


def test_a_single_trace_is_in_the_file_while_the_server_runs(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    assert infer(handle, "id", {"inputs": [x()]}).status == 200
    eventually(lambda: b"encode" in path.read_bytes())
    assert json.loads(path.read_bytes() + b"]")


def test_http_passes_the_callers_trace_on() -> None:
    with running(serving(*standard())) as own:
        answer = infer(own, "id", {"inputs": [x()]}, {"traceparent": HEADER})
        version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
        assert (version, trace_id, flags) == ("00", TRACE, "01")
        assert span_id not in (PARENT, "0" * 16)
        failed = infer(own, "nobody", {"inputs": [x()]}, {"traceparent": HEADER})
        assert failed.status == 404
        assert TRACE in failed.headers["traceparent"]
        assert "traceparent" not in infer(own, "id", {"inputs": [x()]}).headers


def test_grpc_passes_the_callers_trace_on() -> None:
    with running(serving(*standard())) as own, grpc.insecure_channel(own.grpc) as channel:
        request = pb.ModelInferRequest(model_name="id", raw_input_contents=[np.ones(4, np.float32).tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        _, call = stub.ModelInfer.with_call(request, metadata=(("traceparent", HEADER),))
        assert TRACE in dict(call.initial_metadata())["traceparent"]
        _, call = stub.ModelInfer.with_call(request)
        assert "traceparent" not in dict(call.initial_metadata())


def test_requests_of_a_grpc_stream_are_traced_each(traced: tuple[Running, Path]) -> None:
    handle, path = traced
    request = pb.ModelInferRequest(model_name="id", raw_input_contents=[np.ones(4, np.float32).tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    with grpc.insecure_channel(handle.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = list(stub.ModelStreamInfer(iter([request] * 3), metadata=(("traceparent", HEADER),)))
    assert len(answers) == 3
    begun = [e for e in written(handle, path) if e["ph"] == "b" and e["name"] == "id"]
    assert len({event["id"] for event in begun}) == 3
    assert {event["args"]["trace_id"] for event in begun} == {TRACE}
    assert {event["args"]["parent_id"] for event in begun} == {PARENT}


def test_log_lines_of_a_traced_request_have_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    kept = logging.getLogger().handlers[:]
    try:
        configure_logging("json")
        with running(serving(*standard())) as own:
            ask(own, "POST", "/v2/logging", b'{"log_verbose_level": 1}')
            assert infer(own, "id", {"inputs": [x()], "id": "r7"}, {"traceparent": HEADER}).status == 200
            assert infer(own, "broken", {"inputs": [x()], "id": "r8"}, {"traceparent": HEADER}).status == 500
            ask(own, "POST", "/v2/logging", b'{"log_verbose_level": 0}')
    finally:
        logging.getLogger().handlers[:] = kept
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    answered, failed = [event for event in events if event["event"] == "request"]
    assert {answered["trace_id"], failed["trace_id"]} == {TRACE}
    assert (answered["request"], failed["request"]) == ("r7", "r8")
    assert ("error" in answered, failed["error"]) == (False, "ExecutionFailed")
    (failure,) = [event for event in events if event["event"] == "execution failed"]
    assert (failure["model"], failure["request"]) == ("broken", "r8")


def test_a_request_without_traceparent_is_not_traced_without_a_file() -> None:
    seen = []
    model = identity("id", "FP32")
    with running(serving(model)) as own:
        attach = own.server.plane.tracer.attach
        own.server.plane.tracer.attach = lambda r: seen.append(CURRENT.get()) or attach(r)  # type: ignore
        assert infer(own, "id", {"inputs": [x()]}).status == 200
        assert infer(own, "id", {"inputs": [x()]}, {"traceparent": HEADER}).status == 200
    assert seen[0] is None
    assert seen[1] is not None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        f"00-{TRACE}-{PARENT}",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        "x" * 10_000,
    ],
)
def test_a_malformed_traceparent_begins_a_trace_of_its_own(header: str) -> None:
    context = new_context(header)
    assert context.trace_id != TRACE
    assert context.parent_id is None
    assert new_context(context.header).trace_id == context.trace_id


def test_later_versions_of_traceparent_are_read_as_far_as_they_are_known() -> None:
    context = new_context(f"cc-{TRACE}-{PARENT}-03-what-the-future-brings")
    assert (context.trace_id, context.parent_id, context.flags) == (TRACE, PARENT, 1)
    assert context.header.startswith(f"00-{TRACE}-")


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--trace-config: .*nowhere/t\.json cannot be written: No such file"):
        TraceFile(tmp_path / "nowhere" / "t.json")


def test_a_full_file_takes_no_more_and_stays_sound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "t.json", most_bytes=100)
    for n in range(50):
        file.write([{"ph": "X", "ts": n}])
    file.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert 1 < sum(event["ph"] == "X" for event in events) < 10
    assert caplog.text.count("the trace file is full") == 1


def test_events_are_in_the_file_within_a_second_or_so(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "t.json")
    file.write([{"ph": "X", "name": "request"}])
    file.write([{"ph": "X", "name": "with it"}])
    file.write([{"ph": "X", "name": "another"}])
    file.write([{"ph": "X", "name": "lanes"}])
    eventually(lambda: b"lanes" in (tmp_path / "t.json").read_bytes())
    file.close()
    file.write([{"ph": "X", "name": "too late"}])
    events = json.loads((tmp_path / "t.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "X"] == ["request", "with it", "another", "lanes"]


def test_a_trace_that_cannot_be_encoded_costs_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "t.json")
    file.write([{"ph": "X", "name": object()}])
    file.write([{"ph": "X", "name": "sound"}])
    file.close()
    events = json.loads((tmp_path / "t.json").read_text())
    assert [event["name"] for event in events if event["ph"] == "X"] == ["sound"]
    assert "could not be encoded" in caplog.text


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector of OTLP over HTTP: its URL, and the spans that it has received."""
    received: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            asked = ExportTraceServiceRequest.FromString(body)
            (resource,) = asked.resource_spans
            name = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
            received.extend((name, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_traced_requests_reach_an_opentelemetry_collector() -> None:
    began_ns = time.time_ns()
    with collector() as (url, received):
        with running(serving(*standard()), trace={"otlp": url, "rate": "2"}) as handle:
            settings = ask(handle, "GET", "/v2/trace/setting").json
            for _ in range(4):
                assert infer(handle, "id", {"id": "seven", "inputs": [x()]}, {"traceparent": HEADER}).status == 200
            assert infer(handle, "broken", {"inputs": [x()]}).status == 500
            assert infer(handle, "broken", {"inputs": [x()]}).status == 500
        assert (settings["trace_level"], settings["trace_mode"]) == (["TIMESTAMPS"], "opentelemetry")
        assert {name for name, _ in received} == {"cohabit"}
        found = [span for _, span in received]
    requests = [span for span in found if span.name in ("id", "broken")]
    assert [span.name for span in requests] == ["id", "id", "broken"], "every second request of each model"
    assert [span.status.code for span in requests] == [Status.STATUS_CODE_UNSET] * 2 + [Status.STATUS_CODE_ERROR]
    first = requests[0]
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    attributes = {a.key: a.value.string_value for a in first.attributes}
    assert (attributes["cohabit.model"], attributes["cohabit.request"]) == ("id", "seven")
    stages = [span for span in found if span.parent_span_id == first.span_id]
    assert [span.name for span in stages][:2] == ["decode", "queue"]
    assert stages[-1].name == "encode"
    assert all(began_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns() for span in found)
    assert {span.trace_id for span in stages} == {first.trace_id}


def test_a_collector_that_does_not_answer_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with running(serving(*standard()), trace={"otlp": url, "rate": "1"}) as handle:
        assert infer(handle, "id", {"inputs": [x()]}).status == 200
    assert any(record.name.startswith("opentelemetry") for record in caplog.records)
