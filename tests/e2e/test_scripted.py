"""A server runs its models' calls in stretches outside of Python, and gives the answers of one that does not."""

from typing import Any

import numpy as np
import pytest

from tests.e2e.archives import Archives
from tests.e2e.serving import ask, infer, process, serving

NAMES = ("bert_small", "ranker")
BATCHES = (1, 4)


@pytest.mark.parametrize("memory", ["25%", "100%"])
def test_a_scripted_server_gives_the_same_bits(archives: Archives, memory: str) -> None:
    repository = archives.repository(*NAMES)
    answers: dict[bool | None, list[dict[str, Any]]] = {}
    stretches, devices = {}, {}
    for scripted in (False, None):
        with serving(
            repository, memory, archives.cache, layout="partitioned", batch_sizes=BATCHES, scripted=scripted
        ) as server:
            answers[scripted] = [
                infer(server.address, name, archives.inputs(name, batch))
                for _ in range(3)
                for name in NAMES
                for batch in BATCHES
            ]
            programs = server.loaded.servables["bert_small"].programs
            stretches[scripted] = [max((s.length for s in p.segments), default=0) for p in programs.values()]
            profiles = server.loaded.placed_models["bert_small"].prepared.profiles.values()
            devices[scripted] = {profile.device.endswith(", scripted") for profile in profiles}
    for plain, scripted_answer in zip(answers[False], answers[None], strict=True):
        assert plain.keys() == scripted_answer.keys()
        for key, value in plain.items():
            np.testing.assert_array_equal(scripted_answer[key], value)
    assert stretches[False] == [0, 0]
    assert min(stretches[None]) > 1
    assert devices == {False: {False}, None: {True}}, "what serves is what was measured"


def test_the_command_serves_in_stretches_and_answers_what_an_op_refuses(archives: Archives) -> None:
    repository, inputs = archives.repository("bert_small"), archives.inputs("bert_small", 1)
    with process(repository, "100%", archives.cache, "--batch-sizes", "1") as server:
        server.until_ready()
        (expected,) = archives.eager("bert_small", inputs).values()
        for _ in range(3):
            (answer,) = infer(server.address, "bert_small", inputs).values()
            assert np.abs(answer - expected).max() <= 1e-4 * np.abs(expected).max()
        wrong = [
            {"name": n, "datatype": "INT64", "shape": list(a.shape), "data": np.full_like(a, 1 << 30).tolist()}
            for n, a in inputs.items()
        ]
        status, body = ask(server.address, "POST", "/v2/models/bert_small/infer", {"inputs": wrong})
        assert status >= 400
        assert body["error"].endswith("index out of range in self")
        (answer,) = infer(server.address, "bert_small", inputs).values()
        assert np.abs(answer - expected).max() <= 1e-4 * np.abs(expected).max()
