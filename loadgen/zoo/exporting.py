"""Exports models to `.pt2` files with a dynamic batch dimension."""

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

MAX_BATCH = 64


def export_model(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Export with the first dimension of every input as one dynamic dimension of 1 to MAX_BATCH."""
    batch = Dim("batch", min=1, max=MAX_BATCH)
    with warnings.catch_warnings(), torch.no_grad():
        # nn.LSTM refreshes a list of its parameters, which export mistakes for a change of state.
        warnings.filterwarnings(
            "ignore", message=r"(?s)The tensor attributes? .*_flat_weights", category=UserWarning
        )
        return torch.export.export(model, (), dict(inputs), dynamic_shapes={name: {0: batch} for name in inputs})


def save_model(program: ExportedProgram, path: Path, notes: Mapping[str, str]) -> None:
    """Write `program` to `path` atomically. `notes` become files inside the archive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary folder, not a temporary name: the file name becomes the root folder inside the archive.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".unfinished-") as folder:
        unfinished = Path(folder) / path.name
        torch.export.save(program, unfinished, extra_files=dict(notes))
        unfinished.replace(path)
