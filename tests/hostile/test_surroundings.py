"""What else a client or a machine can do: names, shared memory of others, descriptors, indices, floods of faults."""

import errno
import json
import logging
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cohabit.server import log
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.engine.device_thread import _error_of
from cohabit.server.errors import ConfigError, ExecutionFailed, InvalidRequest, Overloaded
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.process.engine import Engine
from cohabit.server.process.engine_connection import EngineConnection
from cohabit.server.process.in_process import InProcessEngine
from cohabit.server.protocol.shared_memory import Regions, SystemRequest, open_region
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import Unloadable
from tests.support.e2e.machine import tmpfs
from tests.support.server.server_http import infer, x
from tests.support.server.transport_fakes import MIB, identity, running


def test_a_folder_whose_name_is_no_text_is_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/bad\xff\xfe")
    (found,) = scan(tmp_path)
    assert isinstance(found, Unloadable)
    assert found.name == r"bad\xff\xfe"
    assert msgspec.msgpack.encode((found.name, found.reason)), "it can be sent to the front end"


@pytest.fixture
def shared() -> SystemRequest:
    path = Path("/dev/shm/cohabit-hostile-test")
    path.write_bytes(bytes(64))
    yield SystemRequest("region", path.name, 0, 64)  # type: ignore[misc]
    path.unlink()


def test_shared_memory_of_other_users_is_refused(shared: SystemRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_region(shared).nbytes == 64
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidRequest, match=r"belongs to another user.*--client-shm any-user"):
        open_region(shared)
    assert open_region(shared, any_user=True).nbytes == 64


def test_shared_memory_leaves_descriptors_for_connections(
    shared: SystemRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (6, 6))
    with pytest.raises(InvalidRequest, match="half of the files"):
        open_region(shared)


def test_requests_are_refused_where_the_system_has_no_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write to a page that cannot be had would end the process."""
    with running(identity("one"), queue_bytes=8 * MIB) as server:
        data = json.dumps({"inputs": [x()]}).encode()
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", no_space)
            refused = infer(server, "one", data)
            assert (refused.status, "no memory" in refused.error) == (503, True)
            assert refused.headers["retry-after"] == "1"
            assert server.plane.memory.used_bytes == 0
        assert infer(server, "one", data).status == 200


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_body_that_is_announced_takes_no_pages_before_it_comes() -> None:
    with running(identity("one"), queue_bytes=64 * MIB, max_body_bytes=32 * MIB) as server:
        memory = server.plane.memory
        before = os.fstat(memory.descriptor).st_blocks
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
            head = b"POST /v2/models/one/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
            head += b"Inference-Header-Content-Length: 9\r\nContent-Length: %d\r\n\r\n" % (32 * MIB)
            client.sendall(head)
            assert client.recv(12) == b"HTTP/1.1 100"
            assert memory.used_bytes >= 32 * MIB
            assert os.fstat(memory.descriptor).st_blocks == before


def test_a_server_without_shared_memory_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", no_space)
    with pytest.raises(ConfigError, match=r"--queue-memory: .* no shared memory of 64\.0 KiB: No space"):
        RequestMemory(1 << 16)


def test_request_memory_on_a_full_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "small", "1M") as folder:
        flags = os.O_RDWR | os.O_CREAT
        monkeypatch.setattr(os, "memfd_create", lambda name, *_: os.open(folder / name, flags))
        memory = RequestMemory(8 * MIB)
        with memory.lease() as lease:
            lease.allocate(MIB // 2)[:] = bytes(MIB // 2)
            with pytest.raises(Overloaded, match="No space left"):
                lease.allocate(MIB)
        with memory.lease() as lease:
            lease.allocate(MIB // 2)[:] = bytes(MIB // 2)
        memory.close()


def test_a_region_whose_pages_cannot_be_had_is_the_clients(
    shared: SystemRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = open_region(shared)
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(InvalidRequest, match="region 'region' cannot be written: No space left"):
        region.write(0, memoryview(bytes(64)))


@pytest.mark.parametrize(
    "text",
    [
        "index out of range in self",
        "index 9 is out of bounds for dimension 0 with size 3",
        "indices x out of range",
        "Index 2 of input takes value 99999 which is not in the valid range [0, 9000)",
        "embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be -1",
        "Expected i < index_size to be true, but got false.",
    ],
)
def test_an_index_out_of_range_is_the_clients_fault(text: str, caplog: pytest.LogCaptureFixture) -> None:
    request = Request(ModelKey("m", 1), {}, 1, ())
    assert isinstance(_error_of(request, RuntimeError(text)), InvalidRequest)
    assert caplog.records == []
    assert isinstance(_error_of(request, RuntimeError("a kernel failed")), ExecutionFailed)


class Limited(logging.Handler):
    """Keeps the records that a flood's filter passes. The test sets its clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.records: list[logging.LogRecord] = []
        self.flood = log.FloodFilter(lambda: self.now_s)
        self.addFilter(self.flood)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def take(self) -> list[logging.LogRecord]:
        taken, self.records = self.records, []
        return taken


@pytest.fixture
def limited() -> Iterator[Limited]:
    handler = Limited()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def fail_encoding(*numbers: int) -> None:
    for n in numbers:
        logging.getLogger("grpc._cython.cygrpc").error("Invalid encoding on %s", n)


def test_floods_of_one_fault_are_logged_in_part(limited: Limited) -> None:
    fail_encoding(*range(1000))
    assert [record.getMessage() for record in limited.take()] == [f"Invalid encoding on {n}" for n in range(10)]
    logging.getLogger("cohabit.grpc").error("another")
    assert [record.getMessage() for record in limited.take()] == ["another"]
    limited.now_s += 1.0
    fail_encoding(0)
    report, record = limited.take()
    assert report.getMessage() == "and 990 more of this kind, which were not logged"
    assert (report.levelname, report.name) == ("ERROR", "grpc._cython.cygrpc")
    assert record.getMessage() == "Invalid encoding on 0"


def test_what_a_flood_has_suppressed_is_reported_with_the_next_record_of_any_kind(limited: Limited) -> None:
    fail_encoding(*range(15))
    limited.take()
    limited.now_s += 60.0
    logging.getLogger("cohabit.grpc").error("another")
    report, record = limited.take()
    assert report.getMessage() == "and 5 more of this kind, which were not logged"
    assert report.fields == {"kind": "Invalid encoding on %s"}  # type: ignore[attr-defined]
    assert record.getMessage() == "another"
    limited.flood.report()
    assert limited.take() == [], "each is counted once"


def test_every_kind_that_a_flood_suppressed_is_reported(limited: Limited) -> None:
    for kind in range(30):
        for _ in range(12):
            logging.getLogger("cohabit.grpc").error(f"kind {kind}")
    limited.take()
    limited.flood.report()
    assert [record.getMessage() for record in limited.take()] == [
        "and 2 more of this kind, which were not logged"
    ] * 30


def test_a_model_that_left_the_repository_fails_visibly_after_a_restart(tmp_path: Path) -> None:
    published: list[ModelEntry] = []
    engine = Engine(ServeConfig(tmp_path, FixedSize(1 << 20)), published.append)
    found = engine._served([ModelEntry("gone", 2, ModelState.READY)])
    assert engine._register(found.keys(), found["gone"]) == []
    entry = published[-1]
    assert (entry.key, entry.state) == (("gone", 2), ModelState.UNAVAILABLE)
    assert "no longer in the repository" in entry.reason


async def test_a_server_is_not_ready_before_its_models_are_registered(tmp_path: Path) -> None:
    config, memory = ServeConfig(tmp_path, FixedSize(1 << 20)), RequestMemory(1 << 16)
    catalog = Catalog()
    local = InProcessEngine(Engine(config, catalog.update), catalog)
    for client in (EngineConnection(memory), local):
        plane = DataPlane(config, client, memory, Regions())
        assert plane.not_ready() == "the server is not ready; the engine is starting"
        assert not plane.is_ready("any", None)
    memory.close()
