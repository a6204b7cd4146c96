"""Experts whose outputs go through something else than the weighted sum: fused as far as their own rows."""

from dataclasses import replace

import pytest
import torch
from blocks import HIDDEN, Biased, Fixed, Gathered, GptOss, Interleaved, Moe, Normed, Separate, Ungated, routing, tokens
from corpus import Added, NormedBefore, NormedClamped, NormedInOrder, NormedSentinel, Searched, given
from harness import Fused, assert_close, check_fused, check_open, check_refused, compare
from test_batched import HIDDEN as WIDTH
from test_module_lists import Traced
from test_user_blocks import WhereIndexAdd
from torch.utils.checkpoint import checkpoint

from mok_compile import activation as act
from mok_compile import families
from mok_compile.passes.blocks import site
from mok_compile.passes.facts import rules
from mok_compile.passes.facts.outputs import outputs_of

aten = torch.ops.aten
KINDS = (Fixed, Biased, Interleaved, GptOss, Separate, Ungated, Searched, Added, Gathered)
FORMS = [*(given(Normed, kind) for kind in KINDS), NormedBefore, NormedInOrder]


@pytest.mark.parametrize("block", FORMS, ids=[kind.__name__ for kind in KINDS] + ["before", "in_order"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_norm_behind_the_experts(block, dynamic):
    fused = check_open(block(), tokens(), *routing(), dynamic=dynamic)
    assert fused.targets().count("mok.experts.default") == 1
    assert not any("grouped_mm" in target or "bmm" in target for target in fused.targets())


@pytest.mark.parametrize("block", [NormedSentinel, NormedClamped])
def test_rows_without_expert(block):
    ids, weights = routing()
    ids[0] = ids[3, 1] = 5
    check_open(block(), tokens(), ids, weights)


class Rows(NormedSentinel):
    """Rows without expert are read as they are, zeros."""

    def restore(self, rows, perm):
        return torch.cos(super().restore(rows, perm))


def test_rows_without_expert_are_zero():
    ids, weights = routing()
    ids[2] = 5
    check_open(Rows(), tokens(), ids, weights)


def test_one_expert_a_token_and_no_tokens():
    normed = given(Normed, Fixed)
    check_open(normed(k=1), tokens(), *routing(k=1))
    check_open(normed(), tokens(0), *routing(0))


def test_with_its_router_and_checkpointed():
    class Layer(Normed, Moe):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    fused = check_open(Layer(), tokens())
    (site,) = fused.report.sites
    assert site.subgraph and site.router is None and site.op == "experts"


class Returned(Fixed):
    """The experts' rows go out, besides."""

    def forward(self, x, ids, weights):
        y = super().forward(x, ids, weights)
        return y + self.rows.sum()

    def project_down(self, rows, sorted_ids, offsets):
        self.rows = super().project_down(rows, sorted_ids, offsets)
        return self.rows


class WrittenInto(Fixed):
    def project_down(self, rows, sorted_ids, offsets):
        rows = super().project_down(rows, sorted_ids, offsets)
        rows.mul_(torch.arange(HIDDEN))
        return rows


class Hooked(Fixed):
    """A hook on what the experts give out."""

    def project_down(self, rows, sorted_ids, offsets):
        rows = super().project_down(rows, sorted_ids, offsets)
        rows.register_hook(lambda grad: grad * 2)
        return torch.tanh(rows)


@pytest.mark.parametrize("block", [Returned, WrittenInto])
def test_rows_that_others_read_or_write(block):
    check_open(block(), tokens(), *routing())


def test_hook_on_the_rows_is_not_bypassed():
    block = Hooked()
    compare(block, Fused(block, fullgraph=False), tokens(), *routing())


class Both(Normed, Fixed):
    """Two sets of experts with one routing, a norm behind each."""

    def make_weights(self):
        super().make_weights()
        self.second = self.new(self.num_experts, self.hidden, self.inner)

    def combine(self, x, rows, weights, perm):
        first, second = rows
        return super().combine(x, first, weights, perm) * super().combine(x, second, weights, perm)

    def project_down(self, rows, sorted_ids, offsets):
        first, down = super().project_down(rows, sorted_ids, offsets), self.down
        self.down = self.second
        second = super().project_down(rows, sorted_ids, offsets)
        self.down = down
        return first, second


def test_one_up_projection_for_two():
    """Not one block: the activation is read by both down projections."""
    block = Both()
    fused = Fused(block)
    compare(block, fused, tokens(), *routing())
    assert fused.counts() == (0, 1), fused.report


class Kept(Normed, Fixed):
    def activate(self, h):
        self.kept = super().activate(h)
        return self.kept

    def forward(self, x, ids, weights):
        return super().forward(x, ids, weights) + self.kept.sum()


def test_what_is_inside_is_still_not_to_be_read():
    check_refused(Kept(), tokens(), *routing(), reason="interior-use", detail="is read outside of it")


class OneByOne(WhereIndexAdd):
    """Experts one after the other have no rows of all of them."""

    def add(self, out, x, ids, weights, e, expert):
        return super().add(out, x, ids, weights, e, lambda rows: torch.tanh(expert(rows)))


def test_experts_one_at_a_time():
    check_refused(OneByOne(), torch.randn(9, WIDTH, dtype=torch.float64), reason="post-norm")


def test_a_plain_block_is_fused_whole():
    (site,) = check_fused(Fixed(), tokens(), *routing()).report.sites
    assert not site.combine_detail and site.reason != "post-norm"


def test_lies_are_caught(monkeypatch):
    """By mok.verify: about the activation, and about whose rows they are."""
    model = given(Normed, Fixed)()
    honest = rules.RULES[aten.silu.default]

    def tanh(*args):
        fact = honest(*args)
        return replace(fact, expr=act.unary("tanh", fact.expr.args[0]))

    with monkeypatch.context() as patch:
        patch.setitem(rules.RULES, aten.silu.default, tanh)
        check_refused(model, tokens(), *routing(), reason="verify", detail="relative error")
    monkeypatch.setattr(site, "outputs_of", lambda *args: (replace(o, perm=None) for o in outputs_of(*args)))
    check_refused(model, tokens(), *routing(), reason="verify", detail="relative error")


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("training", [False, True])
def test_muse_spark(implementation, training):
    if "muse_spark" not in families.present():
        pytest.skip("not in this transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = families.make("muse_spark")
    model.train(training).set_experts_implementation(implementation)
    wanted = model(**inputs)[0]
    traced = Traced(model)
    with torch.set_grad_enabled(training):
        found = traced(**inputs)[0]
    assert_close(found[0], wanted[0], 1e-4)
    assert traced.counts() == (2, 0) and all(site.reason == "post-norm" for site in traced.report.sites), traced.report
    if training:
        seed, parameters = torch.randn_like(wanted), [p for p in model.parameters() if p.requires_grad]
        grads = [torch.autograd.grad(y, parameters, seed, allow_unused=True) for y in (found, wanted)]
        for mine, eagers in zip(*grads, strict=True):
            assert (mine is None) == (eagers is None)
            assert mine is None or assert_close(mine, eagers, 1e-3) is None
