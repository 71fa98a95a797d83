"""The decoder of `gpu_decode` in PyTorch: grouped heads, a cache, gated layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        d, f = sizes.width, sizes.features
        self.heads, self.kv_heads, self.features = sizes.heads, sizes.kv_heads, f
        self.qkv = nn.Linear(d, d + 2 * sizes.kv_heads * f)
        self.o, self.down = nn.Linear(d, d, bias=False), nn.Linear(sizes.gated, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * sizes.gated, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(d), nn.RMSNorm(d)

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        half = self.features // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def forward(self, x: Any, cache: Any, at: Any, mask: Any, cos: Any, sin: Any) -> Any:
        batch, length, width = x.shape
        shared = self.kv_heads * self.features
        parts = self.qkv(self.norm1(x)).split((width, shared, shared), -1)
        q, k, v = (p.view(batch, length, -1, self.features).transpose(1, 2) for p in parts)
        keys, values = cache
        keys.index_copy_(2, at, self.rotated(k, cos, sin))
        values.index_copy_(2, at, v)
        q = self.rotated(q, cos, sin)
        y = functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Peer(nn.Module):
    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.table = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)

    def inputs(self) -> tuple[Any, ...]:
        """A token, its position, caches and tables of angles, on the model's device."""
        s, like = self.sizes, self.head.weight
        room = (1, s.kv_heads, s.context, s.features)
        new = lambda *shape: torch.zeros(shape, device=like.device, dtype=like.dtype)
        caches = [(new(*room), new(*room)) for _ in range(s.layers)]
        tables = torch.randn(2, s.context, s.features, device=like.device, dtype=like.dtype)
        token = torch.tensor([[5]], device=like.device)
        return token, torch.tensor([s.at], device=like.device), caches, tables[0], tables[1]

    def forward(self, token: Any, at: Any, caches: Any, cos: Any, sin: Any) -> Any:
        x = self.table(token)
        places = torch.arange(self.sizes.context, device=token.device)
        mask = (places <= at[:, None])[None, None]
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at, mask, cos[at], sin[at])
        return self.head(self.norm(x)).argmax(-1)
