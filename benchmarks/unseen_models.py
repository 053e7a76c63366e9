"""Nine models of kinds that people publish, as their authors write them, with random weights.

Their author had not seen the rewrites, and nothing was tuned to them: a table of `benchmarks.peers`, where they run
with everything resident only. Weights and rows do not depend on the batch. Parameters that begin as constants, and
statistics of batch norms, are perturbed, so that each branch does something, as in a trained model.
"""

# ruff: noqa
# mypy: ignore-errors
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

EXAMPLE_BATCH, MAX_BATCH = 2, 8


# --------------------------------------------------------------------------------------------------
# helpers
# --------------------------------------------------------------------------------------------------


def _as_if_trained(module: nn.Module, seed: int = 1234) -> nn.Module:
    """Perturb constant parameters and BatchNorm statistics, then switch to inference."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.numel() > 0 and bool((p == p.reshape(-1)[0]).all()):
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
        for m in module.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.running_mean.copy_(torch.randn(m.running_mean.shape, generator=g) * 0.1)
                m.running_var.copy_(torch.rand(m.running_var.shape, generator=g) + 0.5)
    for p in module.parameters():
        p.requires_grad_(False)
    return module.eval()


def _calibrate_batchnorms(module: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Give each BatchNorm its input's statistics per channel, as training does.

    In float64 and rounded to a grid, so that the last bits of the arithmetic (thread count, CPU) do
    not reach the weights.
    """

    def hook(m, args):
        var, mean = torch.var_mean(args[0].transpose(0, 1).flatten(1), dim=1)
        var = torch.maximum(var, 0.5 * var.mean())  # few images: no channel may look constant
        m.running_var.copy_(2.0 ** (torch.round(8 * torch.log2(var)) / 8))
        m.running_mean.copy_(torch.round(mean * 64) / 64)

    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    handles = [m.register_forward_pre_hook(hook) for m in norms]
    module.double()
    with torch.no_grad():
        module(**{k: v.double() for k, v in inputs.items()})
    module.float()
    for h in handles:
        h.remove()


def _rows(make: Callable[[torch.Generator, int], dict[str, torch.Tensor]], batch: int, seed: int = 99):
    """Inputs for ``batch`` rows; always drawn for at least MAX_BATCH rows so that rows agree."""
    g = torch.Generator().manual_seed(seed)
    full = make(g, max(batch, MAX_BATCH))
    return {k: v[:batch].clone() for k, v in full.items()}


def _images(g: torch.Generator, n: int, size: int) -> torch.Tensor:
    """Smooth colour fields with some noise, about zero mean and unit variance."""
    coarse = torch.randn(n, 3, 6, 6, generator=g) + torch.randn(n, 3, 1, 1, generator=g) * 0.5
    smooth = F.interpolate(coarse.double(), size=(size, size), mode="bilinear", align_corners=False)
    noisy = smooth + 0.3 * torch.randn(n, 3, size, size, generator=g).double()
    return (torch.round(noisy * 64) / 64).float()  # 8-bit like steps; the same for any thread count


class DropPath(nn.Module):
    """timm's stochastic depth (identity at inference)."""

    def __init__(self, drop_prob: float = 0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * mask / keep


# --------------------------------------------------------------------------------------------------
# 1. ConvNeXt V2 (facebookresearch/ConvNeXt-V2), "pico"
# --------------------------------------------------------------------------------------------------


class CNLayerNorm(nn.Module):
    def __init__(self, normalized_shape, eps=1e-6, data_format="channels_last"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(normalized_shape))
        self.bias = nn.Parameter(torch.zeros(normalized_shape))
        self.eps = eps
        self.data_format = data_format
        if self.data_format not in ["channels_last", "channels_first"]:
            raise NotImplementedError
        self.normalized_shape = (normalized_shape,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        elif self.data_format == "channels_first":
            u = x.mean(1, keepdim=True)
            s = (x - u).pow(2).mean(1, keepdim=True)
            x = (x - u) / torch.sqrt(s + self.eps)
            x = self.weight[:, None, None] * x + self.bias[:, None, None]
            return x


class GRN(nn.Module):
    """Global response normalisation."""

    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 1, 1, dim))
        self.beta = nn.Parameter(torch.zeros(1, 1, 1, dim))

    def forward(self, x):
        Gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        Nx = Gx / (Gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * Nx) + self.beta + x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim, drop_path=0.0):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = CNLayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x):
        input = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)  # (N, C, H, W) -> (N, H, W, C)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.grn(x)
        x = self.pwconv2(x)
        x = x.permute(0, 3, 1, 2)  # (N, H, W, C) -> (N, C, H, W)
        x = input + self.drop_path(x)
        return x


class ConvNeXtV2(nn.Module):
    def __init__(
        self, in_chans=3, num_classes=1000, depths=(2, 2, 6, 2), dims=(64, 128, 256, 512), drop_path_rate=0.1
    ):
        super().__init__()
        self.downsample_layers = nn.ModuleList()
        stem = nn.Sequential(
            nn.Conv2d(in_chans, dims[0], kernel_size=4, stride=4),
            CNLayerNorm(dims[0], eps=1e-6, data_format="channels_first"),
        )
        self.downsample_layers.append(stem)
        for i in range(3):
            self.downsample_layers.append(
                nn.Sequential(
                    CNLayerNorm(dims[i], eps=1e-6, data_format="channels_first"),
                    nn.Conv2d(dims[i], dims[i + 1], kernel_size=2, stride=2),
                )
            )
        self.stages = nn.ModuleList()
        dp_rates = [x.item() for x in torch.linspace(0, drop_path_rate, sum(depths))]
        cur = 0
        for i in range(4):
            self.stages.append(
                nn.Sequential(*[ConvNeXtBlock(dim=dims[i], drop_path=dp_rates[cur + j]) for j in range(depths[i])])
            )
            cur += depths[i]
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], num_classes)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, (nn.Conv2d, nn.Linear)):
            nn.init.trunc_normal_(m.weight, std=0.02)
            nn.init.constant_(m.bias, 0)

    def forward_features(self, x):
        for i in range(4):
            x = self.downsample_layers[i](x)
            x = self.stages[i](x)
        return self.norm(x.mean([-2, -1]))  # global average pooling, (N, C, H, W) -> (N, C)

    def forward(self, x):
        x = self.forward_features(x)
        x = self.head(x)
        return x


def convnextv2_pico(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(ConvNeXtV2())
    return model, _rows(lambda g, n: {"x": _images(g, n, 224)}, batch)


# --------------------------------------------------------------------------------------------------
# 2. Swin Transformer (microsoft/Swin-Transformer), Swin-S
# --------------------------------------------------------------------------------------------------


class SwinMlp(nn.Module):
    def __init__(self, in_features, hidden_features):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    windows = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, C)
    return windows


def window_reverse(windows, window_size, H, W):
    C = int(windows.shape[-1])
    x = windows.view(-1, H // window_size, W // window_size, window_size, window_size, C)
    x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, H, W, C)
    return x


class WindowAttention(nn.Module):
    def __init__(self, dim, window_size, num_heads, qkv_bias=True):
        super().__init__()
        self.dim = dim
        self.window_size = window_size
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = head_dim**-0.5
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * window_size[0] - 1) * (2 * window_size[1] - 1), num_heads)
        )
        coords_h = torch.arange(self.window_size[0])
        coords_w = torch.arange(self.window_size[1])
        coords = torch.stack(torch.meshgrid([coords_h, coords_w], indexing="ij"))
        coords_flatten = torch.flatten(coords, 1)
        relative_coords = coords_flatten[:, :, None] - coords_flatten[:, None, :]
        relative_coords = relative_coords.permute(1, 2, 0).contiguous()
        relative_coords[:, :, 0] += self.window_size[0] - 1
        relative_coords[:, :, 1] += self.window_size[1] - 1
        relative_coords[:, :, 0] *= 2 * self.window_size[1] - 1
        relative_position_index = relative_coords.sum(-1)
        self.register_buffer("relative_position_index", relative_position_index)
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        relative_position_bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(
            self.window_size[0] * self.window_size[1], self.window_size[0] * self.window_size[1], -1
        )
        relative_position_bias = relative_position_bias.permute(2, 0, 1).contiguous()
        attn = attn + relative_position_bias.unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
            attn = self.softmax(attn)
        else:
            attn = self.softmax(attn)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class SwinTransformerBlock(nn.Module):
    def __init__(self, dim, input_resolution, num_heads, window_size=7, shift_size=0, mlp_ratio=4.0, drop_path=0.0):
        super().__init__()
        self.input_resolution = input_resolution
        self.window_size = window_size
        self.shift_size = shift_size
        if min(self.input_resolution) <= self.window_size:
            self.shift_size = 0
            self.window_size = min(self.input_resolution)
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window_size=(self.window_size, self.window_size), num_heads=num_heads)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = SwinMlp(dim, int(dim * mlp_ratio))
        if self.shift_size > 0:
            H, W = self.input_resolution
            img_mask = torch.zeros((1, H, W, 1))
            h_slices = (
                slice(0, -self.window_size),
                slice(-self.window_size, -self.shift_size),
                slice(-self.shift_size, None),
            )
            w_slices = h_slices
            cnt = 0
            for h in h_slices:
                for w in w_slices:
                    img_mask[:, h, w, :] = cnt
                    cnt += 1
            mask_windows = window_partition(img_mask, self.window_size)
            mask_windows = mask_windows.view(-1, self.window_size * self.window_size)
            attn_mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
            attn_mask = attn_mask.masked_fill(attn_mask != 0, float(-100.0)).masked_fill(attn_mask == 0, float(0.0))
        else:
            attn_mask = None
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, x):
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut = x
        x = self.norm1(x)
        x = x.view(B, H, W, C)
        if self.shift_size > 0:
            shifted_x = torch.roll(x, shifts=(-self.shift_size, -self.shift_size), dims=(1, 2))
        else:
            shifted_x = x
        x_windows = window_partition(shifted_x, self.window_size)
        x_windows = x_windows.view(-1, self.window_size * self.window_size, C)
        attn_windows = self.attn(x_windows, mask=self.attn_mask)
        attn_windows = attn_windows.view(-1, self.window_size, self.window_size, C)
        shifted_x = window_reverse(attn_windows, self.window_size, H, W)
        if self.shift_size > 0:
            x = torch.roll(shifted_x, shifts=(self.shift_size, self.shift_size), dims=(1, 2))
        else:
            x = shifted_x
        x = x.view(B, H * W, C)
        x = shortcut + self.drop_path(x)
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class PatchMerging(nn.Module):
    def __init__(self, input_resolution, dim):
        super().__init__()
        self.input_resolution = input_resolution
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(4 * dim)

    def forward(self, x):
        H, W = self.input_resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        assert H % 2 == 0 and W % 2 == 0, f"x size ({H}*{W}) are not even."
        x = x.view(B, H, W, C)
        x0 = x[:, 0::2, 0::2, :]
        x1 = x[:, 1::2, 0::2, :]
        x2 = x[:, 0::2, 1::2, :]
        x3 = x[:, 1::2, 1::2, :]
        x = torch.cat([x0, x1, x2, x3], -1)
        x = x.view(B, -1, 4 * C)
        x = self.norm(x)
        x = self.reduction(x)
        return x


class SwinLayer(nn.Module):
    def __init__(self, dim, input_resolution, depth, num_heads, window_size, drop_path, downsample):
        super().__init__()
        self.blocks = nn.ModuleList(
            [
                SwinTransformerBlock(
                    dim=dim,
                    input_resolution=input_resolution,
                    num_heads=num_heads,
                    window_size=window_size,
                    shift_size=0 if (i % 2 == 0) else window_size // 2,
                    drop_path=drop_path[i],
                )
                for i in range(depth)
            ]
        )
        self.downsample = PatchMerging(input_resolution, dim) if downsample else None

    def forward(self, x):
        for blk in self.blocks:
            x = blk(x)
        if self.downsample is not None:
            x = self.downsample(x)
        return x


class SwinPatchEmbed(nn.Module):
    def __init__(self, img_size=224, patch_size=4, in_chans=3, embed_dim=96):
        super().__init__()
        self.img_size = (img_size, img_size)
        self.patches_resolution = [img_size // patch_size, img_size // patch_size]
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x):
        B, C, H, W = x.shape
        assert H == self.img_size[0] and W == self.img_size[1], "Input image size doesn't match model."
        x = self.proj(x).flatten(2).transpose(1, 2)
        return self.norm(x)


class SwinTransformer(nn.Module):
    def __init__(
        self,
        img_size=224,
        num_classes=1000,
        embed_dim=96,
        depths=(2, 2, 18, 2),
        num_heads=(3, 6, 12, 24),
        window_size=7,
        drop_path_rate=0.3,
    ):
        super().__init__()
        self.num_layers = len(depths)
        self.num_features = int(embed_dim * 2 ** (self.num_layers - 1))
        self.patch_embed = SwinPatchEmbed(img_size=img_size, embed_dim=embed_dim)
        res = self.patch_embed.patches_resolution
        self.pos_drop = nn.Dropout(p=0.0)
        dpr = [x.item() for x in torch.linspace(0, drop_path_rate, sum(depths))]
        self.layers = nn.ModuleList()
        for i in range(self.num_layers):
            self.layers.append(
                SwinLayer(
                    dim=int(embed_dim * 2**i),
                    input_resolution=(res[0] // (2**i), res[1] // (2**i)),
                    depth=depths[i],
                    num_heads=num_heads[i],
                    window_size=window_size,
                    drop_path=dpr[sum(depths[:i]) : sum(depths[: i + 1])],
                    downsample=i < self.num_layers - 1,
                )
            )
        self.norm = nn.LayerNorm(self.num_features)
        self.avgpool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(self.num_features, num_classes)
        self.apply(self._init_weights)

    def _init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.constant_(m.bias, 0)

    def forward_features(self, x):
        x = self.patch_embed(x)
        x = self.pos_drop(x)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)  # B L C
        x = self.avgpool(x.transpose(1, 2))  # B C 1
        x = torch.flatten(x, 1)
        return x

    def forward(self, x):
        return self.head(self.forward_features(x))


def swin_small(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(SwinTransformer())
    return model, _rows(lambda g, n: {"x": _images(g, n, 224)}, batch)


# --------------------------------------------------------------------------------------------------
# 3. YOLOX-Nano detector (Megvii-BaseDetection/YOLOX): Focus + CSPDarknet + PAFPN + decoupled head
# --------------------------------------------------------------------------------------------------


class BaseConv(nn.Module):
    def __init__(self, in_channels, out_channels, ksize, stride, groups=1, bias=False):
        super().__init__()
        pad = (ksize - 1) // 2
        self.conv = nn.Conv2d(in_channels, out_channels, ksize, stride, pad, groups=groups, bias=bias)
        self.bn = nn.BatchNorm2d(out_channels, eps=1e-3, momentum=0.03)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class DWConv(nn.Module):
    def __init__(self, in_channels, out_channels, ksize, stride=1):
        super().__init__()
        self.dconv = BaseConv(in_channels, in_channels, ksize=ksize, stride=stride, groups=in_channels)
        self.pconv = BaseConv(in_channels, out_channels, ksize=1, stride=1, groups=1)

    def forward(self, x):
        x = self.dconv(x)
        return self.pconv(x)


class Bottleneck(nn.Module):
    def __init__(self, in_channels, out_channels, shortcut=True, expansion=0.5, depthwise=False):
        super().__init__()
        hidden_channels = int(out_channels * expansion)
        Conv = DWConv if depthwise else BaseConv
        self.conv1 = BaseConv(in_channels, hidden_channels, 1, stride=1)
        self.conv2 = Conv(hidden_channels, out_channels, 3, stride=1)
        self.use_add = shortcut and in_channels == out_channels

    def forward(self, x):
        y = self.conv2(self.conv1(x))
        if self.use_add:
            y = y + x
        return y


class SPPBottleneck(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_sizes=(5, 9, 13)):
        super().__init__()
        hidden_channels = in_channels // 2
        self.conv1 = BaseConv(in_channels, hidden_channels, 1, stride=1)
        self.m = nn.ModuleList([nn.MaxPool2d(kernel_size=ks, stride=1, padding=ks // 2) for ks in kernel_sizes])
        self.conv2 = BaseConv(hidden_channels * (len(kernel_sizes) + 1), out_channels, 1, stride=1)

    def forward(self, x):
        x = self.conv1(x)
        x = torch.cat([x] + [m(x) for m in self.m], dim=1)
        return self.conv2(x)


class CSPLayer(nn.Module):
    def __init__(self, in_channels, out_channels, n=1, shortcut=True, expansion=0.5, depthwise=False):
        super().__init__()
        hidden_channels = int(out_channels * expansion)
        self.conv1 = BaseConv(in_channels, hidden_channels, 1, stride=1)
        self.conv2 = BaseConv(in_channels, hidden_channels, 1, stride=1)
        self.conv3 = BaseConv(2 * hidden_channels, out_channels, 1, stride=1)
        self.m = nn.Sequential(
            *[Bottleneck(hidden_channels, hidden_channels, shortcut, 1.0, depthwise) for _ in range(n)]
        )

    def forward(self, x):
        x_1 = self.conv1(x)
        x_2 = self.conv2(x)
        x_1 = self.m(x_1)
        x = torch.cat((x_1, x_2), dim=1)
        return self.conv3(x)


class Focus(nn.Module):
    """Space to depth."""

    def __init__(self, in_channels, out_channels, ksize=1, stride=1):
        super().__init__()
        self.conv = BaseConv(in_channels * 4, out_channels, ksize, stride)

    def forward(self, x):
        patch_top_left = x[..., ::2, ::2]
        patch_top_right = x[..., ::2, 1::2]
        patch_bot_left = x[..., 1::2, ::2]
        patch_bot_right = x[..., 1::2, 1::2]
        x = torch.cat((patch_top_left, patch_bot_left, patch_top_right, patch_bot_right), dim=1)
        return self.conv(x)


class CSPDarknet(nn.Module):
    def __init__(self, dep_mul, wid_mul, out_features=("dark3", "dark4", "dark5"), depthwise=False):
        super().__init__()
        self.out_features = out_features
        Conv = DWConv if depthwise else BaseConv
        c = int(wid_mul * 64)
        d = max(round(dep_mul * 3), 1)
        self.stem = Focus(3, c, ksize=3)
        self.dark2 = nn.Sequential(Conv(c, c * 2, 3, 2), CSPLayer(c * 2, c * 2, n=d, depthwise=depthwise))
        self.dark3 = nn.Sequential(Conv(c * 2, c * 4, 3, 2), CSPLayer(c * 4, c * 4, n=d * 3, depthwise=depthwise))
        self.dark4 = nn.Sequential(Conv(c * 4, c * 8, 3, 2), CSPLayer(c * 8, c * 8, n=d * 3, depthwise=depthwise))
        self.dark5 = nn.Sequential(
            Conv(c * 8, c * 16, 3, 2),
            SPPBottleneck(c * 16, c * 16),
            CSPLayer(c * 16, c * 16, n=d, shortcut=False, depthwise=depthwise),
        )

    def forward(self, x):
        outputs = {}
        x = self.stem(x)
        outputs["stem"] = x
        x = self.dark2(x)
        outputs["dark2"] = x
        x = self.dark3(x)
        outputs["dark3"] = x
        x = self.dark4(x)
        outputs["dark4"] = x
        x = self.dark5(x)
        outputs["dark5"] = x
        return {k: v for k, v in outputs.items() if k in self.out_features}


class YOLOPAFPN(nn.Module):
    def __init__(self, depth, width, in_channels=(256, 512, 1024), depthwise=False):
        super().__init__()
        self.backbone = CSPDarknet(depth, width, depthwise=depthwise)
        self.in_features = ("dark3", "dark4", "dark5")
        Conv = DWConv if depthwise else BaseConv
        c3, c4, c5 = (int(c * width) for c in in_channels)
        n = round(3 * depth)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.lateral_conv0 = BaseConv(c5, c4, 1, 1)
        self.C3_p4 = CSPLayer(2 * c4, c4, n, False, depthwise=depthwise)
        self.reduce_conv1 = BaseConv(c4, c3, 1, 1)
        self.C3_p3 = CSPLayer(2 * c3, c3, n, False, depthwise=depthwise)
        self.bu_conv2 = Conv(c3, c3, 3, 2)
        self.C3_n3 = CSPLayer(2 * c3, c4, n, False, depthwise=depthwise)
        self.bu_conv1 = Conv(c4, c4, 3, 2)
        self.C3_n4 = CSPLayer(2 * c4, c5, n, False, depthwise=depthwise)

    def forward(self, input):
        out_features = self.backbone(input)
        features = [out_features[f] for f in self.in_features]
        [x2, x1, x0] = features
        fpn_out0 = self.lateral_conv0(x0)
        f_out0 = self.upsample(fpn_out0)
        f_out0 = torch.cat([f_out0, x1], 1)
        f_out0 = self.C3_p4(f_out0)
        fpn_out1 = self.reduce_conv1(f_out0)
        f_out1 = self.upsample(fpn_out1)
        f_out1 = torch.cat([f_out1, x2], 1)
        pan_out2 = self.C3_p3(f_out1)
        p_out1 = self.bu_conv2(pan_out2)
        p_out1 = torch.cat([p_out1, fpn_out1], 1)
        pan_out1 = self.C3_n3(p_out1)
        p_out0 = self.bu_conv1(pan_out1)
        p_out0 = torch.cat([p_out0, fpn_out0], 1)
        pan_out0 = self.C3_n4(p_out0)
        return (pan_out2, pan_out1, pan_out0)


class YOLOXHead(nn.Module):
    def __init__(self, num_classes, width, strides=(8, 16, 32), in_channels=(256, 512, 1024), depthwise=False):
        super().__init__()
        self.num_classes = num_classes
        self.strides = strides
        self.stems = nn.ModuleList()
        self.cls_convs = nn.ModuleList()
        self.reg_convs = nn.ModuleList()
        self.cls_preds = nn.ModuleList()
        self.reg_preds = nn.ModuleList()
        self.obj_preds = nn.ModuleList()
        Conv = DWConv if depthwise else BaseConv
        h = int(256 * width)
        for c in in_channels:
            self.stems.append(BaseConv(int(c * width), h, ksize=1, stride=1))
            self.cls_convs.append(nn.Sequential(Conv(h, h, 3, 1), Conv(h, h, 3, 1)))
            self.reg_convs.append(nn.Sequential(Conv(h, h, 3, 1), Conv(h, h, 3, 1)))
            self.cls_preds.append(nn.Conv2d(h, num_classes, 1))
            self.reg_preds.append(nn.Conv2d(h, 4, 1))
            self.obj_preds.append(nn.Conv2d(h, 1, 1))
        self.initialize_biases(1e-2)

    def initialize_biases(self, prior_prob):
        for conv in list(self.cls_preds) + list(self.obj_preds):
            nn.init.constant_(conv.bias, -math.log((1 - prior_prob) / prior_prob))

    def forward(self, xin):
        outputs = []
        for k, (cls_conv, reg_conv, x) in enumerate(zip(self.cls_convs, self.reg_convs, xin)):
            x = self.stems[k](x)
            cls_feat = cls_conv(x)
            cls_output = self.cls_preds[k](cls_feat)
            reg_feat = reg_conv(x)
            reg_output = self.reg_preds[k](reg_feat)
            obj_output = self.obj_preds[k](reg_feat)
            output = torch.cat([reg_output, obj_output.sigmoid(), cls_output.sigmoid()], 1)
            outputs.append(output)
        hw = [x.shape[-2:] for x in outputs]
        # [batch, n_anchors_all, 85]
        outputs = torch.cat([x.flatten(start_dim=2) for x in outputs], dim=2).permute(0, 2, 1)
        return self.decode_outputs(outputs, hw, dtype=xin[0].dtype)

    def decode_outputs(self, outputs, hw, dtype):
        grids = []
        strides = []
        for (hsize, wsize), stride in zip(hw, self.strides):
            yv, xv = torch.meshgrid(torch.arange(hsize), torch.arange(wsize), indexing="ij")
            grid = torch.stack((xv, yv), 2).view(1, -1, 2)
            grids.append(grid)
            shape = grid.shape[:2]
            strides.append(torch.full((*shape, 1), stride))
        grids = torch.cat(grids, dim=1).to(dtype)
        strides = torch.cat(strides, dim=1).to(dtype)
        outputs = torch.cat(
            [
                (outputs[..., 0:2] + grids) * strides,
                torch.exp(outputs[..., 2:4]) * strides,
                outputs[..., 4:],
            ],
            dim=-1,
        )
        return outputs


class YOLOX(nn.Module):
    def __init__(self, num_classes=80, depth=0.33, width=0.25, depthwise=True):
        super().__init__()
        self.backbone = YOLOPAFPN(depth, width, depthwise=depthwise)
        self.head = YOLOXHead(num_classes, width, depthwise=depthwise)

    def forward(self, images):
        fpn_outs = self.backbone(images)
        return self.head(fpn_outs)


def yolox_nano(batch: int):
    torch.manual_seed(0)
    model = YOLOX()
    for m in model.modules():  # default conv init would fade away over this depth without training
        if isinstance(m, nn.Conv2d) and m.bias is None:
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
    _as_if_trained(model)
    for m in list(model.head.cls_preds) + list(model.head.obj_preds):
        m.weight.mul_(3.0)

    def make(g, n):  # YOLOX takes raw 0..255 pixels
        return {"images": (_images(g, n, 320) * 60.0 + 114.0).clamp(0, 255)}

    _calibrate_batchnorms(model, _rows(make, 16, seed=7))
    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 4. DeBERTa-v3-xsmall cross-encoder reranker (transformers)
# --------------------------------------------------------------------------------------------------


class CrossEncoder(nn.Module):
    """sentence-transformers style: one relevance score per (query, passage) pair."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.activation_fn = nn.Sigmoid()

    def forward(self, input_ids, attention_mask, token_type_ids):
        logits = self.model(
            input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids, return_dict=True
        ).logits
        return self.activation_fn(logits)


def deberta_v3_reranker(batch: int):
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    torch.manual_seed(0)
    cfg = DebertaV2Config(
        vocab_size=128100,
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=512,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
        relative_attention=True,
        max_relative_positions=-1,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        initializer_range=0.05,
        pooler_hidden_size=384,
        pooler_hidden_act="gelu",
        num_labels=1,
    )
    model = _as_if_trained(CrossEncoder(DebertaV2ForSequenceClassification(cfg)))
    model.model.classifier.weight.mul_(4.0)
    seq = 128

    def make(g, n):
        ids = torch.randint(4, 128000, (n, seq), generator=g)
        query = torch.randint(6, 14, (n, 1), generator=g)
        length = torch.randint(seq // 2, seq + 1, (n, 1), generator=g)
        length[0] = seq
        pos = torch.arange(seq)[None, :]
        ids[:, 0] = 1  # [CLS]
        ids = torch.where((pos == query) | (pos == length - 1), torch.full_like(ids, 2), ids)  # [SEP]
        mask = (pos < length).long()
        return {
            "input_ids": ids * mask,
            "attention_mask": mask,
            "token_type_ids": ((pos > query) & (pos < length)).long(),
        }

    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 5. Qwen3-style prefill (transformers): grouped heads, q/k RMSNorm, returns the cache
# --------------------------------------------------------------------------------------------------


class PrefillWithCache(nn.Module):
    """Right-padded prompt in; logits of the last real token and the stacked key/value cache out."""

    def __init__(self, lm):
        super().__init__()
        self.lm = lm

    def forward(self, input_ids, attention_mask):
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        out = self.lm.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=True
        )
        last = attention_mask.sum(-1) - 1
        hidden = out.last_hidden_state[torch.arange(input_ids.shape[0], device=input_ids.device), last]
        logits = self.lm.lm_head(hidden)
        keys = torch.stack([layer.keys for layer in out.past_key_values.layers], dim=1)
        values = torch.stack([layer.values for layer in out.past_key_values.layers], dim=1)
        return logits, keys, values


def qwen3_prefill(batch: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    cfg = Qwen3Config(
        vocab_size=32768,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    )
    model = _as_if_trained(PrefillWithCache(Qwen3ForCausalLM(cfg)))
    seq = 256

    def make(g, n):
        ids = torch.randint(3, cfg.vocab_size, (n, seq), generator=g)
        length = torch.randint(seq // 4, seq + 1, (n, 1), generator=g)
        length[0] = seq - 19
        mask = (torch.arange(seq)[None, :] < length).long()
        return {"input_ids": ids * mask, "attention_mask": mask}

    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 6. Conformer-S CTC encoder (ESPnet / WeNet style, relative positions, length mask)
# --------------------------------------------------------------------------------------------------


class RelPositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=1024):
        super().__init__()
        self.d_model = d_model
        self.xscale = math.sqrt(d_model)
        pe_positive = torch.zeros(max_len, d_model)
        pe_negative = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float32).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float32) * -(math.log(10000.0) / d_model))
        pe_positive[:, 0::2] = torch.sin(position * div_term)
        pe_positive[:, 1::2] = torch.cos(position * div_term)
        pe_negative[:, 0::2] = torch.sin(-1 * position * div_term)
        pe_negative[:, 1::2] = torch.cos(-1 * position * div_term)
        pe_positive = torch.flip(pe_positive, [0]).unsqueeze(0)
        pe_negative = pe_negative[1:].unsqueeze(0)
        self.register_buffer("pe", torch.cat([pe_positive, pe_negative], dim=1), persistent=False)

    def forward(self, x):
        x = x * self.xscale
        t = x.size(1)
        pos_emb = self.pe[:, self.pe.size(1) // 2 - t + 1 : self.pe.size(1) // 2 + t]
        return x, pos_emb


class RelPositionMultiHeadedAttention(nn.Module):
    def __init__(self, n_head, n_feat):
        super().__init__()
        self.d_k = n_feat // n_head
        self.h = n_head
        self.linear_q = nn.Linear(n_feat, n_feat)
        self.linear_k = nn.Linear(n_feat, n_feat)
        self.linear_v = nn.Linear(n_feat, n_feat)
        self.linear_out = nn.Linear(n_feat, n_feat)
        self.linear_pos = nn.Linear(n_feat, n_feat, bias=False)
        self.pos_bias_u = nn.Parameter(torch.Tensor(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.Tensor(self.h, self.d_k))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)

    def rel_shift(self, x):
        zero_pad = torch.zeros((*x.size()[:3], 1), device=x.device, dtype=x.dtype)
        x_padded = torch.cat([zero_pad, x], dim=-1)
        x_padded = x_padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))
        x = x_padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]
        return x

    def forward(self, query, key, value, pos_emb, mask):
        n_batch = query.size(0)
        q = self.linear_q(query).view(n_batch, -1, self.h, self.d_k)
        k = self.linear_k(key).view(n_batch, -1, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(value).view(n_batch, -1, self.h, self.d_k).transpose(1, 2)
        n_batch_pos = pos_emb.size(0)
        p = self.linear_pos(pos_emb).view(n_batch_pos, -1, self.h, self.d_k).transpose(1, 2)
        q_with_bias_u = (q + self.pos_bias_u).transpose(1, 2)
        q_with_bias_v = (q + self.pos_bias_v).transpose(1, 2)
        matrix_ac = torch.matmul(q_with_bias_u, k.transpose(-2, -1))
        matrix_bd = torch.matmul(q_with_bias_v, p.transpose(-2, -1))
        matrix_bd = self.rel_shift(matrix_bd)
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)
        mask = mask.unsqueeze(1).eq(0)
        min_value = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(mask, min_value)
        attn = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        x = torch.matmul(attn, v)
        x = x.transpose(1, 2).contiguous().view(n_batch, -1, self.h * self.d_k)
        return self.linear_out(x)


class ConvolutionModule(nn.Module):
    def __init__(self, channels, kernel_size):
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(channels, 2 * channels, kernel_size=1)
        self.depthwise_conv = nn.Conv1d(
            channels, channels, kernel_size, padding=(kernel_size - 1) // 2, groups=channels
        )
        self.norm = nn.BatchNorm1d(channels)
        self.pointwise_conv2 = nn.Conv1d(channels, channels, kernel_size=1)
        self.activation = nn.SiLU()

    def forward(self, x, mask_pad):
        x = x.transpose(1, 2)
        x = x.masked_fill(~mask_pad, 0.0)
        x = self.pointwise_conv1(x)
        x = F.glu(x, dim=1)
        x = self.depthwise_conv(x)
        x = self.activation(self.norm(x))
        x = self.pointwise_conv2(x)
        x = x.masked_fill(~mask_pad, 0.0)
        return x.transpose(1, 2)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, idim, hidden_units):
        super().__init__()
        self.w_1 = nn.Linear(idim, hidden_units)
        self.activation = nn.SiLU()
        self.dropout = nn.Dropout(0.1)
        self.w_2 = nn.Linear(hidden_units, idim)

    def forward(self, xs):
        return self.w_2(self.dropout(self.activation(self.w_1(xs))))


class ConformerEncoderLayer(nn.Module):
    def __init__(self, size, heads, ff, kernel):
        super().__init__()
        self.feed_forward_macaron = PositionwiseFeedForward(size, ff)
        self.self_attn = RelPositionMultiHeadedAttention(heads, size)
        self.conv_module = ConvolutionModule(size, kernel)
        self.feed_forward = PositionwiseFeedForward(size, ff)
        self.norm_ff_macaron = nn.LayerNorm(size, eps=1e-5)
        self.norm_mha = nn.LayerNorm(size, eps=1e-5)
        self.norm_conv = nn.LayerNorm(size, eps=1e-5)
        self.norm_ff = nn.LayerNorm(size, eps=1e-5)
        self.norm_final = nn.LayerNorm(size, eps=1e-5)
        self.ff_scale = 0.5
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, mask, pos_emb, mask_pad):
        residual = x
        x = residual + self.ff_scale * self.dropout(self.feed_forward_macaron(self.norm_ff_macaron(x)))
        residual = x
        x = self.norm_mha(x)
        x = residual + self.dropout(self.self_attn(x, x, x, pos_emb, mask))
        residual = x
        x = residual + self.dropout(self.conv_module(self.norm_conv(x), mask_pad))
        residual = x
        x = residual + self.ff_scale * self.dropout(self.feed_forward(self.norm_ff(x)))
        return self.norm_final(x)


class Conv2dSubsampling4(nn.Module):
    def __init__(self, idim, odim):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, odim, 3, 2), nn.ReLU(), nn.Conv2d(odim, odim, 3, 2), nn.ReLU())
        self.out = nn.Sequential(nn.Linear(odim * (((idim - 1) // 2 - 1) // 2), odim))

    def forward(self, x, x_mask):
        x = x.unsqueeze(1)
        x = self.conv(x)
        b, c, t, f = x.size()
        x = self.out(x.transpose(1, 2).contiguous().view(b, t, c * f))
        return x, x_mask[:, :, 2::2][:, :, 2::2]


class GlobalCMVN(nn.Module):
    def __init__(self, mean, istd):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("istd", istd)

    def forward(self, x):
        return (x - self.mean) * self.istd


def make_pad_mask(lengths, max_len):
    batch_size = lengths.size(0)
    seq_range = torch.arange(0, max_len, dtype=torch.int64, device=lengths.device)
    seq_range_expand = seq_range.unsqueeze(0).expand(batch_size, max_len)
    return seq_range_expand >= lengths.unsqueeze(-1)


class ConformerCTC(nn.Module):
    def __init__(self, idim=80, size=144, heads=4, ff=576, layers=16, kernel=31, vocab=1024):
        super().__init__()
        self.global_cmvn = GlobalCMVN(torch.randn(idim) * 0.5 + 10.0, torch.rand(idim) * 0.1 + 0.25)
        self.embed = Conv2dSubsampling4(idim, size)
        self.pos_enc = RelPositionalEncoding(size)
        self.encoders = nn.ModuleList([ConformerEncoderLayer(size, heads, ff, kernel) for _ in range(layers)])
        self.after_norm = nn.LayerNorm(size, eps=1e-5)
        self.ctc_lo = nn.Linear(size, vocab)

    def forward(self, speech, speech_lengths):
        T = speech.size(1)
        masks = ~make_pad_mask(speech_lengths, T).unsqueeze(1)  # (B, 1, T)
        xs = self.global_cmvn(speech)
        xs, masks = self.embed(xs, masks)
        xs, pos_emb = self.pos_enc(xs)
        mask_pad = masks
        for layer in self.encoders:
            xs = layer(xs, masks, pos_emb, mask_pad)
        xs = self.after_norm(xs)
        log_probs = F.log_softmax(self.ctc_lo(xs), dim=2)
        return log_probs, masks.squeeze(1).sum(1)


def conformer_ctc_small(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(ConformerCTC())
    frames = 400

    def make(g, n):
        lengths = torch.randint(frames // 2, frames + 1, (n,), generator=g)
        lengths[0] = frames - 31
        feats = torch.randn(n, frames, 80, generator=g) * 3.0 + 10.0
        feats = feats * (torch.arange(frames)[None, :, None] < lengths[:, None, None])
        return {"speech": feats, "speech_lengths": lengths}

    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 7. ECAPA-TDNN speaker embedding (TaoRuijie/ECAPA-TDNN, C=512), waveform in, fbank inside
# --------------------------------------------------------------------------------------------------


def melscale_fbanks(n_freqs, f_min, f_max, n_mels, sample_rate):
    """torchaudio.functional.melscale_fbanks (htk, norm=None)."""
    all_freqs = torch.linspace(0, sample_rate // 2, n_freqs)
    m_min = 2595.0 * math.log10(1.0 + (f_min / 700.0))
    m_max = 2595.0 * math.log10(1.0 + (f_max / 700.0))
    m_pts = torch.linspace(m_min, m_max, n_mels + 2)
    f_pts = 700.0 * (10.0 ** (m_pts / 2595.0) - 1.0)
    f_diff = f_pts[1:] - f_pts[:-1]
    slopes = f_pts.unsqueeze(0) - all_freqs.unsqueeze(1)
    down_slopes = (-1.0 * slopes[:, :-2]) / f_diff[:-1]
    up_slopes = slopes[:, 2:] / f_diff[1:]
    return torch.clamp(torch.min(down_slopes, up_slopes), min=0.0)


class PreEmphasis(nn.Module):
    def __init__(self, coef: float = 0.97):
        super().__init__()
        self.coef = coef
        self.register_buffer("flipped_filter", torch.FloatTensor([-self.coef, 1.0]).unsqueeze(0).unsqueeze(0))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        input = input.unsqueeze(1)
        input = F.pad(input, (1, 0), "reflect")
        return F.conv1d(input, self.flipped_filter).squeeze(1)


class MelSpectrogram(nn.Module):
    """torchaudio.transforms.MelSpectrogram (power 2, centred, reflect)."""

    def __init__(self, sample_rate, n_fft, win_length, hop_length, f_min, f_max, n_mels):
        super().__init__()
        self.n_fft, self.win_length, self.hop_length = n_fft, win_length, hop_length
        self.register_buffer("window", torch.hamming_window(win_length))
        self.register_buffer("fb", melscale_fbanks(n_fft // 2 + 1, f_min, f_max, n_mels, sample_rate))

    def forward(self, waveform):
        spec = torch.stft(
            waveform,
            n_fft=self.n_fft,
            hop_length=self.hop_length,
            win_length=self.win_length,
            window=self.window,
            center=True,
            pad_mode="reflect",
            normalized=False,
            onesided=True,
            return_complex=True,
        )
        spec = spec.abs().pow(2.0)
        return torch.matmul(spec.transpose(-1, -2), self.fb).transpose(-1, -2)


class SEModule(nn.Module):
    def __init__(self, channels, bottleneck=128):
        super().__init__()
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool1d(1),
            nn.Conv1d(channels, bottleneck, kernel_size=1, padding=0),
            nn.ReLU(),
            nn.Conv1d(bottleneck, channels, kernel_size=1, padding=0),
            nn.Sigmoid(),
        )

    def forward(self, input):
        x = self.se(input)
        return input * x


class Bottle2neck(nn.Module):
    def __init__(self, inplanes, planes, kernel_size=None, dilation=None, scale=8):
        super().__init__()
        width = int(math.floor(planes / scale))
        self.conv1 = nn.Conv1d(inplanes, width * scale, kernel_size=1)
        self.bn1 = nn.BatchNorm1d(width * scale)
        self.nums = scale - 1
        convs = []
        bns = []
        num_pad = math.floor(kernel_size / 2) * dilation
        for _ in range(self.nums):
            convs.append(nn.Conv1d(width, width, kernel_size=kernel_size, dilation=dilation, padding=num_pad))
            bns.append(nn.BatchNorm1d(width))
        self.convs = nn.ModuleList(convs)
        self.bns = nn.ModuleList(bns)
        self.conv3 = nn.Conv1d(width * scale, planes, kernel_size=1)
        self.bn3 = nn.BatchNorm1d(planes)
        self.relu = nn.ReLU()
        self.width = width
        self.se = SEModule(planes)

    def forward(self, x):
        residual = x
        out = self.conv1(x)
        out = self.relu(out)
        out = self.bn1(out)
        spx = torch.split(out, self.width, 1)
        for i in range(self.nums):
            if i == 0:
                sp = spx[i]
            else:
                sp = sp + spx[i]
            sp = self.convs[i](sp)
            sp = self.relu(sp)
            sp = self.bns[i](sp)
            if i == 0:
                out = sp
            else:
                out = torch.cat((out, sp), 1)
        out = torch.cat((out, spx[self.nums]), 1)
        out = self.conv3(out)
        out = self.relu(out)
        out = self.bn3(out)
        out = self.se(out)
        out += residual
        return out


class ECAPA_TDNN(nn.Module):
    def __init__(self, C=512):
        super().__init__()
        self.torchfbank = nn.Sequential(
            PreEmphasis(),
            MelSpectrogram(
                sample_rate=16000, n_fft=512, win_length=400, hop_length=160, f_min=20, f_max=7600, n_mels=80
            ),
        )
        self.conv1 = nn.Conv1d(80, C, kernel_size=5, stride=1, padding=2)
        self.relu = nn.ReLU()
        self.bn1 = nn.BatchNorm1d(C)
        self.layer1 = Bottle2neck(C, C, kernel_size=3, dilation=2, scale=8)
        self.layer2 = Bottle2neck(C, C, kernel_size=3, dilation=3, scale=8)
        self.layer3 = Bottle2neck(C, C, kernel_size=3, dilation=4, scale=8)
        self.layer4 = nn.Conv1d(3 * C, 1536, kernel_size=1)
        self.attention = nn.Sequential(
            nn.Conv1d(4608, 256, kernel_size=1),
            nn.ReLU(),
            nn.BatchNorm1d(256),
            nn.Tanh(),
            nn.Conv1d(256, 1536, kernel_size=1),
            nn.Softmax(dim=2),
        )
        self.bn5 = nn.BatchNorm1d(3072)
        self.fc6 = nn.Linear(3072, 192)
        self.bn6 = nn.BatchNorm1d(192)

    def forward(self, x):
        with torch.no_grad():
            x = self.torchfbank(x) + 1e-6
            x = x.log()
            x = x - torch.mean(x, dim=-1, keepdim=True)
        x = self.conv1(x)
        x = self.relu(x)
        x = self.bn1(x)
        x1 = self.layer1(x)
        x2 = self.layer2(x + x1)
        x3 = self.layer3(x + x1 + x2)
        x = self.layer4(torch.cat((x1, x2, x3), dim=1))
        x = self.relu(x)
        t = x.size()[-1]
        global_x = torch.cat(
            (
                x,
                torch.mean(x, dim=2, keepdim=True).repeat(1, 1, t),
                torch.sqrt(torch.var(x, dim=2, keepdim=True).clamp(min=1e-4)).repeat(1, 1, t),
            ),
            dim=1,
        )
        w = self.attention(global_x)
        mu = torch.sum(x * w, dim=2)
        sg = torch.sqrt((torch.sum((x**2) * w, dim=2) - mu**2).clamp(min=1e-4))
        x = torch.cat((mu, sg), 1)
        x = self.bn5(x)
        x = self.fc6(x)
        x = self.bn6(x)
        return x


def ecapa_tdnn(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(ECAPA_TDNN())
    samples = 24000  # 1.5 s, the usual diarization window

    def make(g, n):
        t = torch.arange(samples) / 16000.0
        f0 = 90.0 + 150.0 * torch.rand(n, 1, generator=g)
        wave = torch.zeros(n, samples)
        for k in range(1, 11):
            amp = torch.rand(n, 1, generator=g) / k
            vibrato = 1.0 + 0.02 * torch.sin(2 * math.pi * 5.0 * t)
            wave += amp * torch.sin(2 * math.pi * k * f0 * t * vibrato)
        wave = 0.1 * wave * (0.55 + 0.45 * torch.sin(2 * math.pi * 3.0 * t))
        return {"x": wave + 0.003 * torch.randn(n, samples, generator=g)}

    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 8. Two-tower recommender: embedding bags, normalised towers, candidate scoring, top-k
# --------------------------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self, in_dim, hidden=(512, 256), out_dim=64):
        super().__init__()
        layers = []
        for h in hidden:
            layers += [nn.Linear(in_dim, h), nn.ReLU(), nn.LayerNorm(h)]
            in_dim = h
        layers.append(nn.Linear(in_dim, out_dim))
        self.mlp = nn.Sequential(*layers)

    def forward(self, x):
        return F.normalize(self.mlp(x), p=2, dim=-1)


class TwoTower(nn.Module):
    def __init__(self, n_users=100_000, n_items=100_000, n_tags=5_000, dim=64, n_dense=8, k=50):
        super().__init__()
        self.k = k
        self.dim = dim
        self.user_emb = nn.Embedding(n_users, dim)
        self.item_emb = nn.Embedding(n_items, dim, padding_idx=0)
        self.history_bag = nn.EmbeddingBag(n_items, dim, mode="sum", padding_idx=0)
        self.interest_bag = nn.EmbeddingBag(n_tags, dim, mode="mean", padding_idx=0)
        self.tag_bag = nn.EmbeddingBag(n_tags, dim, mode="mean", padding_idx=0)
        self.dense_bn = nn.BatchNorm1d(n_dense)
        self.user_tower = Tower(3 * dim + n_dense)
        self.item_tower = Tower(2 * dim)
        self.item_bias = nn.Embedding(n_items, 1)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.07)))
        nn.init.normal_(self.item_bias.weight, std=0.1)

    def forward(self, user_id, history, history_weight, interests, dense, candidates, candidate_tags):
        user = torch.cat(
            [
                self.user_emb(user_id),
                self.history_bag(history, per_sample_weights=history_weight),
                self.interest_bag(interests),
                self.dense_bn(torch.log1p(dense)),
            ],
            dim=-1,
        )
        user_vec = self.user_tower(user)  # (B, D)
        b, n, t = candidate_tags.shape
        tags = self.tag_bag(candidate_tags.reshape(b * n, t)).view(b, n, self.dim)
        item_vec = self.item_tower(torch.cat([self.item_emb(candidates), tags], dim=-1))  # (B, N, D)
        scores = torch.einsum("bd,bnd->bn", user_vec, item_vec) / self.log_temperature.exp()
        scores = scores + self.item_bias(candidates).squeeze(-1)
        top = torch.topk(scores, self.k, dim=-1)
        return top.values, torch.gather(candidates, 1, top.indices), user_vec


def two_tower(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(TwoTower())

    def make(g, n):
        hist_len = torch.randint(1, 51, (n, 1), generator=g)
        hist = torch.randint(1, 100_000, (n, 50), generator=g) * (torch.arange(50)[None, :] < hist_len)
        weight = 0.95 ** torch.arange(50).float()[None, :].expand(n, 50) / hist_len.clamp(min=1)
        interests = torch.randint(1, 5_000, (n, 10), generator=g)
        interests[:, 6:] = 0
        tags = torch.randint(1, 5_000, (n, 768, 4), generator=g)
        n_tags = torch.randint(1, 5, (n, 768, 1), generator=g)
        cand = torch.stack([torch.randperm(99_999, generator=g)[:768] + 1 for _ in range(n)])
        return {
            "user_id": torch.randint(0, 100_000, (n,), generator=g),
            "history": hist,
            "history_weight": weight.contiguous(),
            "interests": interests,
            "dense": torch.rand(n, 8, generator=g) * 20.0,
            "candidates": cand,
            "candidate_tags": tags * (torch.arange(4) < n_tags),
        }

    return model, _rows(make, batch)


# --------------------------------------------------------------------------------------------------
# 9. PatchTST forecaster (yuqinie98/PatchTST, the ETTh1 script with d_model 32, PatchTST/64, horizon 720)
# --------------------------------------------------------------------------------------------------


class RevIN(nn.Module):
    """Reversible instance norm.  The original keeps mean and stdev on ``self``; export refuses that."""

    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(num_features))
        self.affine_bias = nn.Parameter(torch.zeros(num_features))

    def norm(self, x):
        mean = torch.mean(x, dim=1, keepdim=True).detach()
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + self.eps).detach()
        x = (x - mean) / stdev
        x = x * self.affine_weight
        return x + self.affine_bias, mean, stdev

    def denorm(self, x, mean, stdev):
        x = x - self.affine_bias
        x = x / (self.affine_weight + self.eps * self.eps)
        return x * stdev + mean


class Transpose(nn.Module):
    def __init__(self, *dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.transpose(*self.dims)


class PatchTSTAttention(nn.Module):
    """Residual (RealFormer) multi-head attention."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.scale = nn.Parameter(torch.tensor(self.d_k**-0.5), requires_grad=False)
        self.to_out = nn.Sequential(nn.Linear(d_model, d_model), nn.Dropout(0.0))

    def forward(self, Q, prev=None):
        bs = Q.size(0)
        q_s = self.W_Q(Q).view(bs, -1, self.n_heads, self.d_k).transpose(1, 2)
        k_s = self.W_K(Q).view(bs, -1, self.n_heads, self.d_k).permute(0, 2, 3, 1)
        v_s = self.W_V(Q).view(bs, -1, self.n_heads, self.d_k).transpose(1, 2)
        attn_scores = torch.matmul(q_s, k_s) * self.scale
        if prev is not None:
            attn_scores = attn_scores + prev
        attn_weights = F.softmax(attn_scores, dim=-1)
        output = torch.matmul(attn_weights, v_s)
        output = output.transpose(1, 2).contiguous().view(bs, -1, self.n_heads * self.d_k)
        return self.to_out(output), attn_scores


class TSTEncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.self_attn = PatchTSTAttention(d_model, n_heads)
        self.dropout_attn = nn.Dropout(0.3)
        self.norm_attn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(d_model), Transpose(1, 2))
        self.ff = nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Dropout(0.3), nn.Linear(d_ff, d_model))
        self.dropout_ffn = nn.Dropout(0.3)
        self.norm_ffn = nn.Sequential(Transpose(1, 2), nn.BatchNorm1d(d_model), Transpose(1, 2))

    def forward(self, src, prev=None):
        src2, scores = self.self_attn(src, prev)
        src = src + self.dropout_attn(src2)
        src = self.norm_attn(src)
        src2 = self.ff(src)
        src = src + self.dropout_ffn(src2)
        src = self.norm_ffn(src)
        return src, scores


class PatchTST(nn.Module):
    def __init__(
        self,
        c_in=7,
        context_window=512,
        target_window=720,
        patch_len=16,
        stride=8,
        n_layers=3,
        d_model=32,
        n_heads=8,
        d_ff=128,
    ):
        super().__init__()
        self.revin_layer = RevIN(c_in)
        self.patch_len, self.stride = patch_len, stride
        patch_num = int((context_window - patch_len) / stride + 1) + 1
        self.padding_patch_layer = nn.ReplicationPad1d((0, stride))
        self.n_vars = c_in
        self.W_P = nn.Linear(patch_len, d_model)
        self.W_pos = nn.Parameter(torch.empty(patch_num, d_model).uniform_(-0.02, 0.02))
        self.dropout = nn.Dropout(0.3)
        self.layers = nn.ModuleList([TSTEncoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.flatten = nn.Flatten(start_dim=-2)
        self.linear = nn.Linear(d_model * patch_num, target_window)

    def forward(self, x):  # (bs, seq_len, nvars)
        x, mean, stdev = self.revin_layer.norm(x)
        z = x.permute(0, 2, 1)
        z = self.padding_patch_layer(z)
        z = z.unfold(dimension=-1, size=self.patch_len, step=self.stride)  # (bs, nvars, patch_num, patch_len)
        n_vars = z.shape[1]
        z = self.W_P(z)
        u = torch.reshape(z, (z.shape[0] * z.shape[1], z.shape[2], z.shape[3]))
        u = self.dropout(u + self.W_pos)
        scores = None
        for layer in self.layers:
            u, scores = layer(u, scores)
        z = torch.reshape(u, (-1, n_vars, u.shape[-2], u.shape[-1]))
        z = z.permute(0, 1, 3, 2)  # (bs, nvars, d_model, patch_num)
        z = self.linear(self.flatten(z))
        z = z.permute(0, 2, 1)
        return self.revin_layer.denorm(z, mean, stdev)


def patchtst(batch: int):
    torch.manual_seed(0)
    model = _as_if_trained(PatchTST())

    def make(g, n):
        t = torch.arange(512).float()[None, :, None]
        period = 12.0 + 24.0 * torch.rand(n, 1, 7, generator=g)
        season = torch.sin(2 * math.pi * t / period + 6.0 * torch.rand(n, 1, 7, generator=g))
        walk = torch.randn(n, 512, 7, generator=g).cumsum(1) * 0.1
        return {"x": 15.0 + 5.0 * season + walk}

    return model, _rows(make, batch)


MODELS: dict[str, Callable[[int], tuple[nn.Module, dict[str, torch.Tensor]]]] = {
    "convnextv2_pico": convnextv2_pico,
    "swin_small": swin_small,
    "yolox_nano": yolox_nano,
    "deberta_v3_reranker": deberta_v3_reranker,
    "qwen3_prefill": qwen3_prefill,
    "conformer_ctc_small": conformer_ctc_small,
    "ecapa_tdnn": ecapa_tdnn,
    "two_tower": two_tower,
    "patchtst": patchtst,
}

UNSEEN = {name: partial(build, EXAMPLE_BATCH) for name, build in MODELS.items()}
"""Builds of each model and example inputs, by name: the same weights in every process."""
