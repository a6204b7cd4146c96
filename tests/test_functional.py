"""`mok_compile.functional`: forward and backward by hand give what autograd gives."""

import pytest
import torch

from mok_compile import functional as F
from mok_compile.functional import Weights
from mok_compile.spec import ExpertsSpec

T, K, E, H, I = 7, 2, 5, 16, 24
SPEC = ExpertsSpec("silu(gate) * up", "concat", "float32")


def block(bias=False):
    ids = torch.rand(T, E).topk(K).indices
    made = Weights(
        (torch.randn(E, 2 * I, H),),
        (torch.randn(E, H, I),),
        (torch.randn(E, 2 * I),) if bias else (),
        (torch.randn(E, H),) if bias else (),
    )
    return torch.randn(T, H), ids, torch.rand(T, K), made


@pytest.mark.parametrize("bias", [False, True])
def test_by_hand_as_by_autograd(bias):
    x, ids, weights, made = block(bias)
    leaves = [t.requires_grad_() for t in (x, weights, *(t for tensors in made.lists for t in tensors))]
    wanted = F.experts(x, ids, weights, made, SPEC)
    dy = torch.randn_like(wanted)
    wanted.backward(dy)
    y, context = F.forward(x, ids, weights, made, SPEC)
    assert torch.equal(y, wanted) and not y.requires_grad
    for _ in range(2):
        grads = F.backward(dy, context)
        found = [grads.x, grads.weights, *grads.up, *grads.down, *grads.up_bias, *grads.down_bias]
        assert len(found) == len(leaves)
        assert all(torch.equal(a, b.grad) for a, b in zip(found, leaves, strict=True))


def test_only_what_is_asked_for():
    x, ids, weights, made = block()
    _, context = F.forward(x, ids, weights, made, SPEC)
    grads = F.backward(torch.randn(T, H), context, ("down", "x"))
    assert grads.x.shape == (T, H) and grads.down[0].shape == (E, H, I)
    assert grads.weights is grads.up is grads.up_bias is grads.down_bias is None
    with pytest.raises(ValueError, match="gate: not of x, weights"):
        F.backward(torch.randn(T, H), context, ("gate",))


def test_what_does_not_fit_is_named():
    x, ids, weights, made = block()
    with pytest.raises(ValueError, match="ids"):
        F.forward(x, ids[:3], weights, made, SPEC)
    with pytest.raises(ValueError, match=r"experts\.down"):
        F.forward(x, ids, weights, Weights(made.up, ()), SPEC)


def test_the_schedule():
    ids = torch.tensor([[2, 0], [2, -1]])
    plan = F.schedule(ids, 3)
    assert plan.order.tolist() == [1, 0, 2, 3]
    assert plan.offsets.tolist() == [1, 1, 3]


def test_forward_mode_is_refused():
    x, *rest = block()
    for function in (F.experts, F.inference, lambda *operands: F.forward(*operands)[0]):
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            torch.func.jvp(lambda x, function=function: function(x, *rest, SPEC), (x,), (x,))
