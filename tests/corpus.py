"""MoE blocks in every spelling that is fused, small enough to be compiled by the hundred.

Sizes coincide on purpose (T = S of another block, H = I): then a graph that was changed to mean something else still
runs, and no check of shapes alone can tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import routers
import test_batched
import test_selected
import test_split
import test_user_blocks
import torch
from blocks import (
    Biased,
    Fixed,
    Gathered,
    GptOss,
    Interleaved,
    Moe,
    Normed,
    Sentinel,
    Separate,
    Stack,
    Transposed,
    Ungated,
    routing,
    tokens,
)
from harness import WRITES_RANGES
from routers import Routed
from torch import nn

HIDDEN, EXPERTS, K, TOKENS = 8, 4, 2, 8


@dataclass(frozen=True)
class Case:
    """A block and arguments for it: `make` returns both, the same each time. `tolerance` is what rounding explains."""

    name: str
    make: Callable[[], tuple[nn.Module, tuple]]
    blocks: int = 1
    tolerance: float = 1e-7


class Given:
    """Mixed into a block: ids and weights come from the caller."""

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


class Added(Fixed):
    """Rows are added onto their tokens' rows of zeros, straight from sorted order."""

    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, perm // self.k, rows)


class AddedInPlace(Fixed):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        out = torch.zeros_like(x)
        out.index_add_(0, perm // self.k, rows)
        return out


class Scattered(Fixed):
    def combine(self, x, rows, weights, perm):
        rows = rows * weights.reshape(-1)[perm].unsqueeze(-1)
        token = (perm // self.k).unsqueeze(-1).expand(-1, self.hidden)
        return torch.zeros_like(x).scatter_add(0, token, rows)


class Before(Fixed):
    """Routing weights multiply what goes into the experts."""

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        offsets = self.offsets(sorted_ids)
        rows = self.gather(x, perm) * weights.reshape(-1)[perm].unsqueeze(-1)
        rows = self.project_down(self.activate(self.project_up(rows, sorted_ids, offsets)), sorted_ids, offsets)
        return self.restore(rows, perm).view(-1, self.k, self.hidden).sum(1)


class Searched(Fixed):
    """Sorted by argsort, offsets by searchsorted, the order restored by argsort."""

    def sort(self, ids):
        flat = ids.reshape(-1)
        perm = torch.argsort(flat)
        return flat[perm], perm

    def offsets(self, sorted_ids):
        return torch.searchsorted(sorted_ids, torch.arange(self.num_experts), right=True, out_int32=True)

    def restore(self, rows, perm):
        return rows[torch.argsort(perm)]


class Clamped(Biased, Fixed):
    """Biases picked by clamped ids, rows masked behind them."""

    def experts(self, x, ids, weights):
        sorted_ids, perm = self.sort(ids)
        mask = (sorted_ids >= self.num_experts).unsqueeze(-1)
        offsets = self.offsets(sorted_ids)
        sorted_ids = sorted_ids.clamp(max=self.num_experts - 1)
        rows = self.project_up(self.gather(x, perm), sorted_ids, offsets).masked_fill(mask, 0.0)
        rows = self.project_down(self.activate(rows), sorted_ids, offsets).masked_fill(mask, 0.0)
        return self.combine(x, rows, weights, perm)


class NormedSentinel(Normed, Sentinel):
    """Masked rows go through the norm as zeros."""

    def restore(self, rows, perm):
        return super().restore(self.norm(rows), perm)


class NormedClamped(Normed, Clamped):
    pass


class NormedBefore(Normed, Before):
    def project_down(self, rows, sorted_ids, offsets):
        return self.norm(super().project_down(rows, sorted_ids, offsets))


class NormedInOrder(Normed, Fixed):
    """The norm works on rows that were put back into the order of the slots."""

    def combine(self, x, rows, weights, perm):
        rows = self.norm(self.restore(rows, perm)) * weights.reshape(-1, 1)
        return rows.view(-1, self.k, self.hidden).sum(1)


class WeighedOnGrid(Given, Gathered):
    def weigh(self, out, weights):
        return out.view(-1, self.k, self.hidden) * weights[..., None]


class GatheredSentinel(Given, Gathered):
    """Rows without expert: their ids are clamped to gather some weights, their routing weights are masked."""

    def experts(self, x, ids, weights):
        flat = ids.reshape(-1)
        absent = flat >= self.num_experts
        held = flat.clamp(max=self.num_experts - 1)
        gate, up = self.multiply(self.up, held, self.repeat(x)).chunk(2, -1)
        out = self.multiply(self.down, held, torch.nn.functional.silu(gate) * up)
        scale = weights.reshape(-1).masked_fill(absent, 0.0)
        return (out * scale.unsqueeze(-1)).view(-1, self.k, self.hidden).sum(1)


def given(*bases):
    return type("Given" + bases[0].__name__, (Given, *bases), {})


def small(block, dtype=torch.float64, hidden=HIDDEN, inner=HIDDEN, experts=EXPERTS, k=K, count=TOKENS, absent=False):
    """The arguments of a `Case`: a block of these sizes with ids and weights from outside."""

    def make():
        model = block(hidden, inner, experts, k, dtype)
        ids, weights = routing(count, experts, k, dtype)
        if absent:
            ids[1, 0] = ids[-1] = experts
        return model, (tokens(count, hidden, dtype), ids, weights)

    return make


def routed(*blocks, dtype=torch.float64):
    """The same for blocks in a row, each with its router."""

    def make():
        layers = [block(HIDDEN, HIDDEN, EXPERTS, K, dtype, seed=i) for i, block in enumerate(blocks)]
        return Stack(*layers), (tokens(TOKENS, HIDDEN, dtype),)

    return make


def with_router(name):
    """A block with one of the routers of `routers.py`, of eight experts."""

    def make():
        block = Routed(name, torch.float64, hidden=HIDDEN, inner=HIDDEN)
        return block, (tokens(TOKENS, HIDDEN, torch.float64),)

    return make


class Twice(nn.Module):
    """Two blocks of one model on the same tokens with the same routing."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x, ids, weights, others, other_weights):
        return self.first(x, ids, weights) + self.second(x, others, other_weights)


def twice():
    double = torch.float64
    model = Twice(*(Fixed(HIDDEN, HIDDEN, EXPERTS, K, double, seed=i) for i in range(2)))
    routes = [t for seed in (2, 3) for t in routing(TOKENS, EXPERTS, K, double, seed=seed)]
    return model, (tokens(TOKENS, HIDDEN, double), *routes)


def written(block, shape=None, **how):
    """Blocks as users write them, on tokens alone."""

    def make():
        torch.manual_seed(0)
        model = block(**how)
        count, hidden = (TOKENS, HIDDEN) if isinstance(model, Moe) else (9, test_batched.HIDDEN)
        x = tokens(count, hidden, torch.float64)
        return model, (x if shape is None else x.detach().view(*shape, hidden).requires_grad_(),)

    return make


def hugging_face(family, **settings):
    """The MoE block of the first layer of a model of transformers."""

    def make():
        import hf

        model, _ = hf.make(family, **settings)
        layer = model.model.layers[0]
        block = getattr(layer, "mlp", None) or layer.block_sparse_moe
        return block, (tokens(TOKENS, 32).view(2, TOKENS // 2, 32).detach().requires_grad_(),)

    return make


CASES = [
    Case("grouped", small(Fixed)),
    Case("distinct_sizes", small(Fixed, hidden=16, inner=24, experts=5, k=3, count=14)),
    Case("one_expert_each", small(Fixed, k=1)),
    Case("one_expert", small(Fixed, experts=1, k=1)),
    Case("bfloat16", small(Fixed, dtype=torch.bfloat16), tolerance=4e-2),
    Case("biased", small(given(Biased))),
    Case("interleaved", small(given(Interleaved))),
    Case("transposed", small(given(Transposed))),
    Case("gpt_oss", small(given(GptOss))),
    Case("separate", small(given(Separate))),
    Case("ungated", small(given(Ungated))),
    Case("sentinel", small(Sentinel, absent=True)),
    Case("clamped_bias", small(Clamped, absent=True)),
    Case("added", small(Added)),
    Case("added_in_place", small(AddedInPlace)),
    Case("scattered", small(Scattered)),
    Case("before", small(Before)),
    Case("searched", small(Searched)),
    Case("gathered", small(given(Gathered))),
    Case("gathered_grid", small(WeighedOnGrid)),
    Case("gathered_sentinel", small(GatheredSentinel, absent=True)),
    Case("normed", small(given(Normed, Searched))),
    Case("normed_biased", small(given(Normed, Biased))),
    Case("normed_bfloat16", small(given(Normed, GptOss), dtype=torch.bfloat16), tolerance=4e-2),
    Case("normed_before", small(NormedBefore)),
    Case("normed_in_order", small(NormedInOrder)),
    Case("normed_gathered", small(given(Normed, Gathered))),
    Case("normed_sentinel", small(NormedSentinel, absent=True)),
    Case("normed_clamped_bias", small(NormedClamped, absent=True)),
    Case("normed_one_expert_each", small(given(Normed, Fixed), k=1)),
    Case("routed", routed(Moe)),
    Case("two_layers", routed(Moe, Moe), blocks=2),
    *(Case(f"router_{name}", with_router(name)) for name in ("gpt_oss", "gemma4", "deepseek_v2", "deepseek_v3")),
    Case("two_at_once", twice, blocks=2),
    Case("hf_qwen3_moe", hugging_face("qwen3_moe"), tolerance=1e-4),
    Case("hf_mixtral", hugging_face("mixtral"), tolerance=1e-4),
    Case("hf_deepseek_v3", hugging_face("deepseek_v3"), tolerance=1e-4),
    Case("hf_gpt_oss", hugging_face("gpt_oss"), tolerance=1e-4),
    Case("hf_granitemoe", hugging_face("granitemoe"), tolerance=1e-4),
    *(
        Case(f"router_{name}", written(routers.Routed, name=name, dtype=torch.float64, hidden=HIDDEN, inner=HIDDEN))
        for name in routers.CASES
    ),
    *(
        Case(f"written_{block.__name__}", written(block), tolerance=1e-6)
        for block in (
            *(*test_user_blocks.PICKED, *test_user_blocks.DENSE),
            *(*test_batched.GATHERED, *test_batched.DENSE, test_batched.Llama4),
        )
    ),
    *(Case(f"selected_{b.__name__}", written(b), tolerance=1e-6) for b in test_selected.SELECTED),
    *(Case(f"selected_{b.__name__}", written(b, shape=(3, 3)), tolerance=1e-6) for b in test_selected.TWO_DIMENSIONS),
    Case("hf_batched_mm", hugging_face("qwen3_moe", experts_implementation="batched_mm"), tolerance=1e-4),
    *([Case("ranges", written(test_split.Ranges))] if WRITES_RANGES else []),
    Case("split", written(test_split.Split)),
]
