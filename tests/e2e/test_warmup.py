"""Real models are warmed up before they are ready, at the start and by a load."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from cohabit.server.engine.servable import ProgramServable
from tests.support.e2e.serving import metric, repository_index
from tests.support.e2e.stacks import WIDTH, Stacks, X, answer, controlled, held, is_answer_of, under_load


def warmup(batch: int, dims: list[int], **data: Any) -> dict[str, Any]:
    given = {"data_type": "TYPE_FP32", "dims": dims, **data}
    return {"model_warmup": [{"name": "w", "batch_size": batch, "count": 2, "inputs": {"x": given}}]}


def test_models_are_warmed_up_before_they_are_ready(
    stacks: Stacks, plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[tuple[str, int, float]] = []
    execute = ProgramServable.execute

    def noted(self: ProgramServable, requests: Any, rows: int, *on_recording: Any) -> Any:
        executed.append((self.info.name, rows, float(requests[0]["x"][0, 0])))
        return execute(self, requests, rows, *on_recording)

    monkeypatch.setattr(ProgramServable, "execute", noted)
    for number, name in enumerate("abc"):
        stacks.put(tmp_path, name, number)
    (tmp_path / "a" / "warmup").mkdir()
    (tmp_path / "a" / "warmup" / "row.bin").write_bytes((X + 3).tobytes())
    sample = f"dims: {WIDTH} input_data_file: 'row.bin'"
    for name, batch in (("a", 1), ("c", 9)):
        (tmp_path / name / "config.pbtxt").write_text(
            f"model_warmup {{ name: 'w' batch_size: {batch} inputs {{ key: 'x' value {{ data_type: TYPE_FP32"
            f" {sample if name == 'a' else f'dims: {WIDTH} zero_data: true'} }} }} }}"
        )
    with controlled(tmp_path, "24MiB", plans, load_models=("a", "c")) as (server, client):
        assert executed == [("a", 1, 2.0)]
        index = repository_index(server.address)
        assert "model_warmup 'w': inference request batch-size must be <= 1" in index["c"]["reason"]
        assert held(server).keys() == {"a"}, "what is not served holds no memory"
        assert metric(server.metrics_address, "nv_inference_count", "a") == 0
        with under_load(server, {"a": 0}) as wrong:
            executed.clear()
            client.load_model("b", config=json.dumps(warmup(1, [WIDTH], random_data=True)))
            assert [e[:2] for e in executed if e[0] == "b"] == [("b", 1)] * 2
            assert all(0 <= e[2] <= 1 for e in executed if e[0] == "b")
            assert is_answer_of(1, answer(server, "b"))
            with pytest.raises(InferenceServerException, match=r"load failed .*model_warmup 'w': unexpected shape"):
                client.load_model("b", config=json.dumps(warmup(1, [3], zero_data=True)))
            assert is_answer_of(1, answer(server, "b")), "as it was"
        assert wrong == []
        client.unload_model("b")
        assert held(server).keys() == {"a"}
        assert np.isfinite(answer(server, "a")).all()
