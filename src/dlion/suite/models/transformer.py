"""The small transformers of the default runs: a ViT and a GPT of the same blocks."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP, ``[B, T, dim]`` -> ``[B, T, dim]``.

    A ``modern`` block has RMSNorm and an MLP with gated hidden units (SwiGLU, Shazeer 2020, arXiv
    2002.05202).
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        dropout: float,
        causal: bool,
        modern: bool = False,
    ):
        super().__init__()
        norm = nn.RMSNorm if modern else nn.LayerNorm
        self.heads, self.causal, self.dropout, self.modern = heads, causal, dropout, modern
        self.attention_norm = norm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = norm(dim)
        self.mlp_in = nn.Linear(dim, 2 * mlp_dim if modern else mlp_dim)
        self.mlp_out = nn.Linear(mlp_dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.attention_out(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        hidden = self.mlp_in(self.mlp_norm(x))
        if self.modern:
            gate, hidden = hidden.chunk(2, -1)
            hidden = F.silu(gate) * hidden
        else:
            hidden = F.gelu(hidden)
        return x + self.drop(self.mlp_out(self.drop(hidden)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' attention, ``[B, heads, T, dim / heads]`` as each argument."""
        p = self.dropout if self.training else 0.0
        if q.dtype == torch.float32 or q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        # on a CPU the backward pass in bfloat16 takes ten times as long as in float32
        with torch.autocast("cpu", enabled=False):
            return self.attend(q.float(), k.float(), v.float()).to(q.dtype)


class ViT(nn.Module):
    """Vision transformer with mean pooling (Dosovitskiy et al. 2021, arXiv 2010.11929).

    Images ``[B, C, H, W]`` -> logits ``[B, classes]``.
    """

    def __init__(
        self,
        image_size: int,
        channels: int,
        classes: int,
        patch_size: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.patch_size = patch_size
        patches = (image_size // patch_size) ** 2
        self.embed = nn.Linear(channels * patch_size**2, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(patches, dim))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(dim, heads, mlp_dim, dropout, causal=False) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, self.patch_size).flatten(2).transpose(1, 2)
        x = self.blocks(self.drop(self.embed(patches) + self.positions))
        return self.head(self.norm(x.mean(1)))


class GPT(nn.Module):
    """Decoder-only language model with learned positions, GPT-2's shape.

    Tokens ``[B, T]`` -> logits ``[B, T, vocabulary]``.

    With ``modern`` blocks (RMSNorm and gated MLPs) it is the GPT2++ of arXiv 2404.00438, section
    5.2.

    Weights start with deviation ``init_std``, by default ``1 / sqrt(dim)``. GPT-2's 0.02 suits its
    width of 768. At a width of 64 such weights are too small for sign updates, whose size does not
    depend on the weights (results/stdlib_text).
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        dropout: float = 0.0,
        tie_embeddings: bool = True,
        init_std: float | None = None,
        modern: bool = False,
    ):
        super().__init__()
        std = init_std or dim**-0.5
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Embedding(context, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(dim, heads, mlp_dim, dropout, True, modern) for _ in range(depth))
        )
        self.norm = nn.RMSNorm(dim) if modern else nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for name, param in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(param, std=std / math.sqrt(2 * depth))
            elif param.dim() > 1:
                nn.init.normal_(param, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        if tie_embeddings:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))
