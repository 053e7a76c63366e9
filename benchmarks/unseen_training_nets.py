"""Five training networks in plain PyTorch, each written from its published architecture.

| name                | architecture                                                        | optimizer            |
| ------------------- | ------------------------------------------------------------------- | -------------------- |
| diffusion_unet      | class-conditional pixel diffusion U-Net, v-prediction, min-SNR loss | Lion (own)           |
| gqa_decoder         | Llama-like decoder: GQA, QK-norm, rotary, SwiGLU, tied head         | AdamW, two groups    |
| efficientnet_v2     | EfficientNetV2-like: fused MBConv, SE, stochastic depth, mixup      | RMSprop, momentum    |
| conformer_ctc       | Conformer encoder, relative positions, SpecAugment, inter-CTC       | Adam, Noam schedule  |
| point_transformer   | point-voxel stem + Point Transformer U-Net, Lovasz + cross-entropy  | SGD, Nesterov        |

``NETS[name]`` gives how to build the model, draw a batch, compute the loss and make the optimizer. Random draws inside
the forward pass and the loss (dropout, noise, masks) use the default generator of torch. Each model has the attribute
``checkpointing``; when it is true, each repeated block runs under ``torch.utils.checkpoint``.

"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]


# ----------------------------------------------------------------------------------------------------------------------
# 1. Diffusion U-Net (Ho et al. 2020; Dhariwal and Nichol 2021; Salimans and Ho 2022; Hang et al. 2023)
# ----------------------------------------------------------------------------------------------------------------------


def zero_module(module: nn.Module) -> nn.Module:
    for p in module.parameters():
        p.detach().zero_()
    return module


def timestep_embedding(timesteps: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
    half = dim // 2
    freqs = torch.exp(
        -math.log(max_period) * torch.arange(half, dtype=torch.float32, device=timesteps.device) / half
    )
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class UNetResBlock(nn.Module):
    """GroupNorm residual block; the embedding gives a scale and a shift after the second norm."""

    def __init__(self, channels: int, out_channels: int, emb_channels: int, dropout: float, groups: int = 8):
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(groups, channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_channels, 2 * out_channels))
        self.out_norm = nn.GroupNorm(groups, out_channels)
        self.out_rest = nn.Sequential(
            nn.SiLU(), nn.Dropout(dropout), zero_module(nn.Conv2d(out_channels, out_channels, 3, padding=1))
        )
        self.skip = nn.Identity() if channels == out_channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        h = self.in_layers(x)
        scale, shift = self.emb_layers(emb)[:, :, None, None].chunk(2, dim=1)
        h = self.out_norm(h) * (1 + scale) + shift
        return self.skip(x) + self.out_rest(h)


class UNetAttention(nn.Module):
    """Multi-head self-attention over the pixels, with the softmax written out."""

    def __init__(self, channels: int, head_channels: int = 32, groups: int = 8):
        super().__init__()
        self.num_heads = channels // head_channels
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv1d(channels, channels * 3, 1)
        self.proj_out = zero_module(nn.Conv1d(channels, channels, 1))

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        ch = c // self.num_heads
        q, k, v = qkv.reshape(b * self.num_heads, ch * 3, -1).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight, dim=-1)
        h = torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)
        return (x + self.proj_out(h)).reshape(b, c, *spatial)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class DiffusionUNet(nn.Module):
    alphas_cumprod: Tensor

    def __init__(
        self,
        in_channels: int = 3,
        model_channels: int = 32,
        channel_mult: tuple[int, ...] = (1, 2, 3, 4),
        num_res_blocks: int = 2,
        attention_ds: tuple[int, ...] = (4, 8),
        num_classes: int = 100,
        dropout: float = 0.1,
        timesteps: int = 1000,
        class_dropout: float = 0.1,
    ):
        super().__init__()
        self.checkpointing = False
        self.model_channels = model_channels
        self.num_classes = num_classes
        self.class_dropout = class_dropout

        # Cosine schedule of Nichol and Dhariwal 2021.
        s = torch.linspace(0, 1, timesteps + 1, dtype=torch.float64)
        f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, 0).float())

        emb_dim = model_channels * 4
        self.time_embed = nn.Sequential(nn.Linear(model_channels, emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))
        self.label_emb = nn.Embedding(num_classes + 1, emb_dim)  # the last row is the null class

        ch = model_channels
        self.conv_in = nn.Conv2d(in_channels, ch, 3, padding=1)
        self.input_blocks = nn.ModuleList()
        skips, ds = [ch], 1
        for level, mult in enumerate(channel_mult):
            for _ in range(num_res_blocks):
                layers: list[nn.Module] = [UNetResBlock(ch, mult * model_channels, emb_dim, dropout)]
                ch = mult * model_channels
                if ds in attention_ds:
                    layers.append(UNetAttention(ch))
                self.input_blocks.append(nn.ModuleList(layers))
                skips.append(ch)
            if level != len(channel_mult) - 1:
                self.input_blocks.append(nn.ModuleList([Downsample(ch)]))
                skips.append(ch)
                ds *= 2
        self.middle = nn.ModuleList(
            [UNetResBlock(ch, ch, emb_dim, dropout), UNetAttention(ch), UNetResBlock(ch, ch, emb_dim, dropout)]
        )
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(channel_mult))):
            for i in range(num_res_blocks + 1):
                layers = [UNetResBlock(ch + skips.pop(), mult * model_channels, emb_dim, dropout)]
                ch = mult * model_channels
                if ds in attention_ds:
                    layers.append(UNetAttention(ch))
                if level and i == num_res_blocks:
                    layers.append(Upsample(ch))
                    ds //= 2
                self.output_blocks.append(nn.ModuleList(layers))
        self.out = nn.Sequential(
            nn.GroupNorm(8, ch), nn.SiLU(), zero_module(nn.Conv2d(ch, in_channels, 3, padding=1))
        )

    def _run(self, layers: Any, h: Tensor, emb: Tensor) -> Tensor:
        for layer in layers:
            if self.checkpointing and isinstance(layer, UNetResBlock | UNetAttention):
                h = checkpoint(layer, h, emb, use_reentrant=False)
            else:
                h = layer(h, emb)
        return h

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        if self.training:
            drop = torch.rand(y.shape, device=y.device) < self.class_dropout
            y = torch.where(drop, self.num_classes, y)
        emb = self.time_embed(timestep_embedding(t, self.model_channels)) + self.label_emb(y)
        h = self.conv_in(x)
        hs = [h]
        for layers in self.input_blocks:
            h = self._run(layers, h, emb)
            hs.append(h)
        h = self._run(self.middle, h, emb)
        for layers in self.output_blocks:
            h = self._run(layers, torch.cat([h, hs.pop()], dim=1), emb)
        return self.out(h)


def diffusion_batch(generator: torch.Generator, batch: int = 12, size: int = 64) -> tuple[Tensor, ...]:
    """Smooth colour fields whose mean colour depends on the class, in [-1, 1]."""
    y = torch.randint(0, 100, (batch,), generator=generator)
    coarse = torch.randn(batch, 3, 8, 8, generator=generator)
    x = F.interpolate(coarse, size=(size, size), mode="bicubic", align_corners=False)
    phase = y.float()[:, None] * torch.tensor([0.21, 0.37, 0.53])
    return torch.tanh(0.6 * x + torch.sin(phase)[:, :, None, None]), y


def diffusion_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x0, y = batch
    acp: Tensor = model.alphas_cumprod  # type: ignore[assignment]
    t = torch.randint(0, acp.numel(), (x0.shape[0],), device=x0.device)
    noise = torch.randn_like(x0)
    a = acp.gather(0, t).view(-1, 1, 1, 1)
    x_t = a.sqrt() * x0 + (1 - a).sqrt() * noise
    target = a.sqrt() * noise - (1 - a).sqrt() * x0
    pred = model(x_t, t, y)
    per_sample = F.mse_loss(pred, target, reduction="none").flatten(1).mean(1)
    snr = (a / (1 - a)).flatten()
    weight = snr.clamp(max=5.0) / (snr + 1)
    return (weight * per_sample).mean()


class Lion(Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023)."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, wd, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                exp_avg, grad = state["exp_avg"], p.grad
                p.mul_(1 - lr * wd)
                update = exp_avg.clone().mul_(beta1).add_(grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-lr)
                exp_avg.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss


# ----------------------------------------------------------------------------------------------------------------------
# 2. Llama-like decoder (Touvron et al. 2023; Ainslie et al. 2023; the QK-norm of Qwen 3)
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class DecoderConfig:
    vocab_size: int = 32000
    dim: int = 384
    n_layers: int = 6
    n_heads: int = 6
    n_kv_heads: int = 2
    head_dim: int = 64
    ffn_dim: int = 1024
    max_seq_len: int = 512
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5


class LlamaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.eps))


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class GroupedQueryAttention(nn.Module):
    def __init__(self, cfg: DecoderConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * cfg.head_dim, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * cfg.head_dim, bias=False)
        self.wo = nn.Linear(cfg.n_heads * cfg.head_dim, cfg.dim, bias=False)
        self.q_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps)
        self.k_norm = nn.RMSNorm(cfg.head_dim, eps=cfg.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.wq(x).view(b, t, self.n_heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class DecoderBlock(nn.Module):
    def __init__(self, cfg: DecoderConfig):
        super().__init__()
        self.attention_norm = LlamaRMSNorm(cfg.dim, cfg.norm_eps)
        self.attention = GroupedQueryAttention(cfg)
        self.ffn_norm = LlamaRMSNorm(cfg.dim, cfg.norm_eps)
        self.feed_forward = SwiGLU(cfg.dim, cfg.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class GQADecoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: DecoderConfig | None = None):
        super().__init__()
        cfg = cfg or DecoderConfig()
        self.cfg = cfg
        self.checkpointing = False
        self.tok_embeddings = nn.Embedding(cfg.vocab_size, cfg.dim)
        self.layers = nn.ModuleList(DecoderBlock(cfg) for _ in range(cfg.n_layers))
        self.norm = LlamaRMSNorm(cfg.dim, cfg.norm_eps)
        self.output = nn.Linear(cfg.dim, cfg.vocab_size, bias=False)
        inv_freq = 1.0 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim)
        freqs = torch.outer(torch.arange(cfg.max_seq_len).float(), inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.register_buffer("cos", emb.cos(), persistent=False)
        self.register_buffer("sin", emb.sin(), persistent=False)
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * cfg.n_layers))
        self.output.weight = self.tok_embeddings.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        cos, sin = self.cos[:t], self.sin[:t]
        for layer in self.layers:
            h = checkpoint(layer, h, cos, sin, use_reentrant=False) if self.checkpointing else layer(h, cos, sin)
        return self.output(self.norm(h))


def decoder_batch(generator: torch.Generator, batch: int = 2, seq: int = 384) -> tuple[Tensor, ...]:
    """Token runs with a Zipf-like distribution; labels of the padding are -100."""
    u = torch.rand(batch, seq + 1, generator=generator)
    ids = (32000.0**u - 1).long().clamp(0, 31999)
    repeat = torch.rand(batch, seq + 1, generator=generator) < 0.3
    ids[:, 8:] = torch.where(repeat[:, 8:], ids[:, :-8], ids[:, 8:])
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    lengths = torch.randint(seq * 3 // 4, seq + 1, (batch,), generator=generator)
    labels.masked_fill_(torch.arange(seq)[None] >= lengths[:, None], -100)
    return tokens, labels


def decoder_loss(model: nn.Module, batch: tuple[Tensor, ...], z_weight: float = 1e-4) -> Tensor:
    tokens, labels = batch
    logits = model(tokens).float()
    ce = F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), ignore_index=-100)
    valid = labels != -100
    z = torch.logsumexp(logits, dim=-1).square()
    return ce + z_weight * (z * valid).sum() / valid.sum()


def decoder_optimizer(model: nn.Module) -> Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), eps=1e-8)


# ----------------------------------------------------------------------------------------------------------------------
# 3. EfficientNetV2-like classifier (Tan and Le 2021; Huang et al. 2016; Zhang et al. 2018)
# ----------------------------------------------------------------------------------------------------------------------


def drop_path(x: Tensor, drop_prob: float, training: bool) -> Tensor:
    if drop_prob == 0.0 or not training:
        return x
    keep = 1 - drop_prob
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    if keep > 0.0:
        mask.div_(keep)
    return x * mask


class DropPath(nn.Module):
    def __init__(self, drop_prob: float):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training)


class ConvBNAct(nn.Sequential):
    def __init__(self, cin: int, cout: int, k: int, stride: int = 1, groups: int = 1, act: bool = True):
        layers: list[nn.Module] = [
            nn.Conv2d(cin, cout, k, stride, padding=(k - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(cout, eps=1e-3, momentum=0.01),
        ]
        if act:
            layers.append(nn.SiLU(inplace=True))
        super().__init__(*layers)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.act = nn.SiLU(inplace=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        s = x.mean((2, 3), keepdim=True)
        return x * self.fc2(self.act(self.fc1(s))).sigmoid()


class FusedMBConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, expand: int, drop: float):
        super().__init__()
        self.use_res = stride == 1 and cin == cout
        if expand == 1:
            self.block = nn.Sequential(ConvBNAct(cin, cout, 3, stride))
        else:
            mid = cin * expand
            self.block = nn.Sequential(ConvBNAct(cin, mid, 3, stride), ConvBNAct(mid, cout, 1, act=False))
        self.drop_path = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        out = self.block(x)
        if self.use_res:
            out = self.drop_path(out)
            out += x
        return out


class MBConv(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, expand: int, drop: float, se_ratio: float = 0.25):
        super().__init__()
        self.use_res = stride == 1 and cin == cout
        mid = cin * expand
        self.expand = ConvBNAct(cin, mid, 1)
        self.depthwise = ConvBNAct(mid, mid, 3, stride, groups=mid)
        self.se = SqueezeExcite(mid, max(1, int(cin * se_ratio)))
        self.project = ConvBNAct(mid, cout, 1, act=False)
        self.drop_path = DropPath(drop)

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.se(self.depthwise(self.expand(x))))
        if self.use_res:
            out = self.drop_path(out)
            out += x
        return out


class EfficientNetV2(nn.Module):
    # kind, expansion, channels, blocks, stride: the B0 variant
    STAGES = (
        (FusedMBConv, 1, 16, 1, 1),
        (FusedMBConv, 4, 32, 2, 2),
        (FusedMBConv, 4, 48, 2, 2),
        (MBConv, 4, 96, 3, 2),
        (MBConv, 6, 112, 5, 1),
        (MBConv, 6, 192, 8, 2),
    )

    def __init__(self, num_classes: int = 1000, drop_rate: float = 0.2, drop_path_rate: float = 0.2):
        super().__init__()
        self.checkpointing = False
        self.stem = ConvBNAct(3, 32, 3, 2)
        total = sum(n for *_, n, _ in self.STAGES)
        blocks: list[nn.Module] = []
        cin = 32
        for kind, expand, cout, n, stride in self.STAGES:
            for i in range(n):
                blocks.append(
                    kind(cin, cout, stride if i == 0 else 1, expand, drop_path_rate * len(blocks) / total)
                )
                cin = cout
        self.blocks = nn.ModuleList(blocks)
        self.head = ConvBNAct(cin, 1280, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(drop_rate, inplace=True)
        self.classifier = nn.Linear(1280, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")
                if m.bias is not None:
                    nn.init.zeros_(m.bias)
            elif isinstance(m, nn.Linear):
                bound = 1.0 / math.sqrt(m.out_features)
                nn.init.uniform_(m.weight, -bound, bound)
                nn.init.zeros_(m.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        x = self.pool(self.head(x)).flatten(1)
        return self.classifier(self.dropout(x))


def image_batch(generator: torch.Generator, batch: int = 24, size: int = 160) -> tuple[Tensor, ...]:
    """Gratings whose orientation and frequency depend on the class, with noise."""
    y = torch.randint(0, 1000, (batch,), generator=generator)
    axis = torch.linspace(-1, 1, size)
    angle = (y % 40).float() * math.pi / 40
    freq = 4 + (y // 40).float()
    ramp = angle.cos()[:, None, None] * axis[None, :, None] + angle.sin()[:, None, None] * axis[None, None, :]
    shift = torch.tensor([0.0, 1.0, 2.0])[None, :, None, None]
    x = torch.sin(freq[:, None, None, None] * ramp[:, None] * math.pi + shift)
    return x + 0.5 * torch.randn(batch, 3, size, size, generator=generator), y


def image_loss(model: nn.Module, batch: tuple[Tensor, ...], alpha: float = 0.2, smoothing: float = 0.1) -> Tensor:
    x, y = batch
    lam = torch.distributions.Beta(alpha, alpha).sample()
    x = x * lam + x.flip(0) * (1 - lam)
    off = smoothing / 1000
    hot = torch.full((y.shape[0], 1000), off, device=x.device).scatter_(1, y[:, None], 1 - smoothing + off)
    target = hot * lam + hot.flip(0) * (1 - lam)
    logits = model(x)
    return torch.sum(-target * F.log_softmax(logits, dim=-1), dim=-1).mean()


# ----------------------------------------------------------------------------------------------------------------------
# 4. Conformer with CTC (Gulati et al. 2020; Dai et al. 2019; Park et al. 2019; Lee and Watanabe 2021)
# ----------------------------------------------------------------------------------------------------------------------


class RelPositionalEncoding(nn.Module):
    """Sinusoids for the relative positions T-1 ... -(T-1)."""

    pe: Tensor

    def __init__(self, d_model: int, dropout: float, max_len: int = 1024):
        super().__init__()
        self.xscale = math.sqrt(d_model)
        self.dropout = nn.Dropout(dropout)
        pos = torch.arange(max_len - 1, -max_len, -1).float()[:, None]
        div = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
        pe = torch.zeros(2 * max_len - 1, d_model)
        pe[:, 0::2] = torch.sin(pos * div)
        pe[:, 1::2] = torch.cos(pos * div)
        self.register_buffer("pe", pe[None], persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t, centre = x.size(1), self.pe.size(1) // 2
        pos_emb = self.pe[:, centre - t + 1 : centre + t]
        return self.dropout(x * self.xscale), self.dropout(pos_emb)


class RelPositionAttention(nn.Module):
    def __init__(self, d_model: int, n_head: int, dropout: float):
        super().__init__()
        self.h, self.d_k = n_head, d_model // n_head
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)
        self.linear_out = nn.Linear(d_model, d_model)
        self.pos_bias_u = nn.Parameter(torch.empty(n_head, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.empty(n_head, self.d_k))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def rel_shift(x: Tensor) -> Tensor:
        zero_pad = x.new_zeros((*x.shape[:3], 1))
        padded = torch.cat([zero_pad, x], dim=-1).view(*x.shape[:2], x.size(3) + 1, x.size(2))
        return padded[:, :, 1:].view_as(x)[..., : x.size(-1) // 2 + 1]

    def forward(self, x: Tensor, pos_emb: Tensor, mask: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.linear_q(x).view(b, t, self.h, self.d_k)
        k = self.linear_k(x).view(b, t, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(x).view(b, t, self.h, self.d_k).transpose(1, 2)
        p = self.linear_pos(pos_emb).view(1, -1, self.h, self.d_k).transpose(1, 2)
        matrix_ac = torch.matmul((q + self.pos_bias_u).transpose(1, 2), k.transpose(-2, -1))
        matrix_bd = self.rel_shift(torch.matmul((q + self.pos_bias_v).transpose(1, 2), p.transpose(-2, -1)))
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        blocked = ~mask[:, None, None, :]
        scores = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1).masked_fill(blocked, 0.0)
        out = torch.matmul(self.dropout(attn), v)
        return self.linear_out(out.transpose(1, 2).reshape(b, t, -1))


class ConformerConv(nn.Module):
    def __init__(self, d_model: int, kernel: int):
        super().__init__()
        self.pointwise1 = nn.Conv1d(d_model, 2 * d_model, 1)
        self.depthwise = nn.Conv1d(d_model, d_model, kernel, padding=(kernel - 1) // 2, groups=d_model)
        self.norm = nn.BatchNorm1d(d_model)
        self.pointwise2 = nn.Conv1d(d_model, d_model, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.transpose(1, 2).masked_fill(~mask[:, None], 0.0)
        x = F.glu(self.pointwise1(x), dim=1)
        x = F.silu(self.norm(self.depthwise(x)))
        return self.pointwise2(x).transpose(1, 2)


class ConformerFeedForward(nn.Sequential):
    def __init__(self, d_model: int, hidden: int, dropout: float):
        super().__init__(nn.Linear(d_model, hidden), nn.SiLU(), nn.Dropout(dropout), nn.Linear(hidden, d_model))


class ConformerBlock(nn.Module):
    def __init__(self, d_model: int, n_head: int, ffn: int, kernel: int, dropout: float):
        super().__init__()
        self.norm_ff1, self.ff1 = nn.LayerNorm(d_model), ConformerFeedForward(d_model, ffn, dropout)
        self.norm_mha, self.mha = nn.LayerNorm(d_model), RelPositionAttention(d_model, n_head, dropout)
        self.norm_conv, self.conv = nn.LayerNorm(d_model), ConformerConv(d_model, kernel)
        self.norm_ff2, self.ff2 = nn.LayerNorm(d_model), ConformerFeedForward(d_model, ffn, dropout)
        self.norm_out = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, pos_emb: Tensor, mask: Tensor) -> Tensor:
        x = x + 0.5 * self.dropout(self.ff1(self.norm_ff1(x)))
        x = x + self.dropout(self.mha(self.norm_mha(x), pos_emb, mask))
        x = x + self.dropout(self.conv(self.norm_conv(x), mask))
        x = x + 0.5 * self.dropout(self.ff2(self.norm_ff2(x)))
        return self.norm_out(x)


class SpecAugment(nn.Module):
    """Masks bands of frequency and spans of time, drawn per utterance."""

    def __init__(self, n_freq: int = 2, freq_width: int = 27, n_time: int = 5, time_ratio: float = 0.05):
        super().__init__()
        self.n_freq, self.freq_width, self.n_time, self.time_ratio = n_freq, freq_width, n_time, time_ratio

    @staticmethod
    def _spans(batch: int, count: int, size: int, width: float, device: torch.device) -> Tensor:
        length = torch.rand(batch, count, 1, device=device) * width
        start = torch.rand(batch, count, 1, device=device) * (size - length)
        axis = torch.arange(size, device=device)
        return ((axis >= start) & (axis < start + length)).any(1)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        b, t, f = x.shape
        x = x.masked_fill(self._spans(b, self.n_freq, f, self.freq_width, x.device)[:, None, :], 0.0)
        return x.masked_fill_(self._spans(b, self.n_time, t, self.time_ratio * t, x.device)[:, :, None], 0.0)


class ConformerCTC(nn.Module):
    cmvn_mean: Tensor
    cmvn_istd: Tensor

    def __init__(
        self,
        n_mels: int = 80,
        vocab: int = 256,
        d_model: int = 144,
        n_head: int = 4,
        n_layers: int = 16,
        kernel: int = 31,
        dropout: float = 0.1,
        inter_layer: int = 8,
    ):
        super().__init__()
        self.checkpointing = False
        self.inter_layer = inter_layer
        self.register_buffer("cmvn_mean", torch.zeros(n_mels))
        self.register_buffer("cmvn_istd", torch.ones(n_mels))
        self.specaug = SpecAugment()
        self.subsample = nn.Sequential(
            nn.Conv2d(1, d_model, 3, 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(d_model, d_model, 3, 2),
            nn.ReLU(inplace=True),
        )
        freq = ((n_mels - 1) // 2 - 1) // 2
        self.embed = nn.Linear(d_model * freq, d_model)
        self.pos = RelPositionalEncoding(d_model, dropout)
        self.layers = nn.ModuleList(
            ConformerBlock(d_model, n_head, 4 * d_model, kernel, dropout) for _ in range(n_layers)
        )
        self.ctc_out = nn.Linear(d_model, vocab)
        self.condition = nn.Linear(vocab, d_model)

    def forward(self, feats: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.specaug((feats - self.cmvn_mean) * self.cmvn_istd)
        x = self.subsample(x.unsqueeze(1))
        b, c, t, f = x.shape
        x = self.embed(x.transpose(1, 2).contiguous().view(b, t, c * f))
        lengths = ((lengths - 1) // 2 - 1) // 2
        mask = torch.arange(t, device=x.device)[None] < lengths[:, None]
        x, pos_emb = self.pos(x)
        inter = x
        for i, layer in enumerate(self.layers, 1):
            if self.checkpointing:
                x = checkpoint(layer, x, pos_emb, mask, use_reentrant=False)
            else:
                x = layer(x, pos_emb, mask)
            if i == self.inter_layer:  # self-conditioning on the intermediate prediction
                inter = self.ctc_out(x).log_softmax(-1)
                x = x + self.condition(inter.exp())
        return self.ctc_out(x).log_softmax(-1), inter, lengths


def speech_batch(generator: torch.Generator, batch: int = 4, frames: int = 800) -> tuple[Tensor, ...]:
    """Filter-bank-like features: each token gives a spectral envelope for an equal share of its utterance."""
    lengths = torch.randint(frames * 3 // 4, frames + 1, (batch,), generator=generator)
    lengths[0] = frames
    target_lengths = lengths // 20
    width = int(frames // 20)
    targets = torch.randint(1, 256, (batch, width), generator=generator)
    targets.masked_fill_(torch.arange(width)[None] >= target_lengths[:, None], 0)
    step = (torch.arange(frames) // 20).clamp(max=width - 1)
    token = targets[:, step].float()[..., None]
    mel = torch.arange(80).float()
    feats = torch.sin(0.02 * token * mel + 0.1 * token) + 0.3 * torch.randn(batch, frames, 80, generator=generator)
    feats = feats.masked_fill(torch.arange(frames)[None, :, None] >= lengths[:, None, None], 0.0)
    return feats, lengths, targets, target_lengths


def speech_loss(model: nn.Module, batch: tuple[Tensor, ...], inter_weight: float = 0.3) -> Tensor:
    feats, lengths, targets, target_lengths = batch
    log_probs, inter, out_lengths = model(feats, lengths)

    def ctc(lp: Tensor) -> Tensor:
        nll = F.ctc_loss(
            lp.transpose(0, 1), targets, out_lengths, target_lengths, reduction="none", zero_infinity=True
        )
        return nll.sum() / target_lengths.sum()

    return (1 - inter_weight) * ctc(log_probs) + inter_weight * ctc(inter)


class NoamAdam(torch.optim.Adam):
    """Adam with the schedule of Vaswani et al. 2017, advanced at each step."""

    def __init__(self, params: Iterable[nn.Parameter], d_model: int, factor: float = 2.0, warmup: int = 1000):
        super().__init__(params, lr=0.0, betas=(0.9, 0.98), eps=1e-9, weight_decay=1e-6)
        self.d_model, self.factor, self.warmup, self.num_step = d_model, factor, warmup, 0

    def step(self, closure: Any = None) -> Any:
        self.num_step += 1
        rate = self.factor * self.d_model**-0.5 * min(self.num_step**-0.5, self.num_step * self.warmup**-1.5)
        for group in self.param_groups:
            group["lr"] = rate
        return super().step(closure)


# ----------------------------------------------------------------------------------------------------------------------
# 5. Point-cloud segmentation (Zhao et al. 2021; Qi et al. 2017; Liu et al. 2019; Berman et al. 2018)
# ----------------------------------------------------------------------------------------------------------------------


def index_points(points: Tensor, idx: Tensor) -> Tensor:
    """(B, N, C) indexed by (B, ...) gives (B, ..., C)."""
    b, _, c = points.shape
    flat = idx.reshape(b, -1)
    out = torch.gather(points, 1, flat[..., None].expand(-1, -1, c))
    return out.reshape(*idx.shape, c)


@torch.no_grad()
def farthest_point_sample(xyz: Tensor, npoint: int) -> Tensor:
    b, n, _ = xyz.shape
    centroids = torch.zeros(b, npoint, dtype=torch.long, device=xyz.device)
    distance = torch.full((b, n), 1e10, device=xyz.device)
    farthest = torch.zeros(b, dtype=torch.long, device=xyz.device)
    rows = torch.arange(b, device=xyz.device)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[rows, farthest].unsqueeze(1)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        distance = torch.minimum(distance, dist)
        farthest = distance.argmax(-1)
    return centroids


@torch.no_grad()
def knn(k: int, xyz: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    dist, idx = torch.cdist(query, xyz).topk(k, dim=-1, largest=False)
    return dist, idx


class PointBatchNorm(nn.Module):
    """Batch norm over the last dimension of a tensor of any rank."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view_as(x)


class PointTransformerLayer(nn.Module):
    """Vector attention over the k nearest neighbours."""

    def __init__(self, dim: int, share: int = 8):
        super().__init__()
        self.share = share
        self.linear_q, self.linear_k, self.linear_v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.linear_p = nn.Sequential(nn.Linear(3, 3), PointBatchNorm(3), nn.ReLU(inplace=True), nn.Linear(3, dim))
        self.linear_w = nn.Sequential(
            PointBatchNorm(dim),
            nn.ReLU(inplace=True),
            nn.Linear(dim, dim // share),
            PointBatchNorm(dim // share),
            nn.ReLU(inplace=True),
            nn.Linear(dim // share, dim // share),
        )

    def forward(self, xyz: Tensor, x: Tensor, idx: Tensor) -> Tensor:
        q, k, v = self.linear_q(x), index_points(self.linear_k(x), idx), index_points(self.linear_v(x), idx)
        rel = self.linear_p(index_points(xyz, idx) - xyz.unsqueeze(2))
        w = self.linear_w(k - q.unsqueeze(2) + rel).softmax(dim=2)
        v = (v + rel).unflatten(-1, (self.share, -1))
        return torch.einsum("bnksi,bnki->bnsi", v, w).flatten(-2)


class PointTransformerBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.linear1, self.bn1 = nn.Linear(dim, dim, bias=False), PointBatchNorm(dim)
        self.transformer, self.bn2 = PointTransformerLayer(dim), PointBatchNorm(dim)
        self.linear3, self.bn3 = nn.Linear(dim, dim, bias=False), PointBatchNorm(dim)

    def forward(self, xyz: Tensor, x: Tensor, idx: Tensor) -> Tensor:
        identity = x
        x = F.relu_(self.bn1(self.linear1(x)))
        x = F.relu_(self.bn2(self.transformer(xyz, x, idx)))
        x = self.bn3(self.linear3(x))
        x += identity
        return F.relu_(x)


class TransitionDown(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, k: int):
        super().__init__()
        self.stride, self.k = stride, k
        self.mlp = nn.Sequential(nn.Linear(3 + cin, cout, bias=False), PointBatchNorm(cout), nn.ReLU(inplace=True))

    def forward(self, xyz: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        new_xyz = index_points(xyz, farthest_point_sample(xyz, xyz.shape[1] // self.stride))
        _, idx = knn(self.k, xyz, new_xyz)
        grouped = torch.cat([index_points(xyz, idx) - new_xyz.unsqueeze(2), index_points(x, idx)], dim=-1)
        return new_xyz, self.mlp(grouped).max(dim=2).values


class TransitionUp(nn.Module):
    """Inverse-distance interpolation from the coarse points, concatenated with the skip."""

    def __init__(self, coarse: int, skip: int, cout: int):
        super().__init__()
        self.up = nn.Sequential(nn.Linear(coarse, cout, bias=False), PointBatchNorm(cout), nn.ReLU(inplace=True))
        self.fuse = nn.Sequential(
            nn.Linear(cout + skip, cout, bias=False), PointBatchNorm(cout), nn.ReLU(inplace=True)
        )

    def forward(self, xyz: Tensor, skip: Tensor, coarse_xyz: Tensor, coarse: Tensor) -> Tensor:
        dist, idx = knn(3, coarse_xyz, xyz)
        weight = 1.0 / (dist + 1e-8)
        weight = weight / weight.sum(-1, keepdim=True)
        up = (index_points(self.up(coarse), idx) * weight.unsqueeze(-1)).sum(2)
        return self.fuse(torch.cat([up, skip], dim=-1))


class PointVoxelStem(nn.Module):
    """A pointwise branch plus a branch that averages into voxels, convolves, and samples back."""

    def __init__(self, cin: int, cout: int, resolution: int = 16):
        super().__init__()
        self.r = resolution
        self.point = nn.Sequential(nn.Linear(cin, cout, bias=False), PointBatchNorm(cout), nn.ReLU(inplace=True))
        self.voxel = nn.Sequential(
            nn.Conv3d(cin, cout, 3, padding=1),
            nn.BatchNorm3d(cout),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv3d(cout, cout, 3, padding=1),
            nn.BatchNorm3d(cout),
            nn.LeakyReLU(0.1, inplace=True),
        )

    def forward(self, xyz: Tensor, feats: Tensor) -> Tensor:
        b, _, c = feats.shape
        r = self.r
        centred = xyz - xyz.mean(1, keepdim=True)
        unit = centred / centred.norm(dim=-1).amax(1).clamp_min(1e-6)[:, None, None]  # in [-1, 1]
        cell = ((unit + 1) * 0.5 * r).long().clamp_(0, r - 1)
        flat = (cell[..., 2] * r + cell[..., 1]) * r + cell[..., 0]
        flat = (flat + torch.arange(b, device=xyz.device)[:, None] * r**3).view(-1)
        grid = feats.new_zeros(b * r**3, c).index_add_(0, flat, feats.reshape(-1, c))
        count = torch.bincount(flat, minlength=b * r**3).clamp_(min=1).to(grid.dtype)
        grid = (grid / count[:, None]).view(b, r, r, r, c).permute(0, 4, 1, 2, 3)
        voxel = F.grid_sample(self.voxel(grid), unit[:, :, None, None], align_corners=False)
        return self.point(feats) + voxel.flatten(2).transpose(1, 2)


class PointTransformerSeg(nn.Module):
    def __init__(
        self,
        in_channels: int = 6,
        num_classes: int = 13,
        planes: tuple[int, ...] = (32, 64, 128, 256),
        blocks: tuple[int, ...] = (1, 2, 2, 3),
        neighbours: tuple[int, ...] = (8, 16, 16, 16),
        stride: int = 4,
    ):
        super().__init__()
        self.checkpointing = False
        self.neighbours = neighbours
        self.stem = PointVoxelStem(in_channels, planes[0])
        self.downs = nn.ModuleList(
            TransitionDown(a, b, stride, k) for a, b, k in zip(planes, planes[1:], neighbours[1:], strict=False)
        )
        self.enc = nn.ModuleList(
            nn.ModuleList(PointTransformerBlock(c) for _ in range(n)) for c, n in zip(planes, blocks, strict=True)
        )
        self.context = nn.Sequential(nn.Linear(planes[-1], planes[-1]), nn.ReLU(inplace=True))
        self.bottom = nn.Linear(2 * planes[-1], planes[-1])
        self.ups = nn.ModuleList(TransitionUp(b, a, a) for a, b in pairwise(planes))
        self.dec = nn.ModuleList(PointTransformerBlock(c) for c in planes[:-1])
        self.head = nn.Sequential(
            nn.Linear(planes[0], planes[0]),
            PointBatchNorm(planes[0]),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(planes[0], num_classes),
        )

    def _block(self, block: nn.Module, xyz: Tensor, x: Tensor, idx: Tensor) -> Tensor:
        if self.checkpointing:
            return checkpoint(block, xyz, x, idx, use_reentrant=False)
        return block(xyz, x, idx)

    def forward(self, feats: Tensor) -> Tensor:
        xyz = feats[..., :3].contiguous()
        x = self.stem(xyz, feats)
        levels: list[tuple[Tensor, Tensor, Tensor]] = []
        for i, stage in enumerate(self.enc):
            if i > 0:
                xyz, x = self.downs[i - 1](xyz, x)
            _, idx = knn(min(self.neighbours[i], xyz.shape[1]), xyz, xyz)
            for block in stage.children():
                x = self._block(block, xyz, x, idx)
            levels.append((xyz, x, idx))
        context = self.context(x.mean(1, keepdim=True)).expand_as(x)
        x = self.bottom(torch.cat([x, context], dim=-1))
        for i in reversed(range(len(self.dec))):
            coarse_xyz = levels[i + 1][0]
            xyz, skip, idx = levels[i]
            x = self.ups[i](xyz, skip, coarse_xyz, x)
            x = self._block(self.dec[i], xyz, x, idx)
        return self.head(x)


def point_batch(generator: torch.Generator, batch: int = 4, points: int = 4096) -> tuple[Tensor, ...]:
    """Scenes of boxes and balls: xyz and a colour per point, one label per point, 255 for unlabelled points."""
    objects = 8
    kind = torch.randint(0, 13, (batch, objects), generator=generator)
    centre = torch.rand(batch, objects, 3, generator=generator) * 4 - 2
    owner = torch.randint(0, objects, (batch, points), generator=generator)
    labels = kind.gather(1, owner)
    direction = F.normalize(torch.randn(batch, points, 3, generator=generator), dim=-1)
    box = direction / direction.abs().amax(-1, keepdim=True)
    shape = torch.where((labels % 2 == 0)[..., None], direction, box)
    size = 0.2 + 0.05 * labels.float()[..., None]
    xyz = centre.gather(1, owner[..., None].expand(-1, -1, 3)) + size * shape
    colour = 0.5 * direction + 0.1 * torch.randn(batch, points, 3, generator=generator)
    unlabelled = torch.rand(batch, points, generator=generator) < 0.05
    return torch.cat([xyz, colour], dim=-1), labels.masked_fill(unlabelled, 255)


def lovasz_softmax(probs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """Mean over the classes present of the Lovasz extension of the Jaccard loss; probs (P, C), labels and valid (P)."""
    fg = F.one_hot(labels.masked_fill(~valid, 0), probs.shape[1]).to(probs.dtype) * valid[:, None]
    errors = (fg - probs).abs() * valid[:, None]
    errors_sorted, perm = torch.sort(errors, dim=0, descending=True)
    fg_sorted = fg.gather(0, perm)
    total = fg_sorted.sum(0)
    intersection = total - fg_sorted.cumsum(0)
    union = total + (1 - fg_sorted).cumsum(0)
    jaccard = 1 - intersection / union
    jaccard[1:] = jaccard[1:] - jaccard[:-1]
    present = (total > 0).to(probs.dtype)
    return ((errors_sorted * jaccard.detach()).sum(0) * present).sum() / present.sum()


def point_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    feats, labels = batch
    logits = model(feats).flatten(0, 1)
    target = labels.flatten()
    ce = F.cross_entropy(logits, target, ignore_index=255, label_smoothing=0.1)
    return ce + lovasz_softmax(logits.softmax(-1), target, target != 255)


def point_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)


NETS: dict[str, Net] = {
    "diffusion_unet": Net(
        build=DiffusionUNet,
        batch=diffusion_batch,
        loss=diffusion_loss,
        optimizer=lambda model: Lion(model.parameters(), lr=1e-4, weight_decay=1e-2),
    ),
    "gqa_decoder": Net(build=GQADecoder, batch=decoder_batch, loss=decoder_loss, optimizer=decoder_optimizer),
    "efficientnet_v2": Net(
        build=EfficientNetV2,
        batch=image_batch,
        loss=image_loss,
        optimizer=lambda model: torch.optim.RMSprop(
            model.parameters(), lr=5e-4, alpha=0.9, eps=1e-3, momentum=0.9, weight_decay=1e-5
        ),
    ),
    "conformer_ctc": Net(
        build=ConformerCTC,
        batch=speech_batch,
        loss=speech_loss,
        optimizer=lambda model: NoamAdam(model.parameters(), d_model=144),
    ),
    "point_transformer": Net(
        build=PointTransformerSeg, batch=point_batch, loss=point_loss, optimizer=point_optimizer
    ),
}
