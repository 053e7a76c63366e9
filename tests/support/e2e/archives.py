"""Zoo models as archives, each exported once, and repositories made of them."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from cohabit.loadgen.zoo import ZOO
from cohabit.loadgen.zoo.exporting import export_model, save_model
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.archive_file import fingerprint
from cohabit.runtime.lowering.lower import cached
from cohabit.runtime.options import Options
from tests.support.runtime.models import locked

Arrays = dict[str, NDArray[Any]]


class Archives:
    """Archives and repositories below one folder. A model is exported, and lowered into the cache, once per run."""

    def __init__(self, root: Path, shared: Path) -> None:
        """Archives and the server's cache are below `shared`, a folder of all workers of the run."""
        self.root = root
        self._shared = shared / "zoo"
        self.cache = shared / "cache"
        self._models: dict[str, torch.nn.Module] = {}
        self._examples: dict[str, dict[str, torch.Tensor]] = {}
        self._count = 0

    def model(self, name: str) -> torch.nn.Module:
        """The model itself, in eval mode."""
        self.archive(name)
        return self._models[name]

    def archive(self, name: str) -> Path:
        path = self.root / "archives" / name / "model.pt2"
        if name not in self._models:
            model, example = ZOO[name].build()
            shared = self._shared / name / "model.pt2"
            with locked(shared.with_suffix(".lock")):
                if not shared.exists():
                    save_model(export_model(model, example), shared.with_suffix(".new"), {})
                    shared.with_suffix(".new").rename(shared)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(shared, path)
            self._models[name], self._examples[name] = model, dict(example)
        return path

    def repository(self, *names: str) -> Path:
        """A new repository with these models."""
        self._count += 1
        root = self.root / "repositories" / str(self._count)
        for name in names:
            self.put(root, name)
        return root

    def put(self, repository: Path, name: str, folder: str | None = None) -> Path:
        """Add a model to a repository as a link, which nobody may write to. Returns its path there."""
        path = repository / (folder or name) / "1" / "model.pt2"
        path.parent.mkdir(parents=True)
        os.link(self.archive(name), path)
        return path

    def inputs(self, name: str, batch: int) -> Arrays:
        """The model's example inputs, in turns and in reverse, up to a batch."""
        self.archive(name)
        return {
            key: torch.cat([value, value.flip(0)] * batch)[:batch].numpy()
            for key, value in self._examples[name].items()
        }

    def eager(self, name: str, inputs: Arrays) -> Arrays:
        """What the model itself answers."""
        return _answer(self.model(name), inputs)

    def weight_bytes(self, name: str, batches: Sequence[int]) -> int:
        """What the server counts as the model's weights, once it has loaded it for these batch sizes."""
        options = Options(packed=packing.unavailable() is None)
        manifest = cached(fingerprint(self.archive(name)), name, batches, self.cache / "weights", options).manifest
        return manifest.segment_bytes + manifest.table_bytes

    def forget(self, name: str) -> None:
        """Give back the memory and the disk of a model."""
        for folder in (self.cache / "weights").glob(f"{fingerprint(self.archive(name))[:32]}*"):
            shutil.rmtree(folder)
        for path in self.root.glob(f"repositories/*/{name}/1/model.pt2"):
            path.unlink()
        self.archive(name).unlink()
        del self._models[name], self._examples[name]


def _answer(model: torch.nn.Module, inputs: Arrays) -> Arrays:
    with torch.no_grad():
        outputs = model(**{key: torch.from_numpy(value.copy()) for key, value in inputs.items()})
    return {key: value.numpy() for key, value in outputs.items()}
