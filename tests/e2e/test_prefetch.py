"""The first swap-ins of a queued model are issued while another model computes, with plans as served."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from runtime.host.store import StoreKind
from tests.e2e.archives import Archives
from tests.e2e.serving import infer, metric, serving

NAMES = ("bert_small", "ranker")
TIMES, AT_ONCE = 6, 3


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("store", ["ram", "file"])
def test_queued_models_are_prefetched_and_answer_as_they_do_alone(
    archives: Archives, store: StoreKind, prefetch: bool
) -> None:
    inputs = {name: archives.inputs(name, 1) for name in NAMES}
    repository = archives.repository(*NAMES)
    with serving(repository, "25%", archives.cache, store=store, prefetch=prefetch) as server:
        shares = [metric(server.metrics_address, "cohabit_resident_share", name) for name in NAMES]
        assert min(shares) < 1, "something is copied for each inference"
        alone = {name: infer(server.address, name, inputs[name]) for name in NAMES}

        def ask_on(name: str) -> list[dict[str, NDArray[Any]]]:
            return [infer(server.address, name, inputs[name]) for _ in range(TIMES)]

        with ThreadPoolExecutor(AT_ONCE * len(NAMES)) as clients:
            asked = [(name, clients.submit(ask_on, name)) for name in NAMES * AT_ONCE]
        for name, answers in asked:
            for answer in answers.result():
                for key, value in alone[name].items():
                    np.testing.assert_allclose(answer[key], value, rtol=1e-4, atol=1e-5)
        hits = sum(metric(server.metrics_address, "cohabit_prefetch_hits", name) for name in NAMES)
        programs = [p for servable in server.loaded.servables.values() for p in servable.programs.values()]
        if not prefetch or not any(program.prefix for program in programs):  # the plans depend on what was measured
            assert hits == 0
