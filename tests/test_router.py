"""Routers that go into the op with their experts, and those that only look like one."""

import json
import re
from dataclasses import replace

import pytest
import torch
from blocks import Stack
from harness import Fused, assert_close, check_fused, compare
from hf import make, step
from routers import CASES, EXPERTS, K, Routed
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

from mok_compile.passes.blocks import router as router_pass
from mok_compile.passes.fusing import join
from mok_compile.router import Step

TOKENS = 14


def tokens(count=TOKENS, seed=1, grad=True, dtype=torch.float32):
    x = torch.randn(count, 16, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x.requires_grad_(grad)


def tied(count=64):
    """Tokens for `tie`: whole numbers."""
    return torch.randint(0, 2, (count, 16), generator=torch.Generator().manual_seed(2)).float()


def tie(block):
    """Makes most logits equal to others."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        block.gate.copy_(torch.randint(0, 2, block.gate.shape, generator=generator))
        block.correction.copy_(torch.randint(0, 2, block.correction.shape, generator=generator))
        if block.bias is not None:
            block.bias.zero_()
    return block


def check_router(block, *inputs, **kwargs):
    """Fused with its router, with the numbers of eager; the specification."""
    fused = check_fused(block, *inputs, **kwargs)
    (site,) = fused.report.sites
    assert site.router is not None, site.router_detail
    assert (site.op, site.reason) == ("moe", None)
    assert fused.targets().count("mok.moe.default") == 1
    assert not any("experts" in t or "topk" in t or "gather" in t for t in fused.targets()), fused.targets()
    return site.router


def check_unrouted(block, *inputs, detail, **kwargs):
    """Fused without its router, for this reason, with the numbers of eager."""
    fused = check_fused(block, *inputs, **kwargs)
    (site,) = fused.report.sites
    assert (site.op, site.reason, site.router) == ("experts", "router", None), fused.report
    assert detail in site.router_detail
    assert fused.targets().count("mok.experts.default") == 1
    return fused


@pytest.mark.parametrize("name", CASES)
def test_every_router_is_recognised(name):
    # Normalising cancels most of a gradient of the weights: what remains of it is small beside its rounding.
    assert check_router(Routed(name), tokens(), tolerance=3e-4) == CASES[name].spec


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_few_tokens(name, count):
    assert check_router(Routed(name), tokens(count)) == CASES[name].spec


class WithRouting(nn.Module):
    """Returns ids and weights too."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        ids, weights = self.block.route(x)
        return self.block.experts(x, ids, weights), ids, weights


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CASES)
def test_ids_and_weights_are_eagers_to_the_bit(name, training):
    """With many equal logits: torch.topk's own rule decides."""
    model, x = WithRouting(tie(Routed(name))), tied().requires_grad_(training)
    fused = Fused(model)
    with torch.set_grad_enabled(training):
        (y, *wanted), (z, *found) = model(x), fused(x)
    assert [site.op for site in fused.report.sites] == ["moe"], fused.report
    assert torch.equal(y, z) or training  # a training step computes y in another order
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


class AllRouters(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(WithRouting(tie(Routed(name))) for name in CASES)

    def forward(self, x):
        return [block(x) for block in self.blocks]


@pytest.mark.slow
def test_ids_are_eagers_under_inductor():
    """One compile of all routers; ties, and numbers whose score functions Inductor rounds in its own way."""
    torch._dynamo.reset()
    model = AllRouters()
    compiled = torch.compile(model, backend="mok", options={"mok.engine": "portable"})
    with torch.no_grad():
        for x in (tied(), tokens(64, grad=False)):
            for (_, wanted, weights), (_, found, close) in zip(model(x), compiled(x), strict=True):
                assert torch.equal(wanted, found)
                assert_close(close, weights, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_no_more_kernels_than_without(training):
    """In 16 bits Inductor sees the router's functions as before."""

    def kernels(router):
        torch._dynamo.reset()
        options = {"mok.engine": "portable", "mok.router": router}
        compiled = torch.compile(CastScores(dtype=torch.bfloat16), backend="mok", options=options)
        x = tokens(64, dtype=torch.bfloat16, grad=training)

        def run():
            y = compiled(x)
            if training:
                y.sum().backward()

        with torch.set_grad_enabled(training):
            _, codes = run_and_get_code(run)
        calls = (re.findall(r"(?:cpp_fused|extern_kernels|torch\.ops)[\w.]*\(", code) for code in codes)
        return [len(found) for found in calls]

    found, wanted = kernels(True), kernels(False)
    assert found == wanted
    assert len(found) == (2 if training else 1)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "deepseek_v2"])
def test_dynamic_number_of_tokens(name):
    torch._dynamo.reset()
    model = Routed(name)
    fused = Fused(model, dynamic=True)
    for count in (14, 9, 5):
        compare(model, fused, tokens(count), tolerance=5e-5)
    assert len(fused.graphs) == 1
    assert [site.router for site in fused.report.sites] == [CASES[name].spec]


class HighPrecision(Routed):
    """The product in float32, and the weights back in the model's dtype."""

    def logits(self, x):
        return F.linear(x.float(), self.gate.float())

    def route(self, x):
        ids, weights = super().route(x)
        return ids, weights.to(x.dtype)


class CastScores(Routed):
    """The product in the model's dtype, softmax in float32, and the weights back again."""

    def route(self, x):
        scores = F.softmax(self.logits(x), dim=-1, dtype=torch.float)
        weights, ids = torch.topk(scores, self.k, dim=-1)
        weights /= weights.sum(dim=-1, keepdim=True)
        return ids, weights.to(x.dtype)


class LowScores(Routed):
    """Sigmoid in the model's dtype, corrected in float32."""

    def route(self, x):
        scores = self.logits(x).sigmoid()
        ids = torch.topk(scores + self.correction.float(), self.k, dim=-1)[1]
        weights = torch.gather(scores, dim=1, index=ids).type_as(scores)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (HighPrecision, "softmax, top 2, normalised, bfloat16"),
        (CastScores, "float32, softmax, top 2, normalised, bfloat16"),
        (LowScores, "sigmoid, top 2 of score + bias, normalised (sum + 1e-06)"),
    ],
)
def test_casts_of_a_bfloat16_model(block, words):
    torch._dynamo.reset()
    model, x = WithRouting(block(dtype=torch.bfloat16)), tokens(dtype=torch.bfloat16)
    fused = Fused(model)
    (_, *wanted), (_, *found) = model(x), fused(x)
    assert [str(site.router) for site in fused.report.sites] == [words]
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype


class Batched(Routed):
    """The router sees [B, S, H] and its ids go on in other shapes and dtypes."""

    def forward(self, x):
        scores = torch.softmax(x.unflatten(0, (2, -1)) @ self.gate.transpose(0, 1), -1)
        weights, ids = scores.topk(self.k)
        return self.experts(x, ids.int().view(-1, self.k).long(), weights.reshape(-1, self.k, 1).squeeze(-1))


class Stored(Routed):
    """The gate stored [H, E]."""

    def make_weights(self):
        super().make_weights()
        self.gate = nn.Parameter(self.gate.detach().t().contiguous())

    def logits(self, x):
        return x.reshape(2, -1, self.hidden) @ self.gate

    def route(self, x):
        ids, weights = super().route(x)
        return ids.flatten(0, 1), weights.flatten(0, 1)


class SelectedWithoutGrad(Routed):
    """Ids under no_grad, as DeepSeek's code has it."""

    def route(self, x):
        scores = self.logits(x).sigmoid()
        with torch.no_grad():
            ids = torch.topk(scores.detach() + self.correction, self.k, sorted=False).indices
        weights = scores.gather(1, ids)
        return ids, weights * 2 / weights.sum(-1, keepdim=True)


class AllGroups(Routed):
    """As many groups as are chosen: every expert stays, and nothing of it is left."""

    def route(self, x):
        scores = self.logits(x).sigmoid()
        best = scores.view(-1, 2, 4).topk(2, -1)[0].sum(-1)
        mask = torch.zeros_like(best).scatter_(1, best.topk(2, -1, sorted=False)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, 2, 4).reshape(-1, 8)
        ids = torch.topk(scores.masked_fill(mask == 0, 0.0), self.k)[1]
        return ids, scores.gather(1, ids)


class WhereGroups(Routed):
    def route(self, x):
        scores = self.logits(x).softmax(-1)
        best = torch.amax(scores.unflatten(-1, (4, 2)), -1)
        mask = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(3, -1)[1], 1)
        mask = mask.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, 8)
        ids = torch.topk(torch.where(mask, scores, float("-inf")), self.k)[1]
        return ids, scores.gather(1, ids)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Batched, "softmax, top 2"),
        (Stored, "softmax, top 2, normalised"),
        (SelectedWithoutGrad, "sigmoid, top 2 of score + bias"),
        (AllGroups, "sigmoid, top 2"),
        (WhereGroups, "softmax, top 2 within 3 of 4 groups (by their best, others -inf)"),
    ],
)
def test_spellings(block, words):
    if block is SelectedWithoutGrad:  # weights * 2 / sum: the sum is of other numbers than those divided
        check_unrouted(block(), tokens(), detail="no step of a router")
    else:
        assert str(check_router(block(), tokens())) == words


def test_another_input_than_the_experts():
    class TwoInputs(Routed):
        def forward(self, x):
            ids, weights = self.route(x.tanh() * 3)
            return self.experts(x, ids, weights)

    assert check_router(TwoInputs(), tokens()) == CASES["mixtral"].spec


def test_jitter_on_the_input_is_exact():
    """What the router reads is an operand, random or not."""

    class Jitter(Routed):
        def forward(self, x):
            x = x * 1.0
            x *= torch.empty_like(x).uniform_(0.9, 1.1)
            return super().forward(x)

    model, fused, x = Jitter(), Fused(Jitter()), tokens(grad=False)
    torch.manual_seed(5)
    wanted = model(x)
    torch.manual_seed(5)
    assert_close(fused(x), wanted, 1e-6)
    assert [site.op for site in fused.report.sites] == ["moe"]


# Values inside the router that others read


class Reader(Routed):
    """`read` makes an auxiliary output of logits, scores, ids and weights."""

    read = staticmethod(lambda logits, scores, ids, weights: logits)

    def forward(self, x):
        logits = self.logits(x)
        scores = torch.softmax(logits.float(), -1)
        values, ids = torch.topk(scores, self.k, -1)
        weights = values / values.sum(-1, keepdim=True)
        y = self.experts(x, ids, weights)
        return y.sum() + y.square().sum(), self.read(logits, scores, ids, weights)


def balance(logits, scores, ids, weights):
    """The auxiliary loss of Mixtral and its kind."""
    hits = F.one_hot(ids, EXPERTS).float().mean(0)
    return EXPERTS * (hits * logits.softmax(-1).mean(0)).sum()


@pytest.mark.parametrize(
    "read",
    [
        balance,
        lambda logits, scores, ids, weights: logits,
        lambda logits, scores, ids, weights: scores.square() * ids.sum(),
        lambda logits, scores, ids, weights: weights.flatten() * logits.logsumexp(-1).sum(),
        lambda logits, scores, ids, weights: (scores.detach() * logits).sum(),
    ],
    ids=["loss", "logits", "scores", "weights", "detached"],
)
def test_what_others_read_comes_from_the_op_with_its_gradient(read):
    class Model(Reader):
        def forward(self, x):
            loss, extra = super().forward(x)
            return loss + extra.sum()

    Model.read = staticmethod(read)
    fused = check_fused(Model(), tokens(), tolerance=3e-5)
    (site,) = fused.report.sites
    assert site.op == "moe", site.router_detail
    assert fused.targets().count("topk") == 0
    assert sum("linear" in t for t in fused.targets()) == 0


def test_outputs_of_the_graph():
    torch._dynamo.reset()
    model, x = Reader(), tokens()
    fused = Fused(model)
    (_, wanted), (_, found) = model(x), fused(x)
    assert torch.equal(wanted, found)
    assert [site.op for site in fused.report.sites] == ["moe"]


class ReadInside(Reader):
    """A value between the scores and the weights."""

    def forward(self, x):
        scores = torch.softmax(self.logits(x), -1)
        values, ids = torch.topk(scores, self.k, -1)
        weights = values / values.sum(-1, keepdim=True)
        return self.experts(x, ids, weights) * values.sum()


class ReadBefore(Routed):
    """Statistics of the ids that are written before the experts run."""

    def experts(self, x, ids, weights):
        y = super().experts(x * F.one_hot(ids, EXPERTS).float().mean(), ids, weights)
        return y


class Hooked(Routed):
    def logits(self, x):
        logits = super().logits(x)
        logits.register_hook(lambda grad: grad * 2)
        return logits


HOOKS = pytest.mark.skipif(
    torch.__version__ < torch.torch_version.TorchVersion("2.11"), reason="Dynamo breaks the graph at hooks"
)


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (ReadInside, "is read outside of it"),
        (ReadBefore, "before the block ends"),
        pytest.param(Hooked, "does not see into", marks=HOOKS),
    ],
)
def test_readers_that_keep_the_router_outside(block, detail):
    check_unrouted(block(), tokens(), detail=detail, tolerance=2e-5)


def test_scores_that_are_read_where_autocast_changes():
    class Autocast(Reader):
        read = staticmethod(lambda logits, scores, ids, weights: scores.square().sum())

        def forward(self, x):
            loss, extra = super().forward(x)
            with torch.autocast("cpu", torch.bfloat16):
                return loss + extra + torch.softmax(x, -1).sum()

    check_unrouted(Autocast(), tokens(), detail="autocast", tolerance=3e-5)


def test_overwritten_operands_keep_the_router_outside():
    class Overwritten(Routed):
        def forward(self, x):
            seen = x * 1.0
            ids, weights = self.route(seen)
            seen.mul_(2.0)
            return self.experts(x, ids, weights)

    with torch.no_grad():
        check_unrouted(Overwritten(), tokens(grad=False), detail="overwritten")


def test_two_blocks_with_one_router():
    """Both fused; the first one takes what it can without changing what the second one reads."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Routed(seed=0), Routed(seed=1)

        def forward(self, x):
            ids, weights = self.a.route(x)
            return self.b.experts(self.a.experts(x, ids, weights), ids, weights)

    fused = check_fused(Shared(), tokens(), fused=2, tolerance=5e-5)
    assert {site.op for site in fused.report.sites} <= {"moe", "experts"}


def test_layers():
    fused = check_fused(Stack(Routed("mixtral"), Routed("deepseek_v3", seed=1)), tokens(), fused=2, tolerance=1e-4)
    assert [site.router for site in fused.report.sites] == [CASES["mixtral"].spec, CASES["deepseek_v3"].spec]


# What only looks like a router


class Wrong(Routed):
    """`route` of a mixtral-like router with one thing changed."""

    def route(self, x):
        logits = self.logits(x)
        scores = self.score(logits)
        ids = self.choose(scores).topk(self.k, -1)[1]
        return ids, self.weigh(scores, ids)

    def score(self, logits):
        return logits.sigmoid()

    def choose(self, scores):
        return scores + self.correction

    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True)


class WrongDimension(Wrong):
    def score(self, logits):
        return logits.softmax(0)


class BiasedWeights(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores + self.correction, ids)


class OtherScores(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores * 0.5, ids)


class OtherIds(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores, scores.topk(self.k, -1)[1])


class Reversed(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores, ids.flip(-1))


class SumOfAll(Wrong):
    def weigh(self, scores, ids):
        return scores.gather(1, ids) / scores.sum(-1, keepdim=True)


class SumOfColumn(Wrong):
    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / weights.sum(0, keepdim=True)


class OtherNorm(Wrong):
    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / torch.norm(weights, p=2, dim=-1, keepdim=True)


class NormOfLogits(Wrong):
    """The sum of absolute values, of which some are negative."""

    def score(self, logits):
        return logits.tanh()

    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / torch.norm(weights, p=1, dim=-1, keepdim=True)


class SquaredSum(Wrong):
    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / weights.square().sum(-1, keepdim=True)


class DetachedSum(Wrong):
    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        return weights / weights.sum(-1, keepdim=True).detach()


class DetachedEps(Wrong):
    """The sum has a gradient, what keeps it away from zero hands none on."""

    def weigh(self, scores, ids):
        weights = scores.gather(1, ids)
        total = weights.sum(-1, keepdim=True)
        with torch.no_grad():
            total = total + 1e-9
        return weights / total


class DetachedWeights(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores, ids).detach()


class DetachedScores(Wrong):
    def weigh(self, scores, ids):
        return super().weigh(scores.detach(), ids)


class WithoutGrad(Wrong):
    def score(self, logits):
        with torch.no_grad():
            return super().score(logits)


class ViewWithoutGrad(Wrong):
    def weigh(self, scores, ids):
        weights = super().weigh(scores, ids)
        with torch.no_grad():
            return weights.view(-1, 1, self.k).view(-1, self.k)


class ScoresWithoutGrad(Wrong):
    """The whole choice without gradient, and weights from it."""

    def route(self, x):
        with torch.no_grad():
            return super().route(x)


class Smallest(Wrong):
    def choose(self, scores):
        return scores

    def route(self, x):
        scores = self.score(self.logits(x))
        weights, ids = scores.topk(self.k, -1, largest=False)
        return ids, weights


class NoisyLogits(Wrong):
    """Jitter on the logits: random numbers in the middle of the router."""

    def score(self, logits):
        return (logits + torch.zeros_like(logits).uniform_(0, 0)).sigmoid()


class CorrectedByToken(Wrong):
    def choose(self, scores):
        return scores + scores.detach().mean(-1, keepdim=True)


class TwoCorrections(Wrong):
    def choose(self, scores):
        return scores + self.correction + self.correction


class OtherFunction(Wrong):
    def score(self, logits):
        return torch.erf(logits) + 1


class ChosenTwice(Wrong):
    """The weights come from another top-k than the ids."""

    def route(self, x):
        scores = self.score(self.logits(x))
        return scores.topk(self.k, -1)[1], (scores * 2).topk(self.k, -1)[0]


class OtherScale(Wrong):
    """Numbers by expert, but those of the slots before."""

    def weigh(self, scores, ids):
        return super().weigh(scores, ids) * self.scale[ids.roll(1, 0)]


class OtherRows(Wrong):
    """The weights of the token before."""

    def weigh(self, scores, ids):
        return super().weigh(scores, ids).roll(1, 0)


class Groups(Wrong):
    """`judge` and `mask` of a group-limited router."""

    groups = 4

    def choose(self, scores):
        choice = scores + self.correction
        best = self.judge(choice, scores).topk(2, -1, sorted=False)[1]
        mask = torch.zeros(scores.shape[0], self.groups).scatter_(1, best, 1)
        return choice.masked_fill(~self.spread(mask).bool(), float("-inf"))

    def judge(self, choice, scores):
        return choice.view(-1, self.groups, EXPERTS // self.groups).topk(2, -1)[0].sum(-1)

    def spread(self, mask):
        return mask.unsqueeze(-1).expand(-1, -1, EXPERTS // self.groups).reshape(-1, EXPERTS)


class GroupsByOtherScores(Groups):
    def judge(self, choice, scores):
        return super().judge(scores, scores)


class GroupsByMean(Groups):
    def judge(self, choice, scores):
        return choice.view(-1, self.groups, EXPERTS // self.groups).mean(-1)


class GroupsAcross(Groups):
    """Experts 0, 4 are a group, 1, 5 the next one: judged so, masked otherwise."""

    def judge(self, choice, scores):
        return choice.view(-1, EXPERTS // self.groups, self.groups).transpose(1, 2).topk(2, -1)[0].sum(-1)


class MaskAcross(Groups):
    def spread(self, mask):
        return mask.unsqueeze(1).expand(-1, EXPERTS // self.groups, -1).reshape(-1, EXPERTS)


class MaskInverted(Groups):
    def spread(self, mask):
        return 1 - super().spread(mask)


class Seen(Wrong):
    """The scores seen by groups, and a mask with a number for each of them that is true where nothing can be chosen."""

    groups, fill = 4, float("-inf")

    def __init__(self, experts=16):
        super().__init__(experts=experts)

    def choose(self, scores):
        choice = (scores + self.correction).view(len(scores), self.groups, -1)
        chosen = self.judge(choice, scores).topk(2, -1)[1]
        return self.hide(choice, self.mask(choice.new_ones(len(scores), self.groups, dtype=bool), chosen)).flatten(1)

    def judge(self, choice, scores):
        return choice.topk(2, -1)[0].sum(-1)

    def mask(self, ones, chosen):
        return ones.scatter_(1, chosen, False)

    def hide(self, choice, mask):
        return choice.masked_fill_(mask.unsqueeze(-1), self.fill)


class SeenInverted(Seen):
    def mask(self, ones, chosen):
        return torch.zeros_like(ones).scatter_(1, chosen, True)


class SeenTurnedOnce(Seen):
    def hide(self, choice, mask):
        return torch.where(mask.unsqueeze(-1), choice, self.fill)


class SeenTurnedBits(Seen):
    """~0 is -1, which is true, and so is ~1."""

    def mask(self, ones, chosen):
        return (~torch.zeros_like(ones, dtype=torch.int64).scatter_(1, chosen, 1)).bool()


class SeenAllHidden(Seen):
    def mask(self, ones, chosen):
        return ones.scatter_(1, chosen, True)


class SeenHalf(Seen):
    """A half is true as well."""

    def mask(self, ones, chosen):
        return ones.float().scatter_(1, chosen, 0.5).bool()


class SeenNextGroups(Seen):
    def mask(self, ones, chosen):
        return super().mask(ones, (chosen + 1) % self.groups)


class SeenFirstTokens(Seen):
    """Of the last tokens, all groups are hidden."""

    def mask(self, ones, chosen):
        return super().mask(ones, chosen[:5])


class SeenAcross(Seen):
    """As many experts in a group as there are groups: one of each is hidden."""

    def hide(self, choice, mask):
        return choice.masked_fill_(mask.unsqueeze(1), self.fill)


class SeenJudgedAcross(Seen):
    def judge(self, choice, scores):
        return choice.transpose(1, 2).topk(2, -1)[0].sum(-1)


class SeenBestAcross(Seen):
    def judge(self, choice, scores):
        return choice.amax(1)


class SeenByOtherScores(Seen):
    def judge(self, choice, scores):
        return super().judge(scores.view(choice.shape), scores)


class SeenWorst(Seen):
    def judge(self, choice, scores):
        return -super().judge(choice, scores)


class SeenInAnyOrder(Seen):
    """Sums of three in another order may be other numbers."""

    def judge(self, choice, scores):
        return choice.topk(3, -1, sorted=False)[0].sum(-1)


class SeenLeast(Seen):
    """What takes the place of hidden scores depends on the tokens."""

    def hide(self, choice, mask):
        return choice.masked_fill(mask.unsqueeze(-1), choice.min())


class SeenBiased(Seen):
    """The correction is left in the weights."""

    def weigh(self, scores, ids):
        return super().weigh(scores + self.correction, ids)


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (SeenInverted, "in the groups that were chosen"),
        (SeenTurnedOnce, "in the groups that were chosen"),
        (SeenTurnedBits, "something else than groups"),
        (SeenAllHidden, "something else than groups"),
        (SeenHalf, "something else than groups"),
        (SeenNextGroups, "something else than groups"),
        (SeenFirstTokens, "something else than groups"),
        (SeenAcross, "something else than groups"),
        (SeenJudgedAcross, "something else than the scores that they mask"),
        (SeenBestAcross, "judged by aten.amax"),
        (SeenByOtherScores, "something else than the scores that they mask"),
        (SeenWorst, "judged by aten.neg"),
        (SeenInAnyOrder, "judged by aten.sum"),
        (SeenLeast, "not understood"),
        (SeenBiased, "add.Tensor is no step"),
    ],
)
def test_look_alikes_of_groups_that_are_seen(block, detail):
    check_unrouted(block(), tokens(), detail=detail, tolerance=2e-5)


class SeenBest(Seen):
    def judge(self, choice, scores):
        return choice.amax(-1)


class SeenZeros(Seen):
    fill = 0.0


class SeenWithoutNo(Seen):
    """True for those that stay, by two negations."""

    def hide(self, choice, mask):
        return torch.where(~mask.unsqueeze(-1), choice, self.fill)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (Seen, "best 2, others -inf"),
        (SeenBest, "best, others -inf"),
        (SeenZeros, "best 2, others 0"),
        (SeenWithoutNo, "best 2, others -inf"),
    ],
)
def test_groups_that_are_seen(block, words):
    words = f"sigmoid, top 2 of score + bias within 2 of 4 groups (by their {words}), normalised"
    assert str(check_router(block(), tokens(), tolerance=3e-5)) == words


class Hidden(Routed):
    """No correction: what is written into the scores seen by groups is written into the scores."""

    reads = staticmethod(lambda logits, scores, weights: 0.0)

    def forward(self, x):
        logits = self.logits(x)
        scores = own = logits.softmax(-1)
        scores = scores.view(len(x), 4, -1)
        mask = scores.new_ones(len(x), 4, dtype=bool).scatter_(1, scores.amax(-1).topk(2, -1)[1], False)
        ids = scores.masked_fill_(mask.unsqueeze(-1), -1.0).flatten(1).topk(self.k, -1)[1]
        weights = own.gather(1, ids)
        return self.experts(x, ids, weights) + self.reads(logits, own, weights)


class HiddenLogits(Hidden):
    """The scores are the logits themselves."""

    def forward(self, x):
        own = self.logits(x)
        scores = own.view(len(x), 4, -1)
        mask = scores.new_ones(len(x), 4, dtype=bool).scatter_(1, scores.amax(-1).topk(2, -1)[1], False)
        ids = scores.masked_fill_(mask.unsqueeze(-1), -1.0).flatten(1).topk(self.k, -1)[1]
        return self.experts(x, ids, own.gather(1, ids)) + self.reads(own, own, own)


@pytest.mark.parametrize("block", [Hidden, HiddenLogits])
@pytest.mark.parametrize("count", [1, TOKENS])
def test_scores_that_are_hidden_in_place(block, count):
    with torch.no_grad():
        router = check_router(block(), tokens(count, grad=False))
        assert router.masked and router.groups.fill == -1.0 and not router.corrected
        fused = Fused(model := tie(block()))
        assert torch.equal(fused(x := tied()), model(x))


@pytest.mark.parametrize("block", [Hidden, HiddenLogits])
@pytest.mark.parametrize("read", [0, 1, 2], ids=["logits", "scores", "weights"])
def test_readers_of_scores_that_are_hidden_in_place(monkeypatch, block, read):
    """They get what was written, wherever it comes from."""
    monkeypatch.setattr(block, "reads", staticmethod(lambda *values: values[read].sum(-1, keepdim=True)))
    with torch.no_grad():
        for verify in (True, False):
            check_fused(block(), tokens(grad=False), verify=verify)


@pytest.mark.parametrize(
    ("block", "detail"),
    [
        (WrongDimension, "softmax runs over another dimension"),
        (BiasedWeights, "add.Tensor is no step"),
        (OtherScores, "not proven to choose from the scores"),
        (OtherIds, "other ids"),
        (Reversed, "other ids"),
        (SumOfAll, "no step of a router"),
        (SumOfColumn, "no step"),
        (SquaredSum, "no step"),
        (OtherNorm, "no step"),
        (NormOfLogits, "no step"),
        (DetachedSum, "no step"),
        (DetachedEps, "no step"),
        (DetachedWeights, "cut"),
        (DetachedScores, ""),
        (WithoutGrad, "cut"),
        (ViewWithoutGrad, "cut"),
        (ScoresWithoutGrad, ""),
        (Smallest, "largest"),
        (NoisyLogits, "no step"),
        (CorrectedByToken, "not proven to choose from the scores"),
        (TwoCorrections, "not proven to choose from the scores"),
        (OtherFunction, "erf is no step"),
        (ChosenTwice, "two different top-k"),
        (OtherScale, "no step"),
        (OtherRows, "roll"),
        (GroupsByOtherScores, "something else than the scores that they mask"),
        (GroupsByMean, "judged by aten.mean.dim"),
        (GroupsAcross, ""),
        (MaskAcross, "something else than groups"),
        (MaskInverted, "something else than groups"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_look_alikes_are_fused_without_their_router(block, detail):
    check_unrouted(block(), tokens(), detail=detail, tolerance=2e-5)


def test_the_one_that_they_look_like():
    assert str(check_router(Wrong(), tokens())) == "sigmoid, top 2 of score + bias, normalised"
    words = "sigmoid, top 2 of score + bias within 2 of 4 groups (by their best 2, others -inf), normalised"
    assert str(check_router(Groups(), tokens())) == words


def test_ids_from_outside():
    class Given(Routed):
        def forward(self, x, ids):
            return self.experts(x, ids, self.logits(x).softmax(-1).gather(1, ids))

    check_unrouted(Given(), tokens(), torch.randint(0, EXPERTS, (TOKENS, K)), detail="an input of the graph")


# Options, report, verification


def test_option_off():
    fused = check_fused(Routed(), tokens(), router=False)
    (site,) = fused.report.sites
    assert (site.op, site.reason, site.router, site.router_detail) == ("experts", None, None, "")
    assert fused.targets().count("mok.experts.default") == 1


def test_report():
    torch._dynamo.reset()
    fused = check_fused(Stack(Routed(), WrongDimension()), tokens(), fused=2, tolerance=1e-4)
    one, other = json.loads(json.dumps(fused.report.to_dict()["sites"]))
    assert one["op"] == "moe" and one["router"]["scores"] == [{"op": "softmax", "args": []}]
    assert other["op"] == "experts" and other["reason"] == "router" and "softmax" in other["router_detail"]
    text = str(fused.report)
    assert "softmax, top 2, normalised (mok::moe)" in text
    assert "not fused: softmax runs over another dimension" in text


@pytest.mark.parametrize(
    "wrong",
    [
        lambda spec: {"weights": (*spec.weights, Step("mul", (2.0,)))},
        lambda spec: {"scores": (Step("sigmoid"),)},
        lambda spec: {"weights": ()},
    ],
    ids=["scaled", "sigmoid", "not normalised"],
)
def test_verify_catches_a_wrong_router(monkeypatch, wrong):
    honest = router_pass.find

    def lie(block, facts):
        found = honest(block, facts)
        return replace(found, spec=replace(found.spec, **wrong(found.spec)))

    monkeypatch.setattr("mok_compile.passes.fusing.fuse.find", lie)
    torch._dynamo.reset()
    model = Routed()
    fused = Fused(model)
    compare(model, fused, tokens())
    assert fused.reasons == ["verify"]


def test_verify_compares_what_others_read(monkeypatch):
    """The block's result is right; only the scores that somebody else reads would be the logits."""
    monkeypatch.setattr(join, "_output", lambda router, value, node: 0)
    torch._dynamo.reset()

    class Model(Reader):
        read = staticmethod(lambda logits, scores, ids, weights: scores.square().sum())

    fused = Fused(Model())
    fused(tokens())
    assert fused.reasons == ["verify"]
    assert "in scores" in fused.report.sites[0].detail


# Models of Hugging Face


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "granitemoe"])
def test_models(family):
    model, ids = make(family)
    wanted, wanted_grads = step(model, ids)
    fused = Fused(model)
    found, found_grads = step(model, ids, fused)
    assert [site.op for site in fused.report.sites] == ["moe", "moe"], fused.report
    assert_close(found, wanted, 1e-5)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "granitemoe"])
def test_recorded_router_logits(family):
    """The recorders of the model's router modules, and the auxiliary loss that reads what they keep."""
    model, ids = make(family, output_router_logits=True, router_aux_loss_coef=0.1)
    wanted, wanted_grads = step(model, ids)
    fused = Fused(model)
    found, found_grads = step(model, ids, fused)
    assert [site.op for site in fused.report.sites] == ["moe", "moe"], fused.report
    assert_close(found, wanted, 1e-5)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)
    with torch.no_grad():
        torch._dynamo.reset()
        wanted = model(input_ids=ids).router_logits
        found = Fused(model)(input_ids=ids).router_logits
    for a, b in zip(wanted, found, strict=True):
        assert torch.equal(a, b)


def test_checkpointed_model():
    model, ids = make("qwen3_moe")
    wanted, wanted_grads = step(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    fused = Fused(model)
    found, found_grads = step(model, ids, fused)
    assert [site.op for site in fused.report.sites] == ["moe", "moe"], fused.report
    assert_close(found, wanted, 1e-5)
    for name, grad in wanted_grads.items():
        assert_close(found_grads[name], grad, 5e-5, name)
