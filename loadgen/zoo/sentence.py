"""all-MiniLM-L6-v2 with its real weights: embeds sentences as unit vectors."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH
from cohabit.loadgen.zoo.tokens import minilm_folder, tokenize

_EXAMPLES = ("A man is eating pasta.", "Sixteen models share the memory of one device, and none waits for another.")

_UNUSED = ("pooler.", "embeddings.position_ids")
"""Weights in the file that sentence embeddings do not use."""


class SentenceEmbedder(nn.Module):
    """`input_ids`, `attention_mask` [batch, length] int64 in, `embedding` [batch, 384] of length 1 out."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        states_BTH = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask_BT1 = attention_mask.unsqueeze(-1).to(states_BTH.dtype)
        mean_BH = (states_BTH * mask_BT1).sum(dim=1) / mask_BT1.sum(dim=1).clamp(min=1e-9)
        return {"embedding": F.normalize(mean_BH, dim=1)}


def minilm(seed: int, length: int = 128) -> tuple[nn.Module, Inputs]:
    """Load the model for sentences of up to `length` tokens; the seed is ignored."""
    del seed
    config = BertConfig.from_pretrained(minilm_folder(), local_files_only=True, attn_implementation="sdpa")
    weights = load_file(minilm_folder() / "model.safetensors")
    bert = BertModel(config, add_pooling_layer=False)
    bert.load_state_dict({k: v for k, v in weights.items() if not k.startswith(_UNUSED)})
    ids_BT, mask_BT = tokenize(_EXAMPLES[:EXAMPLE_BATCH], length)
    inputs = {"input_ids": torch.from_numpy(ids_BT), "attention_mask": torch.from_numpy(mask_BT)}
    return SentenceEmbedder(bert).eval(), inputs


def minilm_short(seed: int) -> tuple[nn.Module, Inputs]:
    return minilm(seed, length=32)
