"""Attention that is cheaper on a CPU. This is only about speed; --fast=False turns it off.

`enable()` replaces what transformers calls "sdpa", in this process. What it gains: docs/speed.md.
"""
import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

# Attention weights of a layer, B H L L, above which they leave the processor's cache: then `FewHeads` is the
# faster way.
LARGE = 2**21


def enable() -> None:
    AttentionInterface.register("sdpa", attention)
    AttentionMaskInterface.register("sdpa", eager_mask)


def disable() -> None:
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("sdpa", sdpa_mask)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
              **_) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query, key, value (B, H, L, D) -> (B, L, H, D), and no weights.

    attention_mask: (B, 1, L, L), to be added to the scores, or None."""
    if scaling is None:
        scaling = query.shape[-1]**-0.5
    # Several heads may share a key and a value.
    groups = query.shape[1] // key.shape[1]
    key = repeat_kv(key, groups)
    value = repeat_kv(value, groups)
    large = query.shape[:3].numel() * key.shape[2] > LARGE
    # FewHeads is for self-attention with dropout, and for one mask of all heads, which does not learn.
    few_heads = large and dropout and key.shape == query.shape
    if attention_mask is not None and (attention_mask.shape[1] > 1 or attention_mask.requires_grad):
        few_heads = False
    if few_heads:
        parts = [x.float().contiguous() for x in (query * scaling, key, value / (1 - dropout))]
        out = FewHeads.apply(*parts, attention_mask, dropout)
    elif large and not dropout and not query.requires_grad:
        # Torch's fused kernel. Not in training: its gradient is wrong for rows that are masked whole.
        if attention_mask is not None:
            attention_mask = attention_mask.to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
    else:
        weights = query @ key.transpose(2, 3) * scaling
        if attention_mask is not None:
            weights = weights + attention_mask
        out = F.dropout(weights.softmax(-1), dropout) @ value
    return out.transpose(1, 2).contiguous(), None


class FewHeads(torch.autograd.Function):
    """dropout(softmax(q kᵀ + mask)) v, a few heads at a time, so that their weights stay in the
    processor's cache.

    The weights are computed again in the backward pass, for which only random bits are kept. The scale of
    dropout is the caller's, in v. q, k, v (B, H, L, D) float32, mask (B, 1, L, L) or None."""

    @staticmethod
    def weights_of_heads(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> Iterator[tuple]:
        """(heads, their weights (h, L, L)) until all are through. heads: an index into (B, H). All weights
        share one buffer."""
        B, H, L, _ = q.shape
        # 0.6 MB a thread, and one head at least.
        at_once = min(H, 1 + 150_000 * torch.get_num_threads() // L**2)
        buffer = torch.empty(at_once, L, L)
        for row, first in itertools.product(range(B), range(0, H, at_once)):
            heads = (row, slice(first, first + at_once))
            # The last heads of a row may be fewer.
            weights = buffer[:H - first]
            torch.bmm(q[heads], k[heads].transpose(1, 2), out=weights)
            if mask is not None:
                weights += mask[row]
            yield heads, torch.softmax(weights, -1, out=weights)

    @staticmethod
    def forward(ctx, q, k, v, mask, p):
        B, H, L, _ = q.shape
        out = torch.empty_like(v)
        bits = random_bits(torch.Size((B, H, L, L)))
        for heads, weights in FewHeads.weights_of_heads(q, k, mask):
            torch.bmm(weights.mul_(keep_mask(bits[heads], p)), v[heads], out=out[heads])
        ctx.save_for_backward(q, k, v, mask, bits, out)
        ctx.p = p
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, bits, out = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        grad = grad.contiguous()
        # Softmax: d score = weight * (d weight - sum of weight * d weight), and that sum is grad · out.
        row_dot = (grad * out).sum(-1, keepdim=True)
        for heads, weights in FewHeads.weights_of_heads(q, k, mask):
            keep = keep_mask(bits[heads], ctx.p)
            d_score = torch.bmm(grad[heads], v[heads].transpose(1, 2)).mul_(keep)
            d_score.sub_(row_dot[heads]).mul_(weights)
            torch.bmm(d_score, k[heads], out=dq[heads])
            torch.bmm(d_score.transpose(1, 2), q[heads], out=dk[heads])
            torch.bmm(weights.mul_(keep).transpose(1, 2), grad[heads], out=dv[heads])
        return dq, dk, dv, None, None


def random_bits(shape: torch.Size) -> torch.Tensor:
    """Uniform int16 numbers, four from each 64-bit draw."""
    n = shape.numel()
    return torch.empty(-(-n // 4), dtype=torch.int64).random_(-2**63, None).view(torch.int16)[:n].view(shape)


def keep_mask(bits: torch.Tensor, p: float) -> torch.Tensor:
    """1.0 where an element is kept, 0.0 where dropout drops it; faster than a mask of bools."""
    return bits.float().ge_(round(p * 65536) - 32768)
