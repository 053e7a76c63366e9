"""A BERT for any batch and any length: answers are eager torch's at every length, in every budget, under mixed load."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.export import Dim
from transformers import BertConfig, BertModel
from tritonclient.utils import InferenceServerException

from cohabit.loadgen.zoo.exporting import save_model
from cohabit.loadgen.zoo.seeded import seeded
from tests.e2e.test_memory import NON_PARAMETERS, Watch, allocated_peak_bytes, deployed, within
from tests.support.e2e.serving import Running, ask, infer, process, serving
from tests.support.planner.reference import peak_bytes

LENGTHS = (1, 2, 15, 16, 17, 33, 48, 64)
LONGEST = 64
BATCHES = (1, 4)
VOCABULARY = 4000
TOLERANCE = 1e-4
"""Of the largest value that eager torch answers."""
CONFIG = """
max_batch_size: 4
input { name: "input_ids" data_type: TYPE_INT64 dims: -1 }
input { name: "attention_mask" data_type: TYPE_INT64 dims: -1 }
output { name: "tokens" data_type: TYPE_FP32 dims: [-1, 256] }
output { name: "pooled" data_type: TYPE_FP32 dims: 256 }
"""

Arrays = dict[str, NDArray[np.generic]]


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=1024,
            attn_implementation="sdpa",
        )
        self.bert = BertModel(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.bert(input_ids=input_ids, attention_mask=attention_mask)
        return {"tokens": found.last_hidden_state, "pooled": found.pooler_output}


@dataclass(frozen=True)
class Bert:
    model: torch.nn.Module
    repository: Path
    cache: Path

    def eager(self, inputs: Arrays) -> Arrays:
        with torch.no_grad():
            answer = self.model(**{name: torch.from_numpy(array.copy()) for name, array in inputs.items()})
        return {name: tensor.numpy() for name, tensor in answer.items()}

    def assert_right(self, inputs: Arrays, answer: Arrays) -> None:
        for name, expected in self.eager(inputs).items():
            assert answer[name].shape == expected.shape
            np.testing.assert_allclose(answer[name], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def texts(batch: int, length: int, seed: int = 0) -> Arrays:
    """Token ids, the last row of which is masked from its middle on."""
    ids = np.random.default_rng([seed, batch, length]).integers(0, VOCABULARY, (batch, length))
    mask = np.ones_like(ids)
    mask[-1, 1 + length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Bert:
    folder = tmp_path_factory.mktemp("bert")
    with seeded(0):
        model = Encoder().eval()
    dims = {0: Dim("batch", min=1, max=8), 1: Dim("length", min=1, max=LONGEST)}
    example = {name: torch.from_numpy(array) for name, array in texts(3, 24).items()}
    with torch.no_grad():
        program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, dims))
    save_model(program, folder / "models" / "bert" / "1" / "model.pt2", {})
    (folder / "models" / "bert" / "config.pbtxt").write_text(CONFIG)
    return Bert(model, folder / "models", folder / "cache")


@pytest.fixture(scope="module")
def server(bert: Bert) -> Iterator[Running]:
    with serving(bert.repository, "25%", bert.cache, batch_sizes=BATCHES) as running:
        yield running


def test_answers_are_eager_s_at_every_length(server: Running, bert: Bert) -> None:
    for batch in (1, 3, 4):
        for length in LENGTHS:
            inputs = texts(batch, length)
            bert.assert_right(inputs, infer(server.address, "bert", inputs))


def test_every_answer_under_mixed_load_is_that_of_its_own_text(server: Running, bert: Bert) -> None:
    draws = np.random.default_rng(0)
    requests = [texts(int(draws.integers(1, 4)), int(draws.choice(LENGTHS)), seed) for seed in range(80)]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda inputs: infer(server.address, "bert", inputs), requests))
    for inputs, answer in zip(requests, answers, strict=True):
        bert.assert_right(inputs, answer)
    stats = ask(server.address, "GET", "/v2/models/bert/stats")[1]["model_stats"][0]
    assert stats["execution_count"] < stats["inference_count"], "requests of the same length were batched"


def test_metadata_and_configuration_leave_the_length_open(server: Running) -> None:
    metadata = ask(server.address, "GET", "/v2/models/bert")[1]
    assert [t["shape"] for t in metadata["inputs"]] == [[-1, -1], [-1, -1]]
    assert [t["shape"] for t in metadata["outputs"]] == [[-1, -1, 256], [-1, 256]]
    config = ask(server.address, "GET", "/v2/models/bert/config")[1]
    assert [t["dims"] for t in config["input"]] == [[-1], [-1]]
    assert [t["dims"] for t in config["output"]] == [[-1, 256], [256]]


def test_a_length_out_of_range_or_two_that_disagree_are_refused_by_name(server: Running) -> None:
    def refusal(inputs: Arrays) -> str:
        with pytest.raises(InferenceServerException) as refused:
            infer(server.address, "bert", inputs)
        assert refused.value.status() == "400"
        return str(refused.value)

    assert "'input_ids' for model 'bert': dimension 1 is 65, it can be 1 to 64" in refusal(texts(1, 65))
    assert "dimension 1 is 0, it can be 1 to 64" in refusal(texts(1, 0))
    apart = texts(1, 9) | {"attention_mask": texts(1, 8)["attention_mask"]}
    assert "'attention_mask' for model 'bert': with the other inputs' sizes" in refusal(apart)
    assert "must be [9], got [8]" in refusal(apart)


def test_bits_are_equal_and_memory_is_within_the_plan_at_every_length(bert: Bert) -> None:
    answers: dict[tuple[int, int], list[torch.Tensor]] = {}
    for memory in ("100%", "25%"):
        with deployed(bert.repository, memory, bert.cache) as device:
            servable, lowered = device.model("bert").servable, device.model("bert").lowered
            partition, workspace = device.partition("bert"), device.workspace
            for batch in BATCHES:
                for length in LENGTHS:
                    program = servable._planned(batch, (length,))
                    inputs = [torch.from_numpy(texts(batch, length)[port.name]) for port in lowered.inputs]
                    with Watch(device.arena) as watch:
                        outputs = servable.executor.run(program, [t.clone() for t in inputs]).outputs
                    assert all(within(use, partition) or within(use, workspace) for use in watch.uses)
                    for one, other in zip(answers.setdefault((batch, length), outputs), outputs, strict=True):
                        assert torch.equal(one, other), (memory, batch, length)
                    allocated = allocated_peak_bytes(program, inputs, servable)
                    assert allocated <= peak_bytes(program.graph, program.plan, NON_PARAMETERS), (batch, length)
            swapped = sum(program.link_bytes for program in servable.programs.values())
            assert (swapped > 0) == (memory == "25%")


def test_two_processes_have_room_for_the_outputs_of_every_length(bert: Bert) -> None:
    flags = ("--batch-sizes", ",".join(map(str, BATCHES)))
    with process(bert.repository, "100%", bert.cache, *flags) as server:
        server.until_ready()
        for batch, length in ((1, 1), (4, 64), (3, 17), (2, 33)):
            inputs = texts(batch, length)
            bert.assert_right(inputs, infer(server.address, "bert", inputs))


def test_a_region_that_models_share_serves_every_length(bert: Bert) -> None:
    with serving(bert.repository, "64MiB", bert.cache, batch_sizes=BATCHES, layout="on_demand") as server:
        for batch, length in ((1, 1), (4, 64), (3, 17), (1, 17)):
            inputs = texts(batch, length)
            bert.assert_right(inputs, infer(server.address, "bert", inputs))
