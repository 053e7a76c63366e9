"""Files of a Hugging Face model directory, checked before anything is read: a foreign directory is data."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cohabit.server.errors import ImportFailed

_INDEX = ".index.json"
_MOST_JSON_BYTES = 64 << 20
_MOST_PARTS = 1 << 16
"""Maximum number of layers, blocks, stages or experts of a model."""
_MOST_CLASSES = 1 << 20
_COUNTS_PARTS = re.compile(r"layers?|blocks?|depths?|stages?|experts")
_CLASSES = ("num_labels", "num_classes")


def cached_folder(name: str) -> Path:
    """Return the folder of a hub's model in Hugging Face's local cache. Raises ImportFailed if it is missing."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as error:
        raise ImportFailed(
            f"{name}: hub names need the package {error.name}; pip install 'transformers>=5', or give a folder"
        ) from error
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ImportFailed(
            f"{name} is neither a path here nor in the local Hugging Face cache ({constants.HF_HUB_CACHE}); importing"
            f" never uses the network: download it with `hf download {name}`, or give its folder"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ImportFailed."""
    try:
        if not path.is_file():
            raise ImportFailed(f"{path} is not a regular file")
        if (nbytes := path.stat().st_size) > _MOST_JSON_BYTES:
            raise ImportFailed(f"{path} has {nbytes} bytes, the limit is {_MOST_JSON_BYTES}")
        read = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ImportFailed(f"{path} cannot be read: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise ImportFailed(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ImportFailed(f"{path} is not a JSON object")
    return read


def own_roots(folder: Path) -> list[Path]:
    """Return the folders in which a model directory's files, or those of a folder in it, may lie."""
    root = folder.resolve()
    blobs = [above.parent.parent / "blobs" for above in (root, *root.parents) if above.parent.name == "snapshots"]
    return [root, *blobs]


def require_own_files(folder: Path) -> None:
    """Raise ImportFailed unless a directory's files, and the parts of its weights, are regular files inside it.

    In Hugging Face's cache, they are links to its blobs.
    """
    roots = own_roots(folder)
    for path in sorted((*folder.iterdir(), *folder.glob("*/config.json"))):
        if path.is_dir():
            continue
        if not path.is_file():
            raise ImportFailed(f"{path} is not a regular file; remove it")
        if not any((target := path.resolve()).is_relative_to(allowed) for allowed in roots):
            raise ImportFailed(f"{path} is a link that leads out of the directory, to {target}; copy the file")
    for index in sorted(folder.glob(f"*{_INDEX}")):
        parts = read_object(index).get("weight_map")
        for name in set(map(str, parts.values())) if isinstance(parts, dict) else ():
            if Path(name).name != name or not (folder / name).is_file():
                raise ImportFailed(f"{index}: weight_map names '{name[:80]}', which is not a file of the directory")


def require_possible(config: Path, written: Any) -> None:
    """Raise ImportFailed for a configuration with impossibly many layers or classes: building it would not end."""
    for key, value in _numbers(written):
        most = _MOST_CLASSES if key in _CLASSES else _MOST_PARTS if _COUNTS_PARTS.search(key) else None
        if most is not None and value > most:
            raise ImportFailed(f"{config}: {key} is {value}, the limit is {most}")


def _numbers(written: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer with its key, and the number of classes in `id2label`."""
    pending = [(key, written)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            if key == "id2label":
                yield "num_labels", max((int(n) + 1 for n in value if str(n).isdecimal()), default=0)
            pending += value.items()
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        elif isinstance(value, int):
            yield key, value
