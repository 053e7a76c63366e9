"""Transformers over token ids: BERT encoders and a GPT-2 prefill, with random weights."""

import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from cohabit.loadgen.zoo import Inputs
from cohabit.loadgen.zoo.seeded import EXAMPLE_BATCH, seeded, token_ids


class Encoder(nn.Module):
    """`input_ids`, `attention_mask` [batch, length] int64 in, `pooled` [batch, hidden] out."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"pooled": self.bert(input_ids=input_ids, attention_mask=attention_mask).pooler_output}


class Prefill(nn.Module):
    """`input_ids` [batch, length] int64 in, `logits` [batch, vocabulary] of the last position out."""

    def __init__(self, gpt2: GPT2LMHeadModel) -> None:
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        logits_B1V = self.gpt2(input_ids=input_ids, use_cache=False, logits_to_keep=1).logits
        return {"logits": logits_B1V[:, 0]}


def bert_base(seed: int) -> tuple[nn.Module, Inputs]:
    return _encoder(seed, hidden=768, layers=12, heads=12, length=128)


def bert_short(seed: int) -> tuple[nn.Module, Inputs]:
    """BERT of DistilBERT's size."""
    return _encoder(seed, hidden=768, layers=6, heads=12, length=16)


def bert_large(seed: int) -> tuple[nn.Module, Inputs]:
    return _encoder(seed, hidden=1024, layers=24, heads=16, length=128)


def bert_small(seed: int) -> tuple[nn.Module, Inputs]:
    return _encoder(seed, hidden=256, layers=4, heads=4, length=64)


def gpt2(seed: int) -> tuple[nn.Module, Inputs]:
    with seeded(seed):
        config = GPT2Config(attn_implementation="sdpa", use_cache=False)
        model = Prefill(GPT2LMHeadModel(config)).eval()
        return model, {"input_ids": token_ids(config.vocab_size, length=64)}


def _encoder(seed: int, hidden: int, layers: int, heads: int, length: int) -> tuple[nn.Module, Inputs]:
    config = BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        attn_implementation="sdpa",
    )
    with seeded(seed):
        model = Encoder(BertModel(config)).eval()
        mask_BT = torch.ones(EXAMPLE_BATCH, length, dtype=torch.int64)
        mask_BT[1, length // 2 :] = 0
        return model, {"input_ids": token_ids(config.vocab_size, length), "attention_mask": mask_BT}
