"""A traced request of a streamed model, planned and served for real: its copies run beside its computing."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.cpu import CpuBackend
from server.engine.servable import ProgramServable
from tests.e2e.serving import infer, serving
from tests.runtime import models

MEMORY = "3MiB"
"""Of 3.5 MiB of weights, and what a plan needs beside them."""
BANDWIDTH_BYTES_PER_S = 50e6
REQUESTS = 3


def traced(folder: Path) -> tuple[ProgramServable, list[dict[str, Any]]]:
    """Serve a model that does not fit, ask it a few times, and read what was written."""
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, folder / "models" / "wide" / "1" / "model.pt2")
    changes = {"link_bandwidth_bytes_per_s": BANDWIDTH_BYTES_PER_S, "batch_sizes": (1,), "threads": 1}
    file = folder / "trace.json"
    with serving(folder / "models", MEMORY, folder / "cache", trace_file=file, trace_rate=1, **changes) as server:
        servable = server.loaded.servables["wide"]
        assert isinstance(servable, ProgramServable)
        assert isinstance(server.loaded.house.backend, CpuBackend)
        for _ in range(REQUESTS):
            infer(server.address, "wide", {"x": np.ones((1, 384), np.float32)})
    return servable, json.loads(file.read_text())


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"])


def test_copies_of_a_streamed_model_are_seen_beside_its_ops(tmp_path: Path) -> None:
    servable, events = traced(tmp_path)
    (program,) = servable.programs.values()
    drawn = [e for e in events if e["ph"] == "X"]
    executions = sorted((e for e in drawn if "rows" in e["args"]), key=lambda e: float(e["ts"]))
    assert len(executions) == REQUESTS
    waited_for = max(step.swap_ins_before for step in program.computes)
    overlaps = 0
    for execution in executions:
        own = [e for e in drawn if e["args"]["trace_id"] == execution["args"]["trace_id"] and "model" in e["args"]]
        copies = sorted((e for e in own if "bytes" in e["args"]), key=lambda e: float(e["ts"]))
        ops = sorted(
            (e for e in own if e not in copies and e["name"] != "swap stall"), key=lambda e: float(e["ts"])
        )
        assert sum(e["args"]["bytes"] for e in copies) == program.link_bytes > 0
        assert [e["name"] for e in copies] == [program.graph.tensors[s.segment].name for s in program.swap_ins]
        assert len(ops) == len(program.computes)
        for lane in (copies, ops):
            assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(lane))
        ends = execution["ts"] + execution["dur"]
        assert all(execution["ts"] <= e["ts"] and e["ts"] + e["dur"] <= ends for e in ops)
        assert all(execution["ts"] <= c["ts"] for c in copies)
        assert all(c["ts"] + c["dur"] <= ends for c in copies[:waited_for]), "others bring residents back"
        overlaps += sum(overlap(copy, op) for copy in copies for op in ops)
    assert overlaps, "no op ran beside a copy"
