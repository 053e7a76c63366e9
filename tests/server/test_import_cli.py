"""What `cohabit import` refuses, with the reason and the way out. A refused import leaves nothing in the repository."""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from cohabit.planner import cache_file
from cohabit.planner import profile as profile_format
from cohabit.server.cli import main
from cohabit.server.errors import ImportFailed
from cohabit.server.importing.declared_input import largest_size, parse_input
from cohabit.server.importing.exporting import export
from cohabit.server.importing.factory import _load
from cohabit.server.importing.subject import declared
from tests.support.server.import_modules import HERE, LINEAR, Code, Tied, X, linear

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_files_of_other_kinds_and_cut_ones_are_named_before_torch_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(linear().state_dict(), tmp_path / "whole.safetensors")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    raw = (tmp_path / "whole.safetensors").read_bytes()
    for name, content in {
        "a.gguf": b"GGUF\x03\0\0\0",
        "b.bin": b"GGUF\x03\0\0\0",
        "c.onnx": b"\x08\x07",
        "d.h5": b"\x89HDF\r\n\x1a\n",
        "e.safetensors": raw[:-1],
        "f.safetensors": raw[:20],
        "folder/model.safetensors": raw[:-1],
        "g.pt": b"\x80\x04.",
    }.items():
        (tmp_path / name).write_bytes(content)
    program = """
import sys
from cohabit.server.cli import main
for arguments in sys.argv[1].split(";"):
    assert main(arguments.split()) != 0
assert "torch" not in sys.modules
"""
    made = "--factory tests:linear"
    commands = [
        "a.gguf",
        f"b.bin {made}",
        f"c.onnx {made}",
        "d.h5",
        f"e.safetensors {made}",
        f"f.safetensors {made}",
    ]
    commands += ["folder", "nowhere.pt", "nowhere.py:make", "nowhere", "no_such_package:make"]
    commands = [f"import {command}" for command in commands]
    commands += ["check g.pt", "check c.onnx", "plan a.gguf --memory 1MiB", "plan whole.safetensors --memory 25%"]
    commands += ["serve nowhere --memory 1MiB"]
    monkeypatch.chdir(tmp_path)
    run = subprocess.run(
        [sys.executable, "-c", program, ";".join(commands)], capture_output=True, text=True, check=True
    )
    lines = [line for line in run.stderr.splitlines() if line.startswith("cohabit: ")]
    reasons = ["is a GGUF file", "is a GGUF file", "is an ONNX file", "is an HDF5 file"]
    reasons += [f"is cut short: it has {len(raw) - 1} bytes, and its header says at least {len(raw)};"]
    reasons += ["is cut short: it has 20 bytes", "folder/model.safetensors is cut short"]
    reasons += ["nowhere.pt does not exist", "there is no file 'nowhere.py'"]
    reasons += ["is neither a path here nor in the local Hugging Face cache", "no module named 'no_such_package'"]
    reasons += ["g.pt is a state_dict or another pickle", "c.onnx is an ONNX file", "a.gguf is a GGUF file"]
    reasons += ["whole.safetensors is a safetensors file", "model repository nowhere does not exist"]
    for line, reason in zip(lines, reasons, strict=True):
        assert reason in line


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]  # type: ignore[no-any-return]


def test_a_dimension_that_a_module_takes_at_one_size_is_named() -> None:
    subject = declared(Recurrent(), [parse_input("x:FP32:-1,-1,4")], 64, has_declared_sizes=True)
    with pytest.raises(
        ImportFailed, match="dimension 1 of input x is declared as dynamic, and the module works for"
    ):
        export(subject, 4)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere/at/all"], "nowhere/at/all does not exist; give a folder, a hub's name, a checkpoint, MODULE:F"),
        (["nowhere.safetensors"], "nowhere.safetensors does not exist; give a folder, a hub's name, a checkpoint"),
        (["nowhere.py:make"], "nowhere.py:make: there is no file 'nowhere.py'; write SCRIPT.py:FUNCTION"),
        (["script.py:make"], "script.py:make: script.py defines no function 'make'"),
        (["script.py:four"], "script.py:four: four of script.py is a int, not a function"),
        (["empty"], "empty is not a model directory: it has neither config.json nor model.onnx"),
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
        (["no_such_package:linear"], "no module named 'no_such_package'"),
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


def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(refused: Any) -> None:
    Path("code.pt").write_bytes(pickle.dumps({"weight": Code()}))
    torch.save({"weight": Code()}, "zipped.pt")
    for name in ("code.pt", "zipped.pt"):
        assert "is a pickle with more than tensors in it, and would run code" in refused(name, *LINEAR)
    Path("text.safetensors").write_text("nothing")
    assert "text.safetensors is not a safetensors file" in refused("text.safetensors", *LINEAR)


def test_what_is_exported_already_is_told_from_a_checkpoint(imported: Any, refused_here: Any) -> None:
    imported(f"{HERE}:linear", *X)
    said = refused_here("models/linear/1/model.pt2")
    assert "is exported already; serve it as it is, as NAME/1/model.pt2 of a repository" in said
    assert "cohabit check models/linear/1/model.pt2" in said


def test_a_function_of_a_file_is_named_by_its_path(imported: Any) -> None:
    Path("package").mkdir()
    Path("package/sizes.py").write_text("INPUTS = 4")
    Path("package/nets.py").write_text(
        "from torch import nn\nfrom sizes import INPUTS\n\ndef make():\n    return nn.Linear(INPUTS, 2)"
    )
    imported("package/nets.py:make", "--input", "input:FP32:-1,4")
    assert Path("models/make/1/model.pt2").is_file()


def test_a_function_of_tensors_is_imported_with_its_arguments_as_inputs(imported: Any) -> None:
    Path("steps.py").write_text(
        "def blend(first, second, *, share=0.25):\n"
        '    """Mix two images."""\n'
        "    return {'mixed': share * first + (1 - share) * second}"
    )
    imported("steps.py:blend", "--input", "first:FP32:-1,3", "--input", "second:FP32:-1,3")
    program = torch.export.load("models/blend/1/model.pt2")
    first, second = torch.rand(2, 3), torch.rand(2, 3)
    made = program.module()(first=first, second=second)
    assert torch.equal(made["mixed"], 0.25 * first + 0.75 * second)


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


@pytest.mark.parametrize(
    ("module", "expected", "absent"),
    [
        ("ParameterView", "largest difference from eager PyTorch: 0.0e+00", "not compared"),
        (
            "other_integer_element",
            "eager PyTorch: 6.1e-05 of an output's largest value, or of the elements of",
            "not compared",
        ),
        ("Noisy", "not compared with eager PyTorch: the model draws random numbers", "largest difference"),
        ("linear", "all of it takes 1MiB of device memory, beside what other models take", "--memory"),
    ],
)
def test_an_import_says_what_became_of_the_module(imported: Any, module: str, expected: str, absent: str) -> None:
    said = " ".join(imported(f"{HERE}:{module}", *X).split())
    assert expected in said
    assert absent not in said
    assert "serve it with: cohabit serve models" in said


def test_tied_weights_are_in_safetensors_once(imported: Any) -> None:
    save_model(Tied(), "tied.safetensors")
    said = imported("tied.safetensors", "--factory", f"{HERE}:Tied", *X, "--name", "other")
    assert said.startswith("models/other: ")
    assert Path("models/other/1/model.pt2").is_file()


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
    assert "script.pt is a TorchScript file, which is not supported" in refused("script.pt", *LINEAR, status=2)


@pytest.mark.parametrize("name", ["pipe.pt", "pipe.safetensors", "zero.pt", "zero.safetensors"])
def test_a_checkpoint_is_a_regular_file(refused: Any, name: str) -> None:
    if name.startswith("pipe"):
        os.mkfifo(name)
    else:
        Path(name).symlink_to("/dev/zero")
    assert "is not a checkpoint file" in refused(name, *LINEAR, status=2)


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
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert all(line.startswith("linear: ") for line in ended.stderr.splitlines()), ended.stderr
