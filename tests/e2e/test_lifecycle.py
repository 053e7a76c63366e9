"""A server's life: the same bits whatever the layout, the store, the link or the start, and an end that loses none."""

import shutil
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cohabit.planner.shapes import Bucket
from tests.support.e2e.archives import Archives
from tests.support.e2e.serving import Running, ask, eventually, infer, metric, process, serving

TRIO = ("bert_small", "ranker", "torchcrepe")
BATCHES = (1, 2, 4)
"""2 has no plan of its own and is padded to 4."""
PLANNED = (1, 4)
STREAMING = "32%"
"""Memory for the trio: hardly more than `time_shared` needs for the largest, and too little for all of them."""

Answer = Mapping[str, NDArray[Any]]


def ask_in_turns(server: Running, archives: Archives) -> list[Answer]:
    """Answers of the three models, asked one after the other, at every batch, twice."""
    return [
        infer(server.address, name, archives.inputs(name, batch))
        for _ in range(2)
        for batch in BATCHES
        for name in TRIO
    ]


def assert_same_bits(answers: list[Answer], expected: list[Answer]) -> None:
    for answer, other in zip(answers, expected, strict=True):
        assert answer.keys() == other.keys()
        for key, value in answer.items():
            np.testing.assert_array_equal(value, other[key])


@pytest.fixture(scope="module")
def resident_answers(archives: Archives) -> list[Answer]:
    """With everything in memory, nothing is ever moved."""
    with serving(
        archives.repository(*TRIO), "100%", archives.cache, layout="resident", batch_sizes=PLANNED
    ) as server:
        answers = ask_in_turns(server, archives)
        assert all(metric(server.metrics_address, "cohabit_swapped_bytes_total", name) == 0 for name in TRIO)
    return answers


@pytest.mark.parametrize(
    ("layout", "store"),
    [
        ("partitioned", "ram"),
        ("partitioned", "file"),
        ("time_shared", "file"),
        ("lru", "ram"),
        ("pipelined", "ram"),
        ("on_demand", "file"),
    ],
)
def test_layouts_and_stores_give_the_bits_of_resident_models(
    archives: Archives, resident_answers: list[Answer], layout: str, store: str
) -> None:
    repository = archives.repository(*TRIO)
    with serving(repository, STREAMING, archives.cache, layout=layout, store=store, batch_sizes=PLANNED) as server:
        assert_same_bits(ask_in_turns(server, archives), resident_answers)
        assert sum(metric(server.metrics_address, "cohabit_swapped_bytes_total", name) for name in TRIO) > 0
        uses = {extent.use for extent in server.placement.use().extents}
        assert ("partition" if layout == "partitioned" else "shared") in uses


def test_a_second_start_lowers_and_measures_nothing_and_gives_the_same_bits(
    archives: Archives, tmp_path: Path
) -> None:
    # A copy: a further hard link, for another test, would make the archive a file that has changed.
    repository, cache = tmp_path / "repository", tmp_path / "cache"
    shutil.copytree(archives.repository("ranker"), repository)
    archive = repository / "ranker" / "1" / "model.pt2"
    # One that has just changed may change again without a new time: it would be read again.
    eventually(lambda: time.time_ns() - archive.stat().st_ctime_ns > 1e9)
    inputs = archives.inputs("ranker", 4)

    def start() -> tuple[set[str], Answer]:
        with serving(repository, "50%", cache, batch_sizes=PLANNED) as server:
            stages = {stage for model, stage in server.stages if model == "ranker"}
            return stages, infer(server.address, "ranker", inputs)

    first_stages, first = start()
    files = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache.rglob("*") if path.is_file()}
    second_stages, second = start()
    assert {"tracing batches, and comparing their rows", "measuring batch 1"} < first_stages
    assert second_stages == {"preparing", "loading residents"}
    assert {path.parent.relative_to(cache).parts[0] for path in files} == {"weights", "profiles", "plans"}
    assert files == {
        path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache.rglob("*") if path.is_file()
    }
    assert_same_bits([second], [first])


def test_a_slow_link_really_slows_streaming_and_changes_no_bit(archives: Archives) -> None:
    """Copies are in order, so N inferences one after the other take the time of N - 1 inferences' bytes at least."""
    repository, inputs = archives.repository("ranker"), archives.inputs("ranker", 1)
    bandwidth_bytes_per_s, count = 30e6, 5
    taken_s, stalled_s, answers = {}, {}, []
    for limit in (None, bandwidth_bytes_per_s):
        with serving(
            repository, "50%", archives.cache, link_bandwidth_bytes_per_s=limit, batch_sizes=PLANNED
        ) as server:
            program = server.placement.models["ranker", 1].servable.programs[Bucket(1)]
            start = time.perf_counter()
            answers += [infer(server.address, "ranker", inputs) for _ in range(count)]
            taken_s[limit] = time.perf_counter() - start
            stalled_s[limit] = metric(server.metrics_address, "cohabit_stall_seconds_total", "ranker")
            swapped_bytes = metric(server.metrics_address, "cohabit_swapped_bytes_total", "ranker")
            assert swapped_bytes == count * program.link_bytes > 0
            copying_s = server.placement.models["ranker", 1].servable.executor.swap_busy_s
    least_s = (count - 1) * program.link_bytes / bandwidth_bytes_per_s
    assert taken_s[bandwidth_bytes_per_s] >= least_s
    assert copying_s >= least_s
    assert stalled_s[bandwidth_bytes_per_s] > least_s / 2
    assert_same_bits(answers[1:], [answers[0]] * (2 * count - 1))


REQUESTS = 5


def test_sigterm_under_load_loses_no_request_and_leaves_nothing_running(archives: Archives) -> None:
    inputs = archives.inputs("ranker", 1)
    (expected,) = archives.eager("ranker", inputs).values()
    datatypes = {"features": "FP32", "categories": "INT64"}
    tensors = [
        {"name": name, "datatype": datatypes[name], "shape": list(array.shape), "data": array.tolist()}
        for name, array in inputs.items()
    ]
    body = {"inputs": tensors}
    # A link so slow that an inference takes about a second, as what is copied for a start does several times over. That
    # all requests have come is seen while the others wait: the text of the metrics is good for one second.
    flags = ("--link-bandwidth", "2MB/s", "--batch-sizes", "1", "--exit-timeout-secs", "60")
    with (
        process(archives.repository("ranker"), "50%", archives.cache, *flags) as server,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        server.until_ready()

        def post() -> tuple[int, Any]:
            return ask(server.address, "POST", "/v2/models/ranker/infer", body)

        def waiting_or_answered() -> float:  # read in this order, none is counted twice
            names = ("nv_inference_request_success", "nv_inference_pending_request_count")
            return sum(metric(server.metrics_address, name, "ranker") for name in names)

        in_flight = [clients.submit(post) for _ in range(REQUESTS)]
        eventually(lambda: waiting_or_answered() == REQUESTS - 1)
        server.popen.send_signal(signal.SIGTERM)
        eventually(lambda: ask(server.address, "GET", "/v2/health/ready")[0] == 400)
        status, refusal = post()
        assert status == 503
        assert refusal == {"error": "Server is stopping, not accepting new requests"}
        for request in in_flight:
            status, answer = request.result()
            assert status == 200
            np.testing.assert_allclose(answer["outputs"][0]["data"], expected[0], rtol=1e-4, atol=1e-6)
        assert server.popen.wait(60) == 0, server.log_text()
        eventually(lambda: not server.is_anything_left())
        assert "Traceback" not in server.log_text()
