"""torchtitan's MoE modules, where that package is installed."""

import pytest
import torch
from harness import Fused, assert_close

pytest.importorskip("torchtitan.models.common.moe", exc_type=ImportError)
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

DIM, INNER, EXPERTS, K = 32, 24, 4, 2


def moe(**router):
    config = MoE.Config(
        num_experts=EXPERTS,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=DIM, hidden_dim=INNER, num_experts=EXPERTS),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=EXPERTS, top_k=K),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=EXPERTS,
            gate=Linear.Config(in_features=DIM, out_features=EXPERTS, bias=False),
            top_k=K,
            **router,
        ),
    )
    model = config.build()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model._init_self_buffers()
    return model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "router",
    [{}, {"score_func": "softmax", "route_norm": True}, {"route_scale": 2.5}],
    ids=["sigmoid", "normalised", "scaled"],
)
@pytest.mark.parametrize("training", [False, True])
def test_fused(router, training):
    model, x = moe(**router).train(training), torch.randn(2, 7, DIM, dtype=torch.bfloat16, requires_grad=training)
    fused = Fused(model)
    with torch.set_grad_enabled(training):
        found, wanted = fused(x), model(x)
        assert fused.counts() == (1, 0), fused.report
        assert fused.report.sites[0].op == "moe", fused.report
        assert_close(found, wanted, 3e-2, "output")
        if training:
            grads = [torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()]) for y in (found, wanted)]
            for a, b in zip(*grads, strict=True):
                assert (a - b).norm() <= 3e-2 * b.norm()
