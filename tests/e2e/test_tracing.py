"""A traced request of a streamed model, planned and served for real: its copies stand between its ops."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cohabit.server.engine.servable import ProgramServable
from tests.support.e2e.serving import Running, infer, serving
from tests.support.runtime import models

MEMORY = "3MiB"
"""Of 3.5 MiB of weights, and what a plan needs beside them."""
BANDWIDTH_BYTES_PER_S = 50e6
REQUESTS = 3

Event = dict[str, Any]


@contextmanager
def traced(folder: Path) -> Iterator[Running]:
    """Serve a model that does not fit behind a slow link, and follow every request."""
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, folder / "models" / "wide" / "1" / "model.pt2")
    changes = {"link_bandwidth_bytes_per_s": BANDWIDTH_BYTES_PER_S, "batch_sizes": (1,), "threads": 1}
    file = folder / "trace.json"
    with serving(
        folder / "models", MEMORY, folder / "cache", trace={"file": str(file), "rate": "1"}, **changes
    ) as server:
        yield server


def drawn(folder: Path) -> list[Event]:
    """What stands on the device's tracks, in the order of time."""
    events = [e for e in json.loads((folder / "trace.json").read_text()) if e["ph"] == "X"]
    return sorted(events, key=lambda e: float(e["ts"]))


def end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def test_copies_of_a_streamed_model_are_seen_in_the_plans_order(tmp_path: Path) -> None:
    with traced(tmp_path) as server:
        servable = server.placement.models["wide", 1].servable
        assert isinstance(servable, ProgramServable)
        for _ in range(REQUESTS):
            infer(server.address, "wide", {"x": np.ones((1, 384), np.float32)})
    (program,) = servable.programs.values()
    events = drawn(tmp_path)
    executions = [e for e in events if "rows" in e["args"]]
    assert len(executions) == REQUESTS
    waited_for = max(step.swap_ins_before for step in program.computes)
    for execution in executions:
        own = [e for e in events if e["args"]["trace_id"] == execution["args"]["trace_id"] and e is not execution]
        copies = [e for e in own if "bytes" in e["args"]]
        ops = [e for e in own if "bytes" not in e["args"] and e["name"] != "swap stall"]
        assert sum(e["args"]["bytes"] for e in copies) == program.link_bytes > 0
        assert [e["name"] for e in copies] == [program.graph.tensors[s.tensor].name for s in program.swap_ins]
        assert len(ops) == len(program.computes)
        for lane in (copies, ops):
            assert all(end(a) <= b["ts"] for a, b in pairwise(lane))
        assert all(execution["ts"] <= e["ts"] for e in own)
        assert all(end(e) <= end(execution) for e in ops)
        assert all(end(c) <= end(execution) for c in copies[:waited_for]), "others bring residents back"
        assert any(ops[0]["ts"] < c["ts"] < ops[-1]["ts"] for c in copies), "nothing was streamed"
