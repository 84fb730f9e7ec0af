"""Small models of many shapes, each with a batch and a step, for the partition tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Any, Any], Any]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.fc_1 = nn.Linear(dim, 4 * dim)
        self.fc_2 = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.fc_2(F.gelu(self.fc_1(self.ln_2(x))))


class GPT(nn.Module):
    """Plain GPT: wte, wpe, blocks, ln_f, and a head that may be tied to wte."""

    def __init__(
        self, layers: int = 4, dim: int = 16, vocab: int = 32, *, tied: bool = True
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(8, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def gpt_step(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


class DoubleConv(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1), nn.BatchNorm2d(cout), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inc = DoubleConv(1, 4)
        self.down_1 = DoubleConv(4, 8)
        self.down_2 = DoubleConv(8, 16)
        self.up_2 = DoubleConv(24, 8)
        self.up_1 = DoubleConv(12, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down_1(F.max_pool2d(a, 2))
        c = self.down_2(F.max_pool2d(b, 2))
        d = self.up_2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.out(self.up_1(torch.cat([F.interpolate(d, scale_factor=2), a], 1)))


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class MoEBlock(nn.Module):
    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.router(h).softmax(-1)
        return x + sum(weights[..., i, None] * e(h) for i, e in enumerate(self.experts))


class SwinStage(nn.Module):
    def __init__(self, dim: int, depth: int, *, downsample: bool) -> None:
        super().__init__()
        self.downsample = nn.Linear(dim // 2, dim) if downsample else nn.Identity()
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class Swin(nn.Module):
    """Nested lists as in timm: layers of stages of blocks, most parameters in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(4, 8)
        self.layers = nn.Sequential(
            SwinStage(8, 2, downsample=False),
            SwinStage(16, 2, downsample=True),
            SwinStage(32, 4, downsample=True),
        )
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patch_embed(x))).mean(1))


def mlp(width: int = 16, depth: int = 4) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 2))


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
    )  # fmt: skip
