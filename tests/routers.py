"""Routers as models spell them, each with the specification that says the same."""

from dataclasses import dataclass

import torch
from blocks import Moe
from torch.nn import functional as F

from mok_compile.router import Groups, RouterSpec, Step

K, EXPERTS = 2, 8


@dataclass(frozen=True)
class Case:
    """`spell(logits, correction, scale)` gives (ids, weights) and works on float32 and float64 logits."""

    spec: RouterSpec
    spell: object
    bias: bool = False  # the logits have one


def mixtral(logits, correction, scale):
    weights, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    weights /= weights.sum(dim=-1, keepdim=True)
    return ids, weights


def olmoe(logits, correction, scale):
    weights, ids = torch.topk(F.softmax(logits, dim=-1), K, dim=-1)
    return ids, weights


def gemma4(logits, correction, scale):
    ids, weights = mixtral(logits, correction, scale)
    return ids, weights * scale[ids]


def gpt_oss(logits, correction, scale):
    values, ids = torch.topk(logits, K, dim=-1)
    return ids, F.softmax(values, dim=1)


def llama4(logits, correction, scale):
    values, ids = torch.topk(logits, 1, dim=-1)
    return ids, torch.sigmoid(values)


def ernie(logits, correction, scale):
    scores = F.softmax(logits, dim=1)
    ids = torch.topk(scores + correction[None].squeeze(), K, dim=-1)[1]
    weights = torch.gather(scores, -1, ids)
    return ids, weights / torch.clamp(weights.sum(-1, keepdim=True), min=1e-12)


def deepseek_v3(logits, correction, scale):
    scores = logits.sigmoid()
    choice = scores.view(-1, EXPERTS) + correction.unsqueeze(0)
    group_scores = choice.view(-1, 4, EXPERTS // 4).topk(2, dim=-1)[0].sum(dim=-1)
    groups = torch.topk(group_scores, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores)
    mask.scatter_(1, groups, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
    return ids, weights * 2.5


def deepseek_reference(logits, correction, scale):
    """DeepSeek's own repository: scores seen by groups, and a mask that is true where nothing can be chosen."""
    scores = own = logits.sigmoid()
    scores = (scores + correction).view(-1, 4, EXPERTS // 4)
    groups = scores.topk(2, dim=-1)[0].sum(dim=-1).topk(2, dim=-1)[1]
    mask = scores.new_ones(len(logits), 4, dtype=bool).scatter_(1, groups, False)
    ids = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1).topk(K, dim=-1)[1]
    weights = own.gather(1, ids)
    weights /= weights.sum(dim=-1, keepdim=True)
    weights *= 2.5
    return ids, weights.type_as(logits)


def deepseek_v2(logits, correction, scale):
    scores = logits.softmax(dim=-1)
    group_scores = scores.view(-1, 4, EXPERTS // 4).max(dim=-1).values
    groups = torch.topk(group_scores, k=1, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(group_scores).scatter_(1, groups, 1)
    mask = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
    weights, ids = torch.topk(scores.masked_fill(~mask.bool(), 0.0), k=K, dim=-1, sorted=False)
    return ids, weights * 16.0


def deepseek_v4(logits, correction, scale):
    scores = F.softplus(logits).sqrt()
    ids = torch.topk(scores + correction, K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * 1.5


def dbrx(logits, correction, scale):
    weights, ids = torch.topk(logits.softmax(-1), K, dim=-1)
    return ids, weights / torch.norm(weights, p=1.0, dim=-1, keepdim=True)


def kolibri(logits, correction, scale):
    ids = torch.topk(logits + correction, K, dim=-1)[1]
    return ids, logits.gather(-1, ids).sigmoid()


def softcapped(logits, correction, scale):
    logits = torch.tanh(logits / 3.0) * 3.0
    weights, ids = torch.topk((logits + 0.5).sigmoid(), K, dim=-1)
    return ids, weights


SOFTMAX, SIGMOID, NORMALISED = Step("softmax"), Step("sigmoid"), Step("normalise")
FLOOR = Step("normalise", ("add", 1e-20))
CASES = {
    "mixtral": Case(RouterSpec(K, (SOFTMAX,), (NORMALISED,)), mixtral),
    "olmoe": Case(RouterSpec(K, (SOFTMAX,), ()), olmoe),
    "gemma4": Case(RouterSpec(K, (SOFTMAX,), (NORMALISED, Step("expert_scale"))), gemma4),
    "gpt_oss": Case(RouterSpec(K, (), (SOFTMAX,)), gpt_oss, bias=True),
    "llama4": Case(RouterSpec(1, (), (SIGMOID,)), llama4),
    "ernie": Case(RouterSpec(K, (SOFTMAX,), (Step("normalise", ("clamp", 1e-12)),), corrected=True), ernie),
    "deepseek_v3": Case(
        RouterSpec(
            *(K, (SIGMOID,), (FLOOR, Step("mul", (2.5,)))),
            *(Groups(4, 2, 2, float("-inf")), True, False, False),
        ),
        deepseek_v3,
    ),
    "deepseek_reference": Case(
        RouterSpec(
            *(K, (SIGMOID,), (NORMALISED, Step("mul", (2.5,)))),
            *(Groups(4, 2, 2, float("-inf"), True), True),
        ),
        deepseek_reference,
    ),
    "deepseek_v2": Case(
        RouterSpec(K, (SOFTMAX,), (Step("mul", (16.0,)),), Groups(4, 1, 1, 0.0), masked=True, ordered=False),
        deepseek_v2,
    ),
    "deepseek_v4": Case(
        RouterSpec(*(K, (Step("softplus"), Step("sqrt")), (FLOOR, Step("mul", (1.5,)))), corrected=True, ordered=False),
        deepseek_v4,
    ),
    "dbrx": Case(RouterSpec(K, (SOFTMAX,), (NORMALISED,)), dbrx),
    "kolibri": Case(RouterSpec(K, (), (SIGMOID,), corrected=True), kolibri),
    "softcapped": Case(
        RouterSpec(K, (Step("div", (3.0,)), Step("tanh"), Step("mul", (3.0,)), Step("add", (0.5,)), SIGMOID), ()),
        softcapped,
        bias=True,
    ),
}


class Routed(Moe):
    """A block with one of these routers."""

    def __init__(self, name="mixtral", dtype=torch.float32, experts=EXPERTS, k=K, **kwargs):
        self.case = CASES[name]
        super().__init__(experts=experts, k=self.case.spec.top_k if k == K else k, dtype=dtype, **kwargs)

    def make_weights(self):
        super().make_weights()
        self.bias = self.new(self.num_experts) if self.case.bias else None
        self.register_buffer("correction", self.new(self.num_experts).detach())
        self.scale = self.new(self.num_experts)

    def logits(self, x):
        return F.linear(x, self.gate, self.bias)

    def route(self, x):
        return self.case.spell(self.logits(x), self.correction, self.scale)
