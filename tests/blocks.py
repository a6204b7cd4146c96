"""Hand-written MoE blocks, one piece a method, so that a test changes exactly one piece.

Sizes keep H, I, 2I, E, K and T apart from each other, so that no wrong reading of a graph fits by accident.
"""

import torch
import transformers.integrations.moe  # noqa: F401  registers transformers::grouped_mm_fallback
from torch import nn

HIDDEN, INNER, EXPERTS, K, TOKENS = 16, 24, 5, 3, 14


def grouped(rows, weight, offsets):
    """The grouped matmul that a model calls for this dtype: torch's takes bfloat16 only under torch.compile."""
    if weight.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, weight, offs=offsets)
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=offsets)


class Moe(nn.Module):
    """Softmax router, SwiGLU experts with stacked weights [E, 2I, H] and [E, H, I], sorted and put back in order."""

    columns = 2  # columns of the up projection, in units of I

    def __init__(self, hidden=HIDDEN, inner=INNER, experts=EXPERTS, k=K, dtype=torch.float32, seed=0):
        super().__init__()
        self.hidden, self.inner, self.num_experts, self.k = hidden, inner, experts, k
        generator = torch.Generator().manual_seed(seed)
        self.new = lambda *shape, scale=1.0: nn.Parameter((torch.randn(*shape, generator=generator) * scale).to(dtype))
        self.gate = self.new(experts, hidden)
        self.make_weights()
        del self.new

    def make_weights(self):
        self.up = self.new(self.num_experts, self.columns * self.inner, self.hidden, scale=0.5)
        self.down = self.new(self.num_experts, self.hidden, self.inner, scale=0.5)

    def forward(self, x):
        flat = x.reshape(-1, self.hidden)
        ids, weights = self.route(flat)
        return self.experts(flat, ids, weights).view(x.shape)

    def route(self, x):
        scores = torch.softmax(x @ self.gate.t(), -1)
        weights, ids = torch.topk(scores, self.k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        offsets = self.offsets(sorted_ids)
        rows = self.gather(x, perm)
        rows = self.project_up(rows, sorted_ids, offsets)
        rows = self.activate(rows)
        rows = self.project_down(rows, sorted_ids, offsets)
        return self.combine(x, rows, weights, perm)

    def sort(self, ids):
        return torch.sort(ids.reshape(-1))

    def offsets(self, sorted_ids):
        counts = torch.histc(sorted_ids.float(), bins=self.num_experts, min=0, max=self.num_experts - 1)
        return torch.cumsum(counts, 0, dtype=torch.int32)

    def gather(self, x, perm):
        return x[perm // self.k]

    def project_up(self, rows, sorted_ids, offsets):
        return grouped(rows, self.up.transpose(1, 2), offsets)

    def activate(self, h):
        gate, up = h.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows, self.down.transpose(1, 2), offsets)

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1).to(x.dtype)

    def restore(self, rows, perm):
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
        return rows[inverse]


class Fixed(Moe):
    """Takes ids and weights from the caller: no routing flips."""

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


class Biased(Moe):
    """Biases on both projections, picked by the sorted ids and added in place, as Hugging Face does."""

    def make_weights(self):
        super().make_weights()
        self.up_bias = self.new(self.num_experts, self.columns * self.inner)
        self.down_bias = self.new(self.num_experts, self.hidden)

    def project_up(self, rows, sorted_ids, offsets):
        return super().project_up(rows, sorted_ids, offsets).add_(self.up_bias[sorted_ids])

    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(rows, sorted_ids, offsets).add_(self.down_bias[sorted_ids])


class Interleaved(Moe):
    """Gate and up in alternate columns."""

    def activate(self, h):
        return torch.nn.functional.silu(h[..., ::2]) * h[..., 1::2]


class Transposed(Moe):
    """Weights stored as the grouped matmul takes them, [E, H, 2I] and [E, I, H]."""

    def make_weights(self):
        self.up = self.new(self.num_experts, self.hidden, self.columns * self.inner, scale=0.5)
        self.down = self.new(self.num_experts, self.inner, self.hidden, scale=0.5)

    def project_up(self, rows, sorted_ids, offsets):
        return grouped(rows, self.up, offsets)

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows, self.down, offsets)


class GptOss(Transposed, Interleaved):
    """Transposed interleaved weights, biases, clamped swish."""

    def make_weights(self):
        super().make_weights()
        self.up_bias = self.new(self.num_experts, self.columns * self.inner)
        self.down_bias = self.new(self.num_experts, self.hidden)

    def project_up(self, rows, sorted_ids, offsets):
        return super().project_up(rows, sorted_ids, offsets) + self.up_bias[sorted_ids]

    def project_down(self, rows, sorted_ids, offsets):
        return super().project_down(rows, sorted_ids, offsets) + self.down_bias[sorted_ids]

    def activate(self, h):
        gate, up = h[..., ::2], h[..., 1::2]
        gate, up = gate.clamp(max=1.5), up.clamp(min=-1.5, max=1.5)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


class Separate(Moe):
    """Gate and up as two weights and two matmuls."""

    def make_weights(self):
        self.gate_proj = self.new(self.num_experts, self.inner, self.hidden, scale=0.5)
        self.up_proj = self.new(self.num_experts, self.inner, self.hidden, scale=0.5)
        self.down = self.new(self.num_experts, self.hidden, self.inner, scale=0.5)

    def project_up(self, rows, sorted_ids, offsets):
        gate = grouped(rows, self.gate_proj.transpose(1, 2), offsets)
        return gate, grouped(rows, self.up_proj.transpose(1, 2), offsets)

    def activate(self, h):
        return torch.nn.functional.silu(h[0]) * h[1]


class Ungated(Moe):
    """Squared ReLU experts without gate."""

    columns = 1

    def activate(self, h):
        return torch.square(torch.relu(h))


class Sentinel(Moe):
    """Ids at or above E have no expert: masked as transformers does under expert parallelism, in-place ops and all."""

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        rows = x[perm // self.k]
        scale = weights.reshape(-1)[perm]
        offsets = self.offsets(sorted_ids)
        mask = (sorted_ids >= self.num_experts).unsqueeze(-1)
        sorted_ids.clamp_(max=self.num_experts - 1)
        rows.masked_fill_(mask, 0.0)
        rows = self.project_up(rows, sorted_ids, offsets).masked_fill(mask, 0.0)
        rows = self.activate(rows)
        rows = self.project_down(rows, sorted_ids, offsets).masked_fill(mask, 0.0)
        rows = self.restore(rows * scale.unsqueeze(-1), perm)
        return rows.view(-1, self.k, self.hidden).sum(1).to(x.dtype)


class Normed:
    """Mixed into a block: a norm with a weight on each row that the experts give out."""

    def make_weights(self):
        super().make_weights()
        self.scale = self.new(self.hidden, scale=0.1)

    def combine(self, x, rows, weights, perm):
        return super().combine(x, self.norm(rows), weights, perm)

    def weigh(self, out, weights):
        return super().weigh(self.norm(out), weights)

    def norm(self, rows):
        size = rows.float() if rows.dtype == torch.bfloat16 else rows
        size = torch.rsqrt(size.square().mean(-1, keepdim=True) + 1e-5)
        return ((rows * size) * (1.0 + self.scale)).to(rows.dtype)


class Gathered(Moe):
    """batched_mm of transformers: x repeated, W [S, out, in] @ x [S, in, 1]."""

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        rows = self.repeat(x)
        h = self.multiply(self.up, flat, rows)
        gate, up = h.chunk(2, -1)
        out = self.multiply(self.down, self.down_ids(flat), torch.nn.functional.silu(gate) * up)
        return self.weigh(out, weights).view(-1, self.k, self.hidden).sum(1)

    def repeat(self, x):
        return x.repeat_interleave(self.k, dim=0)

    def down_ids(self, flat):
        return flat

    def multiply(self, weight, flat, rows):
        return torch.bmm(weight[flat], rows.unsqueeze(-1)).squeeze(-1)

    def weigh(self, out, weights):
        return out * weights.reshape(-1).unsqueeze(-1)


class Stack(nn.Module):
    """Blocks in a row with residual connections."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def tokens(count=TOKENS, hidden=HIDDEN, dtype=torch.float32, seed=1, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, hidden, generator=generator).to(dtype).requires_grad_(grad)


def routing(count=TOKENS, experts=EXPERTS, k=K, dtype=torch.float32, seed=2, grad=True):
    """Ids (no expert twice for one token) and weights."""
    generator = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(count, experts, generator=generator).topk(k, -1)
    return ids, weights.to(dtype).requires_grad_(grad)
