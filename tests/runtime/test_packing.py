"""Weights are packed for this machine, computed with in place, and packed again for another machine."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering import fusion, packing, weights
from cohabit.runtime.lowering.lower import Lowered, cached, lower
from cohabit.runtime.lowering.model import LEAST_FILE_BYTES
from cohabit.runtime.options import Options
from tests.support.runtime import models

PACKED = Options(packed=True)

pytestmark = pytest.mark.skipif(packing.unavailable() is not None, reason=str(packing.unavailable()))


@pytest.fixture(autouse=True)
def _pack_small_layers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)


def pieces(lowered: Lowered) -> dict[str, str | None]:
    return {piece.name: piece.layout for segment in lowered.manifest.segments for piece in segment.pieces}


def test_a_packed_weight_computes_from_the_bytes_that_it_is_given() -> None:
    x, weight = torch.randn(4, 48), torch.randn(32, 48)
    original = packing.pack_linear(weight, [4])
    raw = np.empty(packing.stored_bytes(original) + 128, np.uint8)
    start = -raw.ctypes.data % 64
    for offset in (start, start + 64):
        own = raw[offset : offset + packing.stored_bytes(original)]
        own[:] = packing.raw_bytes(original)
        layout = packing.layout_of(original)
        moved = packing.packed_tensor(own.ctypes.data, weight.dtype, (32, 48), layout)
        torch.testing.assert_close(packing.LINEAR(x, moved, None, "none", [], ""), x @ weight.T)
        own[:] = 0
        assert not packing.LINEAR(x, moved, None, "none", [], "").any()


def test_the_manifest_has_the_packed_bytes_and_their_layout(constructs: models.Constructs, tmp_path: Path) -> None:
    lowered = constructs.lowered("conv_norm", tmp_path, PACKED)
    by_name = {piece.name: piece for segment in lowered.manifest.segments for piece in segment.pieces}
    packed = [piece for piece in by_name.values() if piece.layout is not None]
    assert sorted(len(piece.shape) for piece in packed) == [2, 4, 4]
    assert lowered.manifest.machine == packing.machine()
    data = lowered.weights_path.read_bytes()
    for segment in lowered.manifest.segments:
        for piece in segment.pieces:
            assert (segment.offset + piece.offset) % 64 == 0
            assert piece.nbytes >= 4 * torch.Size(piece.shape).numel()
            if len(piece.shape) == 2 and piece.layout is not None:
                raw = np.frombuffer(data[segment.offset + piece.offset :][: piece.nbytes], np.uint8)
                again = packing.pack_linear(models.made("conv_norm").head.weight.detach(), [2, 4])  # type: ignore[union-attr, operator]
                assert np.array_equal(raw, packing.raw_bytes(again))


def test_tied_weights_are_packed_once(constructs: models.Constructs, tmp_path: Path) -> None:
    lowered = constructs.lowered("tied", tmp_path, PACKED)
    packed = [name for name, layout in pieces(lowered).items() if layout is not None]
    assert sum("mix" in name for name in packed) == 1
    assert any("rows" in name for name in packed), "each slice of a split layer is packed by itself"


@pytest.mark.parametrize(("name", "kernels"), [("lstm", 3), ("bidirectional_lstm", 6)])
def test_each_direction_of_an_lstm_layer_is_a_kernel_of_its_own(
    constructs: models.Constructs, name: str, kernels: int, tmp_path: Path
) -> None:
    lowered = constructs.lowered(name, tmp_path, PACKED)
    assert [op.target for op in lowered.graphs[Bucket(2)].ops].count("aten.mkldnn_rnn_layer.default") == kernels
    assert sum(layout is not None for layout in pieces(lowered).values()) == 2 * kernels


def test_another_machine_s_weights_are_packed_anew(
    constructs: models.Constructs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = constructs.lowered("wide", tmp_path, PACKED)
    monkeypatch.setattr(packing, "machine", lambda: "another machine")
    there = constructs.lowered("wide", tmp_path, PACKED)
    assert there.manifest.machine == "another machine"
    assert there.weights_path != here.weights_path
    monkeypatch.undo()
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    again = constructs.lowered("wide", tmp_path, PACKED)
    assert models.contents(again) == models.contents(here)


def test_lowering_for_other_batch_sizes_leaves_the_weights_that_a_server_uses(
    constructs: models.Constructs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 0)
    used = constructs.lowered("wide", tmp_path, PACKED, batches=[1])
    content = used.weights_path.read_bytes()
    other = constructs.lowered("wide", tmp_path, PACKED, batches=[1, 4])
    assert other.manifest != used.manifest
    assert used.weights_path.read_bytes() == content
    again = cached(used.archive, "wide", [1], tmp_path, PACKED)
    assert (again.manifest, again.weights_path) == (used.manifest, used.weights_path)
    assert models.contents(again) == models.contents(used)


def test_without_the_c_interface_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_library", lambda: ctypes.CDLL(None))
    packing.unavailable.cache_clear()
    assert "aoti_torch" in str(packing.unavailable())
    monkeypatch.undo()
    monkeypatch.setattr(packing, "LINEAR", None)
    packing.unavailable.cache_clear()
    assert packing.unavailable() == "torch lacks oneDNN's fused operators"
    monkeypatch.undo()
    packing.unavailable.cache_clear()
    assert packing.unavailable() is None


def test_weights_that_are_read_otherwise_too_stay_plain(tmp_path: Path) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) @ self.layer.weight

    lowered = models.lowered(Both(), {"x": torch.zeros(3, 8)}, tmp_path, "both", [2], options=PACKED)
    assert not any(pieces(lowered).values())


def test_small_products_stay_plain(
    constructs: models.Constructs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "LEAST_MULTIPLICATIONS", 2 * 384 * 384 + 1)
    assert not any(pieces(constructs.lowered("wide", tmp_path, PACKED)).values())


def test_lstms_of_reduced_precision_stay_plain(constructs: models.Constructs, tmp_path: Path) -> None:
    assert not any(pieces(constructs.lowered("lstm", tmp_path, Options("bfloat16", packed=True))).values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reduced_precision_is_packed_where_the_processor_has_it(
    constructs: models.Constructs, dtype: str, tmp_path: Path
) -> None:
    lowered = constructs.lowered("wide", tmp_path, Options(dtype, packed=True))  # type: ignore[arg-type]
    assert any(pieces(lowered).values()) == packing.supports(getattr(torch, dtype))


_STEADY = """
import sys
import torch
from pathlib import Path
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.lowering import fusion
from cohabit.runtime.lowering.lower import lower
from cohabit.runtime.options import Options
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime.backends import cpu, opened

fusion.LEAST_MULTIPLICATIONS = 0
fusion.fastest = lambda shape: "packed"
for name, threads in (("net", 1), ("bottleneck", 2)):
    torch.set_num_threads(threads)
    folder = Path(sys.argv[1]) / name
    lowered = lower(folder / "model.pt2", name, [1, 2], folder / "cache", options=Options(packed=True))
    with opened(cpu, lowered) as bench:
        for batch in (1, 2):
            program = bench.beside(lowered, resident_plan(lowered.graphs[Bucket(batch)]), Bases(0, 32 << 20))
            print(f"steady {name}", flush=True)
            bench.executor.run(program, lowered.examples(Bucket(batch)))
        print("end", flush=True)
"""


class Net(torch.nn.Module):
    """Convolutions of several kinds, with a residual, and a linear layer that is large enough to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 64, 7, 2, 3)
        self.deep = torch.nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.point = torch.nn.Conv2d(64, 128, 1)
        self.back = torch.nn.Conv2d(128, 64, 3, padding=1)
        self.head = torch.nn.Linear(64 * 64, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        y = torch.nn.functional.silu(self.point(torch.nn.functional.hardtanh(self.deep(x), 0, 6)))
        return torch.relu(self.head(torch.relu(self.back(y) + x).flatten(1)))


class Bottleneck(torch.nn.Module):
    """A 1x1 convolution with a residual for whose weight oneDNN wants two layouts if there are two threads."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = torch.nn.Conv2d(3, 256, 3, padding=1)
        self.wide = torch.nn.Conv2d(256, 1024, 1)
        self.short = torch.nn.Conv2d(3, 1024, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.wide(torch.relu(self.narrow(x))) + self.short(x))


@pytest.mark.long
def test_no_call_reorders_a_weight(tmp_path: Path) -> None:
    for name, net, size in (("net", Net(), 16), ("bottleneck", Bottleneck(), 14)):
        models.export(net, {"x": torch.zeros(3, 3, size, size)}, tmp_path / name / "model.pt2")
    done = subprocess.run(
        [sys.executable, "-c", _STEADY, str(tmp_path)],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_exec", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    runs = [run.partition("end\n")[0] for run in done.stdout.split("steady ")[1:]]
    assert [run.partition("\n")[0] for run in runs] == ["net"] * 2 + ["bottleneck"] * 2
    for run, layers in zip(runs, (5, 5, 3, 3), strict=True):
        ops = [line.partition(",exec,cpu,")[2].split(",")[0] for line in run.splitlines() if ",exec,cpu," in line]
        assert sum(ops.count(kernel) for kernel in ("convolution", "inner_product", "matmul")) >= layers
        assert "reorder" not in ops


@pytest.mark.parametrize("options", [PACKED, Options(), Options(dtype="bfloat16")])
def test_weights_that_lowering_computes_are_in_files_without_names(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel can write them out: every one of 64 KiB lies in the archive or in a file that has been deleted."""
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 128, 3), torch.nn.BatchNorm2d(128)).eval()
    torch.nn.init.uniform_(model[1].running_var, 0.5, 2.0)
    models.export(model, {"input": torch.zeros(2, 64, 8, 8)}, tmp_path / "model.pt2")
    kept: dict[str, str] = {}

    def note(path: Path, manifest: weights.Manifest, own: Mapping[str, torch.Tensor], *rest: Any) -> None:
        maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
        for name, tensor in own.items():
            address = packing._onednn.data_ptr(tensor) if packing.is_packed(tensor) else tensor.data_ptr()
            if packing.stored_bytes(tensor) >= LEAST_FILE_BYTES:
                (kept[name],) = (
                    line[5].strip() if len(line) > 5 else "anonymous"
                    for line in maps
                    if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)
                )
        write(path, manifest, own, *rest)

    write = weights.write
    monkeypatch.setattr(weights, "write", note)
    lowered = lower(tmp_path / "model.pt2", "model", [2], tmp_path / "cache", options=options)
    assert len(kept) == 1
    assert all(file.startswith(str(tmp_path / "cache")) and file.endswith("(deleted)") for file in kept.values())
    assert [file for file in lowered.weights_path.parent.iterdir() if file.suffix != ".json"] == [
        lowered.weights_path
    ]


def test_weights_are_packed_anew_for_another_number_of_threads(tmp_path: Path) -> None:
    """OneDNN may want another layout for it, and would convert weights of the first one in every call."""
    models.export(models.ConvNorm().eval(), {"x": torch.zeros(2, 3, 8, 8)}, tmp_path / "m.pt2")
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            lowered = lower(tmp_path / "m.pt2", "m", [2], tmp_path / "cache", options=Options(packed=True))
            found.append((lowered.weights_path, packing.machine()))
            again = cached(lowered.archive, "m", [2], tmp_path / "cache", Options(packed=True))
            assert again.weights_path == lowered.weights_path
    finally:
        torch.set_num_threads(threads)
    (first, one), (second, two) = found
    assert first != second
    assert one != two
