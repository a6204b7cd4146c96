"""Autocast around and inside the compiled code: dtypes and numbers of eager."""

import pytest
import torch
from blocks import Fixed, Moe, grouped, routing, tokens
from harness import Fused, assert_close, gradients


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
