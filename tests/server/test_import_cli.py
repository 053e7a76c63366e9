"""What `cohabit import` refuses, with the reason and the way out. A refused import leaves nothing in the repository."""

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import save_file, save_model
from torch import nn

from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.server.cli import main
from cohabit.server.commands.import_model import _default_name
from cohabit.server.errors import ImportFailed
from cohabit.server.importing import huggingface
from cohabit.server.importing.declared_input import largest_size, parse_input
from cohabit.server.importing.exporting import export
from cohabit.server.importing.factory import _load
from cohabit.server.importing.folder_files import require_own_files
from cohabit.server.importing.huggingface import cached_folder
from cohabit.server.importing.huggingface_inputs import Lengths
from cohabit.server.importing.subject import declared
from cohabit.server.triton.config_fields import pooling_of
from cohabit.server.triton.model_config import read_config


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Adding(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


class Branching(nn.Module):
    """What it does depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


class Text(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * 2, "label": "cat"}


class InAList(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x * 2, ["cat", x]


class Floats(nn.Module):
    def forward(self, x: torch.Tensor) -> list[list[float]]:
        return x.tolist()  # type: ignore[no-any-return]


class Selected(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return y[y > 0]


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5, training=True)


class OtherAfterExport(nn.Module):
    """Its exported program computes something else: all elements of `x`, and one element of `bytes`."""

    def __init__(self, floats: float = 3.0) -> None:
        super().__init__()
        self.floats = floats

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        counts = (x[:, :1] * torch.ones(1 << 14)).abs().round()
        if torch.compiler.is_exporting():
            x, counts = x * self.floats, torch.cat([counts[:, :1] + 1, counts[:, 1:]], 1)
        return {"x": x, "bytes": counts.to(torch.uint8)}


class OtherIntegers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.round().int() + (1 if torch.compiler.is_exporting() else 0)


def other_integer_element() -> nn.Module:
    return OtherAfterExport(1.0)


class ParameterView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scaled": x * self.scale, "scale": self.scale.expand(x.shape[0], 4)}


class TwoRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 4)


class Centering(nn.Module):
    """Its rows influence one another, and it computes in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Code:
    """A pickle of it calls something when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("loaded",)


def linear() -> nn.Module:
    return nn.Linear(4, 2)


def scripted() -> nn.Module:
    return torch.jit.script(linear())


def traced() -> nn.Module:
    return torch.jit.trace(linear(), torch.zeros(1, 4))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))


def number() -> int:
    return 4


def failing() -> nn.Module:
    raise RuntimeError("no weights today\nand a second line\nand a third")


HERE = __name__
X = ("--input", "x:FP32:-1,4")
LINEAR = ("--factory", f"{HERE}:linear", "--input", "input:FP32:-1,4")


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs an import which must fail; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 1) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) == status
        assert list(Path("models").rglob("*")) == []
        said = capsys.readouterr().err.splitlines()[-1]
        assert len(said) < 700
        return said.removeprefix("cohabit: ")

    return run


@pytest.fixture
def refused_here(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs an import which must fail, in the folder of another; returns what it says."""

    def run(*arguments: str) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) in (1, 2)
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs an import in a folder of its own, which must succeed; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere/at/all"], "nowhere/at/all does not exist; give a folder, a hub's name, a checkpoint, MODULE:F"),
        (["nowhere.safetensors"], "nowhere.safetensors does not exist; give a folder, a hub's name, a checkpoint"),
        (["nowhere.py:make"], "nowhere.py:make: there is no file 'nowhere.py'; write SCRIPT.py:FUNCTION"),
        (["script.py:make"], "script.py:make: script.py defines no function 'make'"),
        (["script.py:four"], "script.py:four: four of script.py is a int, not a function"),
        (["empty"], "empty is no Hugging Face model directory: it has no config.json"),
        (["file.pt"], "file.pt is a checkpoint; name the function that makes its module with --factory"),
        (["file.pt", "--factory", "linear"], "--factory: 'linear' is not MODULE:FUNCTION"),
        ([f"{HERE}:linear", "--sequence-length", "4"], "--sequence-length is for Hugging Face models"),
        (
            [f"{HERE}:linear", *X, "--max-sequence-length", "4"],
            "--max-sequence-length: no input has a dynamic dimension",
        ),
        (["file.pt", "--key", "model"], "--key is for checkpoints: name the function that makes the module"),
    ],
)
def test_a_path_that_is_nothing_to_import_is_named(refused: Any, arguments: list[str], reason: str) -> None:
    Path("empty").mkdir()
    Path("file.pt").touch()
    Path("script.py").write_text("four = 4")
    assert refused(*arguments, status=2).startswith(reason)


@pytest.mark.parametrize("text", ["x", "x:FP32", "x:FP32:1,-2", "x:FP32:0,4", "x:FP32:a", ":FP32:1"])
def test_an_input_that_is_not_one_is_a_wrong_command_line(text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["import", f"{HERE}:linear", "--input", text])
    assert caught.value.code == 2


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of TorchScript
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([f"{HERE}:linear"], "its inputs are not known; declare each with --input NAME:TYPE:DIMS"),
        (
            [f"{HERE}:Adding", *X, "--input", "z:FP32:-1,4"],
            "the module, whose forward takes (x, y), does not run with inputs x FP32 [-1, 4], z FP32 [-1, 4]",
        ),
        ([f"{HERE}:Adding", "--input", "z:FP32:-1,4"], "missing 1 required positional argument: 'y'"),
        ([f"{HERE}:linear", "--input", "input:FP32:-1,5"], "mat1 and mat2 shapes cannot be multiplied"),
        ([f"{HERE}:Doubling", "--input", "x:FP31:-1,4"], "no datatype is called FP31; there are BOOL"),
        ([f"{HERE}:Text", *X], "output['label'] is a str, 'cat'; let forward return tensors"),
        ([f"{HERE}:InAList", *X], "output[1][0] is a str, 'cat'; let forward return tensors"),
        ([f"{HERE}:Floats", *X], "the module returns no tensor, but float; let forward return tensors"),
        ([f"{HERE}:Selected", *X], "output has as many elements in dimension 0 as values decide, as y[y > 0] has"),
        ([f"{HERE}:scripted", *X], "scripted returns a TorchScript module, which is not supported; let it return"),
        ([f"{HERE}:traced", *X], "traced returns a TorchScript module, which is not supported; let it return"),
        ([f"{HERE}:number"], "returns a int; let it return a torch.nn.Module"),
        ([f"{HERE}:failing"], "RuntimeError: no weights today and a second line"),
        (["no_such_package:linear"], "No module named 'no_such_package'"),
        ([f"{HERE}:TwoRows", *X], "declare its inputs with it (--input NAME:TYPE:1,...)"),
        (
            [f"{HERE}:OtherAfterExport", *X],
            "output x differs from eager PyTorch's by 2 of its largest value at batch",
        ),
        ([f"{HERE}:OtherIntegers", *X], "differs from eager PyTorch's by 1 of its elements at batch 1"),
        ([f"{HERE}:Doubling", *X, "--name", "a/b"], "model name 'a/b' is not usable"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(refused: Any, arguments: list[str], reason: str) -> None:
    assert reason in refused(*arguments)


def test_a_module_that_depends_on_values_is_refused_in_one_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["import", f"{HERE}:Branching", *X, "--repository", str(tmp_path)]) == 1
    *progress, said = capfd.readouterr().err.splitlines()
    assert progress == ["Branching: loading " + f"{HERE}:Branching", "Branching: exporting"]
    assert "torch.export does not take the module" in said
    assert "depends on values" in said
    assert ": return x * 2 if x.sum() > 0 else x; change it" in said
    assert "--input" not in said


def test_a_checkpoint_that_does_not_fit_says_where(refused: Any) -> None:
    torch.save({"weight": torch.zeros(3, 4), "scale": torch.ones(1)}, "other.pt")
    said = refused("other.pt", *LINEAR)
    for part in ("bias is missing", "the module has no scale", "weight has shape [3, 4], the module's [2, 4]"):
        assert part in said
    save_file({"weight": torch.zeros(3, 4), "bias": torch.zeros(2)}, "other.safetensors")
    assert "weight has shape [3, 4]" in refused("other.safetensors", *LINEAR)
    torch.save({"epoch": 3, "model": linear().state_dict()}, "wrapped.pt")
    said = refused("wrapped.pt", *LINEAR)
    assert "its key epoch is a int, not a tensor; name the one that is, of model, with --key" in said
    said = refused("wrapped.pt", *LINEAR, "--key", "model.inner")
    assert "--key model.inner: nothing in it is called inner and holds tensors by name" in said
    said = refused("wrapped.pt", *LINEAR, "--key", "ema")
    assert "nothing in it is called ema and holds tensors by name; what does, is called model" in said


def test_a_key_leads_to_the_weights_in_a_checkpoint(imported: Any) -> None:
    states = {"model": linear().state_dict(), "v.ema": {"model": linear().state_dict()}}
    torch.save({"epoch": 3, **states}, "run.ckpt")
    for key, state in (("model", states["model"]), ("v.ema.model", states["v.ema"]["model"])):
        module = linear()
        _load(module, Path("run.ckpt"), key)
        assert torch.equal(module.get_parameter("weight"), state["weight"]), key
    imported("run.ckpt", *LINEAR, "--key", "v.ema.model")
    (tensor,) = json.loads(Path("models/run/sample.json").read_text())["inputs"]
    assert tensor["name"] == "input", "as it was declared, though torch calls it `input_1`, after a function's name"


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.table(ids) * mask.unsqueeze(-1)).sum(1)


class Pooled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def test_several_dimensions_may_be_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds out which of them are one: the two inputs' lengths are, height and width are not."""
    ids, mask = parse_input("ids:INT64:-1,-1"), parse_input("mask:FP32:-1,-1")
    program = export(declared(Masked(), [ids, mask], largest_size([ids, mask], 32), True), 8)
    assert ranges(program) == [(1, 8), (2, 32)]
    image = parse_input("x:FP32:-1,3,-1,-1")
    program = export(declared(Pooled(), [image], largest_size([image], None), True), 8)
    assert ranges(program) == [(1, 8), (2, 512), (2, 512)]


def ranges(program: torch.export.ExportedProgram) -> list[tuple[int, int]]:
    return sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values())


def test_a_hubs_name_is_looked_up_in_the_local_cache_alone(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "hub")
    said = refused("someone/encoder")
    assert "someone/encoder is neither a path here nor in the local Hugging Face cache" in said
    assert "importing never uses the network: download it with `hf download someone/encoder`" in said
    folder = Path("hub/models--someone--encoder/snapshots/1234")
    tiny(str(folder))
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text("1234")
    assert cached_folder("someone/encoder").resolve() == folder.resolve()
    assert _default_name(argparse.Namespace(path="someone/encoder")) == "encoder"


def test_a_text_models_tokenizer_and_pooling_come_with_it(imported: Any) -> None:
    tiny("bert")
    state = transformers.BertModel.from_pretrained("bert").state_dict()
    torch.save(state, "bert/pytorch_model.bin")  # a pickle of tensors alone is taken
    Path("bert/model.safetensors").unlink()
    Path("bert/tokenizer.json").write_text("a tokenizer")
    Path("bert/1_Pooling").mkdir()
    Path("bert/1_Pooling/config.json").write_text(
        '{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}'
    )
    Path("bert/modules.json").write_text("[]")
    said = " ".join(imported("bert").split())
    assert "of modules.json, /v1/embeddings pools (cls) and normalises" in said
    assert """curl localhost:8000/v1/embeddings --data '{"model": "bert", "input": "some text"}'""" in said
    assert Path("models/bert/tokenizer.json").read_text() == "a tokenizer"
    assert pooling_of(read_config(Path("models/bert/config.pbtxt"))) == "cls"


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(refused: Any) -> None:
    Path("code.pt").write_bytes(pickle.dumps({"weight": Code()}))
    torch.save({"weight": Code()}, "zipped.pt")
    for name in ("code.pt", "zipped.pt"):
        assert "is a pickle with more than tensors in it, and would run code" in refused(name, *LINEAR)
    Path("text.safetensors").write_text("nothing")
    assert "text.safetensors is no safetensors file" in refused("text.safetensors", *LINEAR)


def save(folder: str, architecture: str, **sizes: Any) -> None:
    """Write a model with random weights, as `save_pretrained` does."""
    model = getattr(transformers, architecture)
    model(model.config_class(**sizes)).save_pretrained(folder)


def tiny(folder: str, architecture: str = "BertModel", **changes: Any) -> None:
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    save(folder, architecture, num_hidden_layers=1, max_position_embeddings=16, **sizes)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_cannot_be_imported_says_why(refused: Any) -> None:
    tiny("bert")
    assert "--sequence-length is 17, the model has 16 positions" in refused("bert", "--sequence-length", "17")
    tiny("roberta", "RobertaModel")  # its positions begin after that of padding, which is 1
    assert "--sequence-length is 15, the model has 14 positions" in refused("roberta", "--sequence-length", "15")
    tiny("own", architectures=["MyModel"], auto_map={"AutoModel": "code.MyModel"})
    assert "has no architecture MyModel; its own code is never run" in refused("own")
    tiny("headless", architectures=["BertForSequenceClassification"])
    assert "its weights lack classifier.bias, classifier.weight" in refused("headless")
    tiny("quantized", quantization_config={"quant_method": "gptq"})
    assert "its weights are quantized" in refused("quantized")
    (Path("bert") / "model.safetensors").unlink()
    assert "bert has no weights: there is no *.safetensors in it" in refused("bert")
    torch.save({"embeddings": Code()}, "bert/pytorch_model.bin")
    assert "(a pickle, of which tensors only are read)" in refused("bert", "--sequence-length", "4")
    save("t5", "T5Model", vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=1)
    said = refused("t5")
    assert "T5Model is an encoder with a decoder, which is not supported; its encoder alone" in said
    assert said.endswith("--architecture T5Stack"), "the way out"
    subject = huggingface.from_folder(Path("t5"), architecture="T5Stack")
    assert [given.name for given in subject.inputs] == ["input_ids", "attention_mask"]


def test_inputs_that_are_not_known_lead_to_their_declaration(refused: Any) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    save("canine", "CanineModel", **sizes, num_hash_buckets=16, max_position_embeddings=16)
    said = refused("canine")
    assert "the range of its input input_ids is not known, because CanineConfig has no vocab_size" in said
    assert said.endswith("declare every input with --input NAME:TYPE:DIMS (input_ids)")
    save("vilt", "ViltModel", vocab_size=20, image_size=32, **sizes)
    assert "what it computes depends on values, in" in refused("vilt")  # it selects the pixels' patches by a mask
    series = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1], "num_time_features": 2}
    save("informer", "InformerForPrediction", d_model=8, **series)
    said = refused("informer")
    assert (
        "InformerForPrediction also needs past_time_features, past_observed_mask, whose sizes are not known" in said
    )


def test_an_encoder_of_a_model_with_a_decoder_is_taken(tmp_path: Path) -> None:
    sizes = {"vocab_size": 20, "d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    save(tmp_path, "T5EncoderModel", **sizes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_encoder_decoder": True}))
    subject = huggingface.from_folder(tmp_path, (), Lengths(fixed=4))
    assert [given.name for given in subject.inputs] == ["input_ids", "attention_mask"]
    assert subject.notes == ()


def test_tensors_of_a_model_that_are_not_served_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("layout", "LayoutLMModel")
    (note,) = huggingface.from_folder(Path("layout")).notes
    assert note == (
        "the model also takes bbox, which the entry does not; declare every input with --input NAME:TYPE:DIMS"
    )
    for name in ("BertModel", "RobertaModel", "BertForSequenceClassification"):
        tiny(name, name)
        assert huggingface.from_folder(Path(name)).notes == ()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny("bert")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused("bert").endswith("need the package transformers; pip install 'transformers>=5'")


def test_what_is_exported_already_is_told_from_a_checkpoint(imported: Any, refused_here: Any) -> None:
    imported(f"{HERE}:linear", *X)
    said = refused_here("models/linear/1/model.pt2")
    assert "is exported already; serve it as it is, as NAME/1/model.pt2 of a repository" in said
    assert "cohabit check models/linear/1/model.pt2" in said


def test_a_name_without_an_owner_is_a_hubs_name_too(refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "hub")
    said = refused("bert-base-uncased")
    assert "download it with `hf download bert-base-uncased`, or give its folder" in said


def test_a_function_of_a_file_is_named_by_its_path(imported: Any) -> None:
    Path("package").mkdir()
    Path("package/sizes.py").write_text("INPUTS = 4")
    Path("package/nets.py").write_text(
        "from torch import nn\nfrom sizes import INPUTS\n\ndef make():\n    return nn.Linear(INPUTS, 2)"
    )
    imported("package/nets.py:make", "--input", "input:FP32:-1,4")
    assert Path("models/make/1/model.pt2").is_file()


def test_weights_in_8_bits_are_written_to_the_configuration_with_what_they_cost(
    imported: Any, refused_here: Any
) -> None:
    said = imported(f"{HERE}:wide", "--input", "x:FP32:-1,256", "--weights", "int8")
    assert re.search(r"note: [\d.]+ KiB of [\d.]+ KiB are stored and copied, in int8; beside exact weights, ", said)
    assert re.search(r"output: cosine 0\.999\d+, largest difference \d\.\de-0\d", said)
    assert re.search(r"On the examples, the least cosine with eager PyTorch's is 0\.999\d", said)
    config = Path("models/wide/config.pbtxt").read_text()
    assert re.search(r'key: "weights"\s+value \{\s+string_value: "int8"', config)
    again = refused_here(f"{HERE}:wide", "--input", "x:FP32:-1,256", "--version", "2", "--weights", "bfloat16")
    assert "has a config.pbtxt, which says for all versions what weights are stored as" in again


def test_a_version_is_added_or_replaced_and_others_stay(imported: Any, refused_here: Any) -> None:
    imported(f"{HERE}:linear", *X)
    entry = Path("models/linear")
    (entry / "config.pbtxt").write_text((entry / "config.pbtxt").read_text() + "# mine\n")
    first = (entry / "1" / "model.pt2").read_bytes()
    said = refused_here(f"{HERE}:linear", *X)
    assert "models/linear/1 exists; --replace it, add --version 2, or give another --name" in said
    imported(f"{HERE}:linear", *X, "--version", "2")
    second = (entry / "2" / "model.pt2").read_bytes()
    assert (entry / "1" / "model.pt2").read_bytes() == first
    imported(f"{HERE}:linear", *X, "--replace")
    assert (entry / "1" / "model.pt2").read_bytes() != first, "other random weights"
    assert (entry / "2" / "model.pt2").read_bytes() == second
    assert (entry / "config.pbtxt").read_text().endswith("# mine\n")
    said = refused_here(f"{HERE}:Adding", *X, "--input", "y:FP32:-1,4", "--name", "linear", "--version", "3")
    assert "config.pbtxt" in said, "which has one input"
    assert not (entry / "3").exists()


def test_the_hint_to_serve_does_not_take_one_model_for_all(imported: Any) -> None:
    said = " ".join(imported(f"{HERE}:linear", *X).split())
    assert "serve it with: cohabit serve models" in said
    assert "--memory" not in said
    assert "all of it takes 1MiB of device memory, beside what other models take" in said


def test_an_entry_that_exists_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models" / "linear").mkdir(parents=True)
    assert main(["import", f"{HERE}:linear", *X, "--repository", str(tmp_path / "models")]) == 1
    assert "exists; give another --name, or remove it" in capsys.readouterr().err


def test_inputs_whose_names_are_no_arguments_of_forward_are_bound_in_order_and_said(imported: Any) -> None:
    said = imported(f"{HERE}:Adding", "--input", "first:FP32:-1,4", "--input", "other:FP32:-1,4")
    assert "were bound in order: first as x, other as y" in " ".join(said.split())
    config = Path("models/Adding/config.pbtxt").read_text()
    assert config.index('name: "first"') < config.index('name: "other"')


def test_a_sample_request_is_written_where_json_has_its_types(imported: Any) -> None:
    said = imported(f"{HERE}:Doubling", *X)
    assert "bound in order" not in said
    assert "curl localhost:8000/v2/models/Doubling/infer --data-binary @models/Doubling/sample.json" in said
    (tensor,) = json.loads(Path("models/Doubling/sample.json").read_text())["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"], len(tensor["data"])) == ("x", "FP32", [1, 4], 4)
    said = imported(f"{HERE}:Centering", "--input", "x:BF16:-1,4")
    assert "note: rows influence one another, so requests run alone, in batches of 1, 2" in said
    assert "no sample.json was written: JSON cannot have x, which clients send as bytes" in said
    assert not Path("models/Centering/sample.json").exists()


def test_an_output_may_be_a_view_of_a_parameter(imported: Any) -> None:
    assert "largest difference from eager PyTorch: 0.0e+00" in imported(f"{HERE}:ParameterView", *X)


def test_a_few_integers_may_differ_from_eager_pytorch(imported: Any) -> None:
    said = imported(f"{HERE}:other_integer_element", *X)
    assert (
        "largest difference from eager PyTorch: 6.1e-05 of an output's largest value, or of the elements of" in said
    )


def test_a_model_that_draws_random_numbers_is_not_compared(imported: Any) -> None:
    said = imported(f"{HERE}:Noisy", *X)
    assert "not compared with eager PyTorch: the model draws random numbers" in said
    assert "largest difference" not in said


def test_tied_weights_are_in_safetensors_once(imported: Any) -> None:
    save_model(Tied(), "tied.safetensors")
    said = imported("tied.safetensors", "--factory", f"{HERE}:Tied", *X, "--name", "other")
    assert said.startswith("models/other: ")
    assert Path("models/other/1/model.pt2").is_file()


def test_a_text_model_without_a_largest_length_has_its_tokenizers_or_a_usual_one(refused: Any) -> None:
    save("t5", "T5EncoderModel", vocab_size=20, d_model=8, d_ff=8, num_layers=1, num_heads=1)
    subject = huggingface.from_folder(Path("t5"))
    assert subject.most_tokens == 512
    assert "512 tokens are the most, because nothing in the folder says more" in subject.notes[0]
    assert huggingface.from_folder(Path("t5"), (), Lengths(most=40)).most_tokens == 40
    Path("t5/tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    assert huggingface.from_folder(Path("t5")).most_tokens == 64
    Path("t5/tokenizer_config.json").write_text(json.dumps({"model_max_length": 10**30}))
    assert huggingface.from_folder(Path("t5")).most_tokens == 512
    tiny("bert")
    assert "--max-sequence-length is 17, the model has 16" in refused("bert", "--max-sequence-length", "17")
    both = ("--max-sequence-length", "8", "--sequence-length", "8")
    assert "contradict one another" in refused("bert", *both, status=2)


def clip(folder: str) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 12}
    text, vision = (
        {"vocab_size": 20, "projection_dim": 4, **tokens, **sizes},
        {"image_size": 16, "patch_size": 8, **sizes},
    )
    save(folder, "CLIPModel", text_config=text, vision_config=vision, projection_dim=4)


def test_parts_of_a_configuration_say_what_a_model_of_two_towers_takes(refused: Any) -> None:
    clip("clip")
    subject = huggingface.from_folder(Path("clip"))
    assert {given.name: given.dims for given in subject.inputs} == {
        "input_ids": (-1, -1), "attention_mask": (-1, -1), "pixel_values": (-1, 3, 16, 16)
    }  # fmt: skip
    assert subject.most_tokens == 12
    assert list(subject.module(**subject.examples(2, 0))) == ["text_embeds", "image_embeds"]
    assert subject.notes[0].endswith("no row for each row: logits_per_image, logits_per_text")
    chosen = huggingface.from_folder(Path("clip"), outputs=("image_embeds",))
    assert list(chosen.module(**chosen.examples(2, 0))) == ["image_embeds"]
    assert chosen.notes == ()
    assert "the model has no output logits; it has logits_per_image" in refused("clip", "--outputs", "logits")
    said = refused("clip", "--outputs", "logits_per_text")
    assert "logits_per_text has no row for each row of the inputs, but shape [3, 3] for 3" in said


def test_a_tower_is_imported_by_its_architecture(refused: Any) -> None:
    clip("clip")
    texts = huggingface.from_folder(Path("clip"), architecture="CLIPTextModelWithProjection")
    assert [given.name for given in texts.inputs] == ["input_ids", "attention_mask"]
    assert "text_embeds" in texts.module(**texts.examples(2, 0))
    assert "transformers has no Tower, and CLIPModel has no parts of that" in refused(
        "clip", "--architecture", "Tower"
    )
    assert "--architecture is for Hugging Face models" in refused(
        f"{HERE}:linear", *X, "--architecture", "Tower", status=2
    )
    sizes = {"d_model": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 10}
    frames = {
        "max_source_positions": 6,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "vocab_size": 20,
        "pad_token_id": 0,
    }
    save("whisper", "WhisperForConditionalGeneration", **sizes, **frames)
    assert refused("whisper").endswith("imported with --architecture WhisperEncoder")
    (given,) = huggingface.from_folder(Path("whisper"), architecture="WhisperEncoder").inputs
    assert (given.name, given.dims) == ("input_features", (-1, 10, 12))


def test_spectrograms_waveforms_and_series_have_the_sizes_of_the_folder(refused: Any) -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 1}
    save("ast", "ASTModel", max_length=32, num_mel_bins=16, **sizes)
    waves = {"conv_dim": [8], "conv_stride": [5], "conv_kernel": [10], "num_conv_pos_embeddings": 4}
    save("wave", "Wav2Vec2Model", num_conv_pos_embedding_groups=2, **waves, **sizes)
    Path("wave/preprocessor_config.json").write_text(json.dumps({"sampling_rate": 100}))
    series = {"num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8}
    save("series", "PatchTSTModel", num_hidden_layers=1, num_attention_heads=2, **series)
    found = {name: huggingface.from_folder(Path(name)) for name in ("ast", "wave", "series")}
    assert {name: subject.inputs[0].dims for name, subject in found.items()} == {
        "ast": (-1, 32, 16), "wave": (-1, 1000), "series": (-1, 16, 3)
    }  # fmt: skip
    assert "waveforms have 1000 samples, which are 10 s at 100 Hz" in found["wave"].notes[0]
    assert huggingface.from_folder(Path("wave"), (), Lengths(fixed=400)).inputs[0].dims == (-1, 400)


def test_experts_are_imported(imported: Any) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 3}
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    save("experts", "MixtralForCausalLM", num_hidden_layers=1, **heads, **sizes)
    assert "largest difference from eager PyTorch" in imported("experts")


def test_a_model_that_loops_over_tokens_is_imported_at_one_length(imported: Any) -> None:
    save("mamba", "MambaModel", vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=2)
    said = imported("mamba", "--max-sequence-length", "3")
    assert "exported for sequences of 3 tokens only, because it has a loop over them" in said


class IllConditioned(nn.Module):
    """Eager PyTorch loses digits, which its exported program has; with `error`, that is wrong as well."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.error if torch.compiler.is_exporting() else (x + 1e4) - 1e4


def ill_conditioned() -> nn.Module:
    return IllConditioned(0.0)


def ill_conditioned_and_wrong() -> nn.Module:
    return IllConditioned(0.03)


def test_rounding_is_told_from_error_by_float64(refused: Any, imported: Any) -> None:
    said = refused(f"{HERE}:ill_conditioned_and_wrong", *X)
    assert "differs from eager PyTorch's by 0.0" in said
    assert "from float64 it differs by 0.0" in said
    assert said.endswith("the limit is 1e-04 (--tolerance). Nothing was written")
    assert "so that is rounding" in imported(f"{HERE}:ill_conditioned", *X)
    name = ("--name", "tolerated")
    said = imported(f"{HERE}:ill_conditioned_and_wrong", *X, *name, "--tolerance", "0.1")
    assert "largest difference from eager PyTorch" in said


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_called_so(refused: Any) -> None:
    torch.jit.save(torch.jit.trace(linear(), torch.zeros(1, 4)), "script.pt")
    assert "script.pt is a TorchScript file, which is not supported" in refused("script.pt", status=2)
    assert "script.pt is a TorchScript file, not a state_dict" in refused("script.pt", *LINEAR)


def test_text_models_are_exported_with_a_dynamic_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny("bert")
    subject = huggingface.from_folder(Path("bert"))
    program = export(subject, 8)
    names = program.graph_signature.user_inputs
    shapes = {str(tuple(n.meta["val"].shape)) for n in program.graph.nodes if n.name in names}
    assert len(names) == 3
    assert len(shapes) == 1, "the inputs have one batch and one length"
    assert sorted((int(r.lower), int(r.upper)) for r in program.range_constraints.values()) == [(1, 8), (1, 16)]
    assert [answer.shape for answer in subject.answer(subject.examples(3, 1))] == [(3, 16, 8), (3, 8)]


def _replaced(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _linked(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights elsewhere": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "../secret.safetensors"}}'),
        "weight_map names '../secret.safetensors'",
    ),
    "weights at an absolute path": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "/etc/passwd"}}'),
        "weight_map names '/etc/passwd'",
    ),
    "weights that are missing": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"weight_map": {"w": "none.safetensors"}}'),
        "weight_map names 'none.safetensors'",
    ),
    "a linked tokenizer": (
        lambda f: _linked(f / "tokenizer.json", Path("/etc/passwd")),
        "leads out of the directory",
    ),
    "linked weights": (
        lambda f: _linked(f / "model.safetensors", f.parent.absolute() / "secret.safetensors"),
        "leads out of the directory",
    ),
    "a device": (lambda f: _linked(f / "tokenizer_config.json", Path("/dev/zero")), "is no regular file"),
    "a pipe": (lambda f: os.mkfifo(f / "preprocessor_config.json"), "is no regular file"),
    "a pipe for weights": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors"))[1],
        "is no regular file",
    ),
    "a pipe in a folder": (
        lambda f: ((f / "1_Pooling").mkdir(), os.mkfifo(f / "1_Pooling" / "config.json"))[1],
        "is no regular file",
    ),
    "deep JSON": (lambda f: _replaced(f / "config.json", b"[" * 100_000), "nested too deeply"),
    "a deep index": (
        lambda f: _replaced(f / "model.safetensors.index.json", b'{"a":' * 100_000),
        "nested too deeply",
    ),
    "layers without end": (_config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, the limit is 65536"),
    "layers of a part without end": (_config(text_config={"n_layers": 10**9}), "n_layers is 1000000000"),
    "depths without end": (_config(depths=[2, 10**9]), "depths is 1000000000"),
    "a label far away": (_config(id2label={"100000000": "x"}), "num_labels is 100000001, the limit is 1048576"),
    "labels without end": (_config(num_labels=10**8), "num_labels is 100000000, the limit is 1048576"),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_a_directory_from_elsewhere_is_data(refused: Any, kind: str) -> None:
    tiny("bert")
    Path("secret.safetensors").write_bytes((Path("bert") / "model.safetensors").read_bytes())
    spoil, reason = DIRECTORIES[kind]
    spoil(Path("bert"))
    assert reason in refused("bert")


def test_hugging_faces_cache_links_to_its_own_blobs(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    require_own_files(snapshot)
    (snapshot / "tokenizer.json").symlink_to("../../../models--x/refs")
    (tmp_path / "models--x" / "refs").write_text("{}")
    with pytest.raises(ImportFailed, match="leads out of the directory"):
        require_own_files(snapshot)


@pytest.mark.parametrize("name", ["pipe.pt", "pipe.safetensors", "zero.pt", "zero.safetensors"])
def test_a_checkpoint_is_a_regular_file(refused: Any, name: str) -> None:
    if name.startswith("pipe"):
        os.mkfifo(name)
    else:
        Path(name).symlink_to("/dev/zero")
    assert "is no checkpoint file" in refused(name, *LINEAR, status=2)


def test_an_import_measures_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The server does, in the background: from what the cache has of the import, its first start serves at once."""
    cache = tmp_path / "cache"
    flags = ("--repository", str(tmp_path / "models"), "--cache", str(cache), "--max-batch", "4")
    assert main(["import", f"{HERE}:linear", *X, *flags]) == 0
    progress = capfd.readouterr().err
    assert "comparing with eager PyTorch" in progress
    assert "measuring" not in progress
    profiles = [profile_format.decode(cache_file.read(path)) for path in (cache / "profiles").iterdir()]
    assert len(profiles) == 3, "of batches 1, 2 and 4"
    assert all(profile.provisional for profile in profiles)
    assert not [path for path in cache.glob("plans/*") if "division" not in path.name], "nothing was searched for"


def test_an_import_prints_nothing_of_its_libraries(tmp_path: Path) -> None:
    flags = ("--repository", str(tmp_path / "models"), "--cache", str(tmp_path / "cache"), "--max-batch", "2")
    command = [sys.executable, "-m", "cohabit.server.cli", "import", f"{HERE}:linear", *X, *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert all(line.startswith("linear: ") for line in ended.stderr.splitlines()), ended.stderr
