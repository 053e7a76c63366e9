"""System shared memory as tritonclient uses it, over both protocols; and what must not be read or written by it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from cohabit.server.errors import InvalidRequest
from cohabit.server.protocol.shared_memory import Regions, SystemRequest, open_region
from tests.support.server.clients import PROTOCOLS, Client, connect
from tests.support.server.server_fakes import refused
from tests.support.server.server_http import ask, infer, x
from tests.support.server.transport_fakes import Gate, Ports, identity, running

A = np.arange(4, dtype=np.float32).reshape(1, 4)
B = np.full((1, 4), 0.5, np.float32)
SHM = Path("/dev/shm")


@pytest.fixture(params=PROTOCOLS)
def client(server: Ports, request: pytest.FixtureRequest) -> Iterator[Client]:
    client = connect(server, request.param)
    with client.raw:
        client.raw.unregister_system_shared_memory()
        yield client
        client.raw.unregister_system_shared_memory()


@pytest.fixture
def key() -> Iterator[str]:
    """The key of 64 bytes of shared memory: A, B, then zeros."""
    key = f"/cohabit_test_{os.getpid()}"
    region = shm.create_shared_memory_region("region", key, 64)
    shm.set_shared_memory_region(region, [A, B])
    yield key
    shm.destroy_shared_memory_region(region)


def file_of(key: str) -> Path:
    return SHM / key.removeprefix("/")


def floats(key: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(file_of(key).read_bytes(), np.float32)


def test_inputs_and_outputs_in_shared_memory(client: Client, key: str) -> None:
    client.raw.register_system_shared_memory("in", key, 32)
    client.raw.register_system_shared_memory("out", key, 32, offset=32)
    inputs = [client.input_in("in", "a", [1, 4], "FP32", 16), client.input_in("in", "b", [1, 4], "FP32", 16, 16)]
    outputs = [client.output_in("out", "sum", 16), client.output_in("out", "diff", 16, 16)]
    answer = client.raw.infer("adder", inputs, outputs=outputs)
    np.testing.assert_array_equal(floats(key)[8:12], (A + B).ravel())
    np.testing.assert_array_equal(floats(key)[12:], (A - B).ravel())
    if client.protocol == "http":
        tensor = {"datatype": "FP32", "shape": [1, 4]}
        assert answer.get_response()["outputs"] == [{"name": "sum", **tensor}, {"name": "diff", **tensor}]
    else:
        assert [dict(output.parameters) for output in answer.get_response().outputs] == [{}, {}]
        assert list(answer.get_response().raw_output_contents) == [b"", b""]


def test_status_lists_regions_until_they_are_unregistered(client: Client, key: str) -> None:
    client.raw.register_system_shared_memory("one", key, 16, offset=8)
    client.raw.register_system_shared_memory("two", key, 32)
    assert client.system_regions() == {
        "one": {"name": "one", "key": key, "offset": 8, "byte_size": 16},
        "two": {"name": "two", "key": key, "offset": 0, "byte_size": 32},
    }
    client.raw.unregister_system_shared_memory("one")
    assert list(client.system_regions()) == ["two"]
    client.raw.unregister_system_shared_memory("never there")
    client.raw.unregister_system_shared_memory()
    assert client.system_regions() == {}
    with pytest.raises(
        InferenceServerException, match="Unable to find system shared memory region: 'one'"
    ) as caught:
        client.raw.get_system_shared_memory_status("one")
    assert client.status(caught.value) in ("404", "NOT_FOUND")


def test_a_name_is_taken_once(client: Client, key: str) -> None:
    client.raw.register_system_shared_memory("in", key, 16)
    with pytest.raises(InferenceServerException, match="shared memory region 'in' already in manager") as caught:
        client.raw.register_system_shared_memory("in", key, 16)
    assert client.status(caught.value) in ("400", "ALREADY_EXISTS")


@pytest.mark.parametrize(
    ("given", "nbytes", "offset", "message"),
    [
        ("/not_there_at_all", 16, 0, "Unable to open shared memory region: 'in'"),
        (None, 65, 0, "Invalid shared memory region: 'in': 0 \\+ 65 bytes are beyond the 64 bytes"),
        (None, 16, 49, "are beyond the 64 bytes"),
        (None, 2**62, 2**62, "are beyond the 64 bytes"),
        (None, 0, 0, "at least 1 byte"),
        ("/../etc/passwd", 16, 0, "is not usable"),
        ("/..", 16, 0, "is not usable"),
        ("a/b", 16, 0, "is not usable"),
        ("", 16, 0, "is not usable"),
        ("/sem.lock", 16, 0, "is not usable"),
        ("/" + "x" * 300, 16, 0, "is not usable"),
    ],
)
def test_bad_registrations(
    client: Client, key: str, given: str | None, nbytes: int, offset: int, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.raw.register_system_shared_memory("in", key if given is None else given, nbytes, offset)
    assert client.status(caught.value) in ("400", "INVALID_ARGUMENT")
    assert client.system_regions() == {}


@pytest.mark.parametrize("made", ["link", "folder", "pipe"])
def test_what_is_no_memory_cannot_be_registered(client: Client, tmp_path: Path, made: str) -> None:
    path = SHM / f"cohabit_{made}_{os.getpid()}"
    try:
        if made == "link":
            (tmp_path / "secret").write_bytes(bytes(64))
            path.symlink_to(tmp_path / "secret")
        elif made == "folder":
            path.mkdir()
        else:
            os.mkfifo(path)
        with pytest.raises(InferenceServerException, match=r"Unable to open|is not shared memory"):
            client.raw.register_system_shared_memory("in", f"/{path.name}", 16)
    finally:
        path.rmdir() if made == "folder" else path.unlink()


@pytest.mark.parametrize(
    ("region", "nbytes", "offset", "message"),
    [
        ("other", 16, 0, "Unable to find shared memory region: 'other'"),
        ("in", 16, 17, "Invalid offset \\+ byte size for shared memory region: 'in'"),
        ("in", 33, 0, "Invalid offset \\+ byte size"),
        ("in", 2**62, 2**62, "Invalid offset \\+ byte size"),
        ("in", 12, 0, "takes 16 bytes, got 12"),
    ],
)
def test_inputs_beyond_a_region(
    client: Client, key: str, region: str, nbytes: int, offset: int, message: str
) -> None:
    client.raw.register_system_shared_memory("in", key, 32)
    inputs = [client.input_in(region, "a", [1, 4], "FP32", nbytes, offset), client.input("b", B, "FP32")]
    with pytest.raises(InferenceServerException, match=message):
        client.raw.infer("adder", inputs)


def test_an_output_needs_room(client: Client, key: str) -> None:
    client.raw.register_system_shared_memory("out", key, 64)
    inputs = [client.input("a", A, "FP32"), client.input("b", B, "FP32")]
    before = floats(key)
    with pytest.raises(
        InferenceServerException, match=r"\[request id: 7\] .* is 15 bytes in region 'out', should be"
    ):
        client.raw.infer("adder", inputs, outputs=[client.output_in("out", "sum", 15, 32)], request_id="7")
    with pytest.raises(InferenceServerException, match="Invalid offset"):
        client.raw.infer("adder", inputs, outputs=[client.output_in("out", "sum", 16, 49)])
    np.testing.assert_array_equal(floats(key), before)


def test_a_region_that_shrinks_is_an_error_and_not_the_servers_end(client: Client, key: str) -> None:
    client.raw.register_system_shared_memory("region", key, 64)
    os.truncate(file_of(key), 8)
    inputs = [client.input_in("region", "a", [1, 4], "FP32", 16), client.input("b", B, "FP32")]
    with pytest.raises(InferenceServerException, match="'region' has shrunk since it was registered"):
        client.raw.infer("adder", inputs)
    whole = [client.input("a", A, "FP32"), client.input("b", B, "FP32")]
    with pytest.raises(InferenceServerException, match="'region' has shrunk since it was registered"):
        client.raw.infer("adder", whole, outputs=[client.output_in("region", "sum", 16, 32)])
    assert file_of(key).stat().st_size == 8
    assert client.raw.is_server_ready()


@pytest.mark.parametrize("name", ["region", None])
def test_a_region_in_use_is_unregistered_when_its_last_request_has_ended(key: str, name: str | None) -> None:
    """Triton from 24.12 on (its pull request 7743) does the same; before, the call was refused."""
    gate = Gate()
    with running(identity("gated", gate=gate)) as server, connect(server, "http").raw as client:
        made = connect(server, "http")
        client.register_system_shared_memory("region", key, 64)
        client.register_system_shared_memory("other", key, 64)
        call = client.async_infer(
            "gated",
            [made.input_in("region", "x", [1, 4], "FP32", 16)],
            outputs=[made.output_in("region", "y", 16, 32)],
        )
        assert gate.entered.acquire(timeout=20)
        connect(server, "grpc").raw.unregister_system_shared_memory(name or "")
        assert list(made.system_regions()) == (["region", "other"] if name else ["region"])
        with pytest.raises(InferenceServerException, match="'region' already in manager"):
            made.raw.register_system_shared_memory("region", key, 64)
        gate.open()
        call.get_result()
        np.testing.assert_array_equal(floats(key)[8:12], A.ravel())
        assert list(made.system_regions()) == (["other"] if name else [])


def test_descriptors_are_given_back(key: str) -> None:
    regions = Regions(open_region)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        regions.register(SystemRequest("region", key, 0, 64))
        regions.unregister("region")
        with pytest.raises(InvalidRequest):
            regions.register(SystemRequest("region", key, 0, 65))
    assert len(os.listdir("/proc/self/fd")) == before
    with refused("RegionNotFound"):
        regions.window("region", 0, 1)


@pytest.mark.parametrize("other", [{"classification": 2}, {"binary_data": True}], ids=str)
def test_an_output_goes_one_way(server: Ports, key: str, other: dict[str, Any]) -> None:
    shared = {"shared_memory_region": "only", "shared_memory_byte_size": 16}
    registration = json.dumps({"key": key, "byte_size": 64}).encode()
    assert ask(server, "POST", "/v2/systemsharedmemory/region/only/register", registration).status == 200
    try:
        outputs = [{"name": "sum", "parameters": shared | other}]
        answer = infer(server, "adder", {"inputs": [x(name="a"), x(name="b")], "outputs": outputs})
        assert answer.status == 400
        assert "output 'sum'" in answer.error
        inputs = [x(name="a", parameters=shared), x(name="b")]
        assert "must set only one of" in infer(server, "adder", {"inputs": inputs}).error
    finally:
        ask(server, "POST", "/v2/systemsharedmemory/unregister")


def test_it_is_off_where_others_can_ask(key: str) -> None:
    with running(identity("one"), client_shm=False) as server:
        for protocol in PROTOCOLS:
            client = connect(server, protocol)
            with pytest.raises(InferenceServerException, match="client shared memory is off") as caught:
                client.raw.register_system_shared_memory("in", key, 16)
            assert client.status(caught.value) in ("501", "UNIMPLEMENTED")
            assert client.system_regions() == {}
            client.raw.close()


def test_cuda_shared_memory_is_refused_without_cuda(server: Ports) -> None:
    path = "/v2/cudasharedmemory/region/r/register"
    body = b'{"raw_handle": {"b64": "' + b"A" * 88 + b'"}, "device_id": 0, "byte_size": 16}'
    answer = ask(server, "POST", path, body)
    assert answer.status == 400
    assert "GPUs not supported" in answer.error
    assert ask(server, "GET", "/v2/cudasharedmemory/status").json == []
    assert ask(server, "POST", "/v2/cudasharedmemory/region/r/unregister").status == 200
    client = connect(server, "grpc")
    with pytest.raises(InferenceServerException, match="GPUs not supported"):
        client.raw.register_cuda_shared_memory("r", b"QUFB", 0, 16)
    assert client.raw.get_cuda_shared_memory_status().regions == {}
    client.raw.unregister_cuda_shared_memory()
    client.raw.close()
