"""Autocast around and inside the compiled code: dtypes and numbers of eager."""

import pytest
import torch
from blocks import Fixed, Moe, grouped, routing, tokens
from harness import Fused, assert_close, gradients
from loops import Hit
from torch import nn
from torch.nn import functional as F

from mok_compile import explain


class Autocast(Moe):
    """bfloat16 matmuls over float32 weights by autocast, as plain code has it."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def compare(model, fused, *inputs, tolerance):
    wanted, wanted_grads, _ = gradients(model, model, inputs)
    found, found_grads, _ = gradients(model, fused, inputs)
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, tolerance, "output")
    for name, grad in wanted_grads.items():
        if grad is not None:
            assert found_grads[name].dtype == grad.dtype
            assert_close(found_grads[name], grad, tolerance, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast(dtype, inside):
    """The router's matmul runs in bfloat16, the grouped matmuls as they are: routing is fixed to keep both alike."""

    class Block(Fixed):
        def forward(self, x, ids, weights):
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                scale = (x @ self.gate.t()).mean()
                return self.experts(x, ids, weights) * (1 + 0 * scale)

    model = Block(dtype=dtype)
    ids, weights = routing(dtype=dtype)
    fused = Fused(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        compare(model, fused, tokens(dtype=dtype), ids, weights, tolerance=1e-5 if dtype == torch.float32 else 3e-2)
    assert fused.report.fused + fused.report.missed == 1
    assert fused.counts() == (1, 0), fused.report


class MixedInput(Fixed):
    """float32 activations (of a norm under autocast) meet bfloat16 experts, which cast their rows."""

    def project_up(self, rows, sorted_ids, offsets):
        return grouped(rows.to(self.up.dtype), self.up.transpose(1, 2), offsets)

    def project_down(self, rows, sorted_ids, offsets):
        return grouped(rows.to(self.down.dtype), self.down.transpose(1, 2), offsets)


def test_wide_activations_over_narrow_experts():
    model = MixedInput(dtype=torch.bfloat16)
    ids, weights = routing()
    fused = Fused(model)
    compare(model, fused, tokens(), ids, weights, tolerance=3e-2)
    assert fused.counts() == (1, 0), fused.report
    assert [s.out_dtype for s in fused.specs] == ["float32"]


class WideExperts(Fixed):
    """bfloat16 activations over float32 experts."""

    def gather(self, x, perm):
        return super().gather(x, perm).float()


def test_narrow_activations_over_wide_experts():
    model = WideExperts()
    ids, weights = routing()
    fused = Fused(model)
    compare(model, fused, tokens(dtype=torch.bfloat16), ids, weights, tolerance=1e-2)
    assert fused.counts() == (1, 0), fused.report
    assert [s.out_dtype for s in fused.specs] == ["bfloat16"]


def test_float16():
    model = Fixed(dtype=torch.float16)
    ids, weights = routing(dtype=torch.float16)
    fused = Fused(model)
    compare(model, fused, tokens(dtype=torch.float16), ids, weights, tolerance=1e-2)
    assert fused.counts() == (1, 0), fused.report


class Gathered(nn.Module):
    """Matrices that are picked by number, which autocast casts inside of the products."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 8, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(8, 16, 12)), nn.Parameter(torch.randn(8, 12, 16))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        return (self.products(x, self.up[ids], self.down[ids]) * weights[..., None]).sum(1)

    def products(self, x, up, down):
        return torch.einsum("tki,tkih->tkh", F.silu(torch.einsum("th,tkhi->tki", x, up)), down)


class Batched(Gathered):
    def products(self, x, up, down):
        rows = x[:, None].expand(-1, 2, -1).reshape(-1, 1, 16)
        hidden = F.silu(torch.bmm(rows, up.flatten(0, 1)))
        return torch.bmm(hidden, down.flatten(0, 1)).view(-1, 2, 16)


@pytest.mark.parametrize("make", [Gathered, Batched])
def test_products_with_gathered_matrices_say_that_they_are_rounded(make):
    x = torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = explain(make())(x).sites
    assert (site.status, site.reason) == ("missed", "dtype") and "rounded to bfloat16" in site.detail, site
    torch._dynamo.reset()
    assert explain(make())(x).fused == 1


def test_a_router_whose_operands_are_cast_inside_its_product_stays_outside():
    model, x = Hit(), torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = explain(model)(x).sites
        torch._dynamo.reset()
        fused, wanted = Fused(model, fullgraph=False)(x), model(x)
    assert (site.status, site.reason) == ("fused", "router") and "as autocast does" in site.router_detail, site
    assert_close(fused, wanted, 3e-2, "output")


class OnAllTokens(nn.Module):
    """Every expert on every token. `merged`: an adapter is added to the weights where these are used."""

    def __init__(self, merged):
        super().__init__()
        self.gate, self.merged = nn.Linear(16, 4, bias=False), merged
        self.up = nn.ParameterList(torch.randn(12, 16) for _ in range(4))
        self.down = nn.ParameterList(torch.randn(16, 12) for _ in range(4))
        self.a, self.b = nn.Parameter(torch.randn(2, 16)), nn.Parameter(torch.randn(12, 2))

    def forward(self, x):
        weights, ids = self.gate(x).softmax(-1).topk(2)
        table = torch.zeros(len(x), 4).scatter(1, ids, weights.float())
        ups = [up + self.b @ self.a if self.merged else up for up in self.up]
        return sum(F.linear(F.silu(F.linear(x, ups[e])), self.down[e]) * table[:, e, None] for e in range(4))


@pytest.mark.parametrize("merged", [True, False])
def test_matrices_that_are_cast_inside_their_products_are_not_told_as_overwritten(merged):
    model, x = OnAllTokens(merged), torch.randn(9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        (site,) = explain(model)(x).sites
    assert (site.status, site.reason) == ("missed", "dtype") and "as autocast does" in site.detail, site
    torch._dynamo.reset()
    assert explain(model)(x).fused == 1
