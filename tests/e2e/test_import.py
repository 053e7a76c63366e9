"""`cohabit import`: what it makes of models is served, and answers as eager PyTorch does."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc_client
import tritonclient.http as triton
from google.protobuf import text_format
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
)

from cohabit.loadgen.load import Load
from cohabit.loadgen.run import run_load
from cohabit.server.cli import main
from cohabit.server.triton.config_fields import ignored_fields
from cohabit.server.triton.model_config import ModelConfig, ModelInput
from tests.support.e2e.serving import Running, ask, infer, serving

TOKENS, CLASSES = 12, {0: "cat", 1: "striped\ncat", 2: "dog"}
TOLERANCE = 1e-4
"""Of the largest value that eager torch answers."""


class Ranker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 4)
        self.score = nn.Linear(12, 1)

    def forward(self, features: torch.Tensor, categories: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"score": self.score(torch.cat([features, self.embedding(categories).flatten(1)], 1))}


def make_ranker() -> Ranker:
    """Other weights every time, as a factory for checkpoints may have."""
    return Ranker()


def make_with_examples() -> Ranker:
    ranker = Ranker()
    ranker.example_inputs = {"features": torch.rand(1, 4), "categories": torch.tensor([[29, 3]])}  # type: ignore[assignment]
    return ranker


FACTORY = f"{__name__}:make_ranker"
INPUTS = ("--input", "features:FP32:-1,4", "--input", "categories:INT64:-1,2")


def make_sequence() -> nn.Sequential:
    """Its forward has one argument, which is called `input`."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


POSITIONS = [
    part
    for name in ("input_ids", "token_type_ids", "position_ids")
    for part in ("--input", f"{name}:INT64:-1,{TOKENS}")
]


def bert(folder: Path) -> None:
    config = BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({"[PAD]": 0, **{f"w{n}": n for n in range(1, 90)}}, unk_token="w1"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def vit(folder: Path) -> None:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        id2label=CLASSES, label2id={name: index for index, name in CLASSES.items()},
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("import")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """A server of the entries that `cohabit import` made, in less memory than their weights."""
    torch.manual_seed(0)
    bert(folder / "bert")
    vit(folder / "vit")
    torch.save(make_ranker().state_dict(), folder / "ranker.pt")
    flags = ("--repository", str(folder / "models"), "--cache", str(folder / "cache"))
    assert main(["import", str(folder / "bert"), *flags]) == 0
    assert main(["import", str(folder / "vit"), "--max-batch", "4", *flags]) == 0
    assert (
        main(["import", str(folder / "ranker.pt"), "--factory", FACTORY, *INPUTS, "--max-batch", "2", *flags]) == 0
    )
    assert main(["import", str(folder / "bert"), "--name", "with_positions", *POSITIONS, *flags]) == 0
    assert main(["import", f"{__name__}:make_sequence", "--input", "features:FP32:-1,4", *flags]) == 0
    with serving(folder / "models", "1MiB", folder / "cache", grpc_port=0) as running:
        yield running


def close(found: np.ndarray, expected: torch.Tensor) -> bool:
    return bool(np.abs(found - expected.numpy()).max() <= TOLERANCE * float(expected.abs().max()))


@pytest.mark.parametrize(("rows", "tokens"), [(1, TOKENS), (3, TOKENS), (8, 13), (2, 5), (2, 1)])
def test_a_text_model_answers_as_transformers_does(server: Running, folder: Path, rows: int, tokens: int) -> None:
    draws = torch.Generator().manual_seed(rows)
    inputs = {
        "input_ids": torch.randint(0, 90, (rows, tokens), generator=draws),
        "attention_mask": (torch.arange(tokens) < torch.arange(5, 5 + rows)[:, None]).long(),
        "token_type_ids": torch.randint(0, 2, (rows, tokens), generator=draws),
    }
    model: PreTrainedModel = AutoModel.from_pretrained(folder / "bert").eval()
    with torch.no_grad():
        expected = model(**inputs)
    answers = infer(server.address, "bert", {name: tensor.numpy() for name, tensor in inputs.items()})
    assert sorted(answers) == ["last_hidden_state", "pooler_output"]
    assert close(answers["last_hidden_state"], expected.last_hidden_state)
    assert close(answers["pooler_output"], expected.pooler_output)


def test_texts_become_the_mean_of_what_transformers_computes_for_their_tokens(
    server: Running, folder: Path
) -> None:
    rows = [[5, 6, 7], [8], [9, 10, 11, 12, 13], *([n] * 4 for n in range(20, 28))]
    texts = [" ".join(f"w{token}" for token in row) for row in rows]
    status, answer = ask(server.address, "POST", "/v1/embeddings", {"model": "bert", "input": texts})
    assert status == 200, answer
    model: PreTrainedModel = AutoModel.from_pretrained(folder / "bert").eval()
    with torch.no_grad():
        means = torch.cat([model(torch.tensor([row])).last_hidden_state.mean(1) for row in rows])
    expected = nn.functional.normalize(means).numpy()
    np.testing.assert_allclose([item["embedding"] for item in answer["data"]], expected, atol=1e-5)
    assert answer["usage"]["total_tokens"] == sum(map(len, rows))
    _, listed = ask(server.address, "GET", "/v1/models")
    assert [model["id"] for model in listed["data"]] == ["bert"], "the other text model needs position_ids"


def test_an_image_model_answers_with_the_names_of_its_classes(server: Running, folder: Path) -> None:
    image = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ViTForImageClassification.from_pretrained(folder / "vit").eval()(pixel_values=image).logits
    assert close(infer(server.address, "vit", {"pixel_values": image.numpy()})["logits"], expected)
    given = triton.InferInput("pixel_values", [2, 3, 32, 32], "FP32")
    given.set_data_from_numpy(image.numpy())
    with triton.InferenceServerClient(server.address) as client:
        result = client.infer("vit", [given], outputs=[triton.InferRequestedOutput("logits", class_count=1)])
    best = [row[0].decode().split(":")[1:] for row in result.as_numpy("logits")]
    assert best == [[str(int(index)), " ".join(CLASSES[int(index)].split())] for index in expected.argmax(1)]


def test_a_checkpoint_gives_the_module_its_weights(server: Running, folder: Path) -> None:
    ranker = Ranker().eval()
    ranker.load_state_dict(torch.load(folder / "ranker.pt", weights_only=True))
    features, categories = torch.rand(2, 4), torch.randint(0, 30, (2, 2))
    answers = infer(server.address, "ranker", {"features": features.numpy(), "categories": categories.numpy()})
    with torch.no_grad():
        assert close(answers["score"], ranker(features, categories)["score"])


def test_the_configuration_says_what_the_program_takes(server: Running, folder: Path) -> None:
    config = text_format.Parse((folder / "models" / "vit" / "config.pbtxt").read_text(), ModelConfig())
    assert (config.name, config.max_batch_size, config.output[0].label_filename) == ("vit", 4, "labels.txt")
    assert ignored_fields(config, "cpu") == {}
    assert config.input[0].format == ModelInput.FORMAT_NCHW  # image clients read the order of dimensions from it
    status, metadata = ask(server.address, "GET", "/v2/models/bert")
    assert status == 200
    assert {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]} == {
        name: ("INT64", [-1, -1]) for name in ("input_ids", "attention_mask", "token_type_ids")
    }


def test_the_first_start_finds_everything_in_the_cache(server: Running, folder: Path) -> None:
    """A model is lowered once: the server's start has added no weights."""
    weights = list((folder / "cache" / "weights").glob("*/weights-*.json"))
    assert len(weights) == 5
    programs = [len(list(path.parent.glob("program-*.json"))) for path in weights]
    assert programs == [1] * 5


def test_metadata_tells_the_range_of_indices(server: Running) -> None:
    _, metadata = ask(server.address, "GET", "/v2/models/with_positions")
    ranges = {tensor["name"]: tensor.get("parameters") for tensor in metadata["inputs"]}
    assert ranges == {
        "input_ids": {"minimum": 0, "maximum": 89},
        "token_type_ids": {"minimum": 0, "maximum": 1},
        "position_ids": {"minimum": 0, "maximum": 15},
    }
    _, metadata = ask(server.address, "GET", "/v2/models/bert")
    assert {tensor["name"]: tensor.get("parameters") for tensor in metadata["inputs"]} == {
        "input_ids": {"minimum": 0, "maximum": 89},
        "attention_mask": None,
        "token_type_ids": {"minimum": 0, "maximum": 1},
    }
    with grpc_client.InferenceServerClient(server.grpc_address) as client:
        described = client.get_model_metadata("with_positions")
    assert [tensor.name for tensor in described.inputs] == list(ranges), "gRPC's metadata has no ranges"


@pytest.mark.parametrize("name", ["bert", "vit", "ranker", "with_positions", "make_sequence"])
def test_the_sample_of_an_imported_model_is_a_request_that_it_answers(
    server: Running, folder: Path, name: str
) -> None:
    sample = json.loads((folder / "models" / name / "sample.json").read_text())
    assert all(tensor["shape"][0] == 1 for tensor in sample["inputs"]), "one row"
    status, answer = ask(server.address, "POST", f"/v2/models/{name}/infer", sample)
    assert (status, answer["model_name"]) == (200, name)


@pytest.mark.parametrize(("scheme", "shared_memory"), [("http", None), ("grpc", "system")])
def test_loadgen_has_every_request_answered_by_imported_models(
    server: Running, scheme: str, shared_memory: Literal["system"] | None
) -> None:
    load = Load(
        rate_per_s=40.0, duration_s=1.0, warmup_s=0.0, timeout_s=60.0, slo_s=60.0, shared_memory=shared_memory
    )
    address = server.address if scheme == "http" else server.grpc_address
    report = asyncio.run(run_load(f"{scheme}://{address}", load))
    assert report.all_answered, report.errors
    assert report.completed > 0
    assert {model.model for model in report.models} >= {"bert", "with_positions"}
    assert ask(server.address, "GET", "/v2/systemsharedmemory/status") == (200, []), "nothing stays registered"


def test_an_index_out_of_range_is_refused_with_its_input_value_and_range(server: Running, folder: Path) -> None:
    sample = json.loads((folder / "models" / "with_positions" / "sample.json").read_text())
    types = next(tensor for tensor in sample["inputs"] if tensor["name"] == "token_type_ids")
    types["data"][3] = 57
    status, answer = ask(server.address, "POST", "/v2/models/with_positions/infer", sample)
    assert status == 400
    assert "input 'token_type_ids' of model 'with_positions' has the value 57" in answer["error"]
    assert answer["error"].endswith("out of range: its values are indices from 0 to 1")


def test_a_sequential_module_is_served_with_the_names_of_its_declared_inputs(server: Running) -> None:
    features = torch.rand(3, 4)
    (answer,) = infer(server.address, "make_sequence", {"features": features.numpy()}).values()
    with torch.no_grad():
        assert close(answer, make_sequence()(features))
