"""Inference graphs of the networks in the papers and of today's, lowered as the runtime lowers, without weights.

Batch norms are folded, ReLUs and additions work in place, large layers come in slices, embedding tables from 1 MiB on
stay on the host and their rows arrive as inputs: the rewrites are those of `runtime.lowering.rewrite`. Scratch is not
known here and counts as none.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.initialization import no_init_weights

from benchmarks.planner.cache import DEFAULT_CACHE, cached
from benchmarks.planner.capture import Captured, captured, join_weights, own_storages, trace
from benchmarks.planner.inception import inception_v4
from benchmarks.planner.nasnet import NasNetA
from benchmarks.planner.recurrent import Lstm
from cohabit.loadgen.zoo.text import Encoder, Prefill
from cohabit.loadgen.zoo.vision import ImageClassifier
from cohabit.runtime.lowering.exported import from_program
from cohabit.runtime.lowering.model import FxModel
from cohabit.runtime.lowering.rewrite import rewrite
from cohabit.runtime.options import DEFAULTS

SEQUENCE = 128
LSTM_LAYERS, LSTM_WIDTH, LSTM_STEPS = 8, 1024, 25


class Network(NamedTuple):
    """How to build a network, and the inputs of a batch."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, ...]]


def resnet(scale: int = 1) -> nn.Module:
    """ResNet-152 (He et al. 2016), all widths times `scale`."""
    widths = [256 * scale << stage for stage in range(4)]
    config = ResNetConfig(embedding_size=64 * scale, hidden_sizes=widths, depths=[3, 8, 36, 3], num_labels=1000)
    return ImageClassifier(ResNetForImageClassification(config))


def _images(side: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.empty(batch, 3, side, side),)


def _tokens(count: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: tuple(torch.empty(batch, SEQUENCE, dtype=torch.int64) for _ in range(count))


def _steps(batch: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(batch, LSTM_WIDTH) for _ in range(LSTM_STEPS))


NETWORKS: Mapping[str, Network] = {
    "resnet152": Network(resnet, _images(224)),
    "inception_v4": Network(inception_v4, _images(299)),
    "nasnet_a_large": Network(NasNetA, _images(331)),
    "bert_base": Network(
        lambda: Encoder(BertModel(BertConfig(attn_implementation="sdpa"))),
        _tokens(2),
    ),
    "gpt2": Network(
        lambda: Prefill(GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa", use_cache=False))),
        _tokens(1),
    ),
    "vit_b16": Network(
        lambda: ImageClassifier(ViTForImageClassification(ViTConfig(num_labels=1000, attn_implementation="sdpa"))),
        _images(224),
    ),
    "lstm8": Network(lambda: Lstm(LSTM_LAYERS, LSTM_WIDTH), _steps),
}


def inference_graph(name: str, batch: int = 1, cache: Path | None = DEFAULT_CACHE) -> Captured:
    """The graph of one of `NETWORKS` at a batch size, and the work of its ops."""
    return cached(f"{name}-b{batch}", cache, lambda: capture_inference(name, NETWORKS[name], batch))


def capture_inference(name: str, network: Network, batch: int) -> Captured:
    """Export, rewrite and capture a network on fake tensors."""
    mode = FakeTensorMode()
    with mode, no_init_weights(), torch.no_grad():
        module, inputs = _built(network).eval(), network.inputs(batch)
        program = torch.export.export(module, inputs)
        model = from_program(name, program)
        rewrite(model, DEFAULTS, [{}])
    return _captured(model, batch, mode)


def parameter_count(name: str) -> int:
    """Weights of a network before it is lowered; tied ones count once."""
    with FakeTensorMode(), no_init_weights():
        return sum(p.numel() for p in _built(NETWORKS[name]).parameters())


def _built(network: Network) -> nn.Module:
    """The network, its weights tied: that is part of the initialisation that is left out."""
    module = network.build()
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.tie_weights()
    return module


def _captured(model: FxModel, batch: int, mode: FakeTensorMode) -> Captured:
    weights = own_storages(model.weights, mode)
    with mode:
        ports = zip(model.input_nodes, model.inputs, strict=True)
        inputs = {node.name: torch.empty(port.at(batch, {}), dtype=port.dtype) for node, port in ports}
    values = {n: ("parameter", t) for n, t in weights.items()} | {n: ("input", t) for n, t in inputs.items()}
    found = trace(model.graph, values, model.tables)  # type: ignore[arg-type]
    outputs = [s for s in found.results if s is not None]
    return captured(model.name, batch, join_weights(found), outputs)
