"""Loops over experts that ask or change what the proof has only stand-ins for: they are left alone, or are right."""

import itertools
import random
import warnings
from warnings import warn

import pytest
import torch
from harness import compare
from loops import E, H, I, K, Mlp, Plain, Ranged
from test_module_lists import LOOP, Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F

from mok_compile import explain

SOURCE = """
import random
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from loops import E, Mlp, Ranged


class Changed(Ranged):
    def moe(self, x, ids, weights):
        {before}
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where({mask})
            if t.numel() == 0:
                {idle}
                continue
            expert = self.experts[e]
            {turn}
            out = expert(x[t]) * {weight}
            {last}
            y.index_add_(0, t, out)
        return y
"""
PLAIN = {"before": "", "mask": "ids == e", "idle": "", "turn": "", "weight": "weights[t, k, None]", "last": ""}
ROWS = """
import torch
from loops import E, Ranged


class Changed(Ranged):
    def moe(self, x, ids, weights):
        flat, share = ids.view(-1), weights.view(-1, 1)
        order = flat.argsort()
        counts = torch.bincount(flat, minlength={least})
        y = torch.zeros_like(x)
        tokens = order // self.top_k
        start = 0
        for i, count in enumerate(counts.cpu().numpy()):
            end = start + count
            if {skip}:
                start = end
                continue
            mine = tokens[start:end]
            y.index_add_(0, mine, self.experts[i](x[mine]) * share[order[start:end]] * {scale})
            start = end
        return y
"""
SORTED = {"least": "E", "skip": "start == end", "scale": "1"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Makes a module of `source`, from a file, since the loop is read from its source."""
    numbers = itertools.count()

    def make(source, **parts):
        name = f"{tmp_path.name}_{next(numbers)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source.format(**parts))
        return __import__(name).Changed()

    monkeypatch.syspath_prepend(str(tmp_path))
    return make


def fused(block, *inputs, **options):
    """How many loops of `block` are, by proof alone; the numbers are those of eager."""
    traced = Traced(block, **{"verify": False, **options})
    for x in inputs or (tokens(2, 9), tokens(1, 1)):
        compare(block, traced, x, tolerance=5e-5)
    return sum(site.detail == LOOP for site in traced.report.sites if site.status == "fused")


def test_sources(written):
    assert fused(written(SOURCE, **PLAIN)) and fused(written(ROWS, **SORTED))


@pytest.mark.parametrize(
    "parts",
    [
        {"skip": "start > 5"},
        {"skip": "start == end or start > 5"},
        {"skip": "5 < start"},
        {"skip": "start == end or not start"},
        {"scale": "(2 if start else 1)"},
        {"scale": "(2 if min(start, 5) == 5 else 1)"},
        {"least": "2"},
    ],
)
def test_places_of_sorted_rows(written, parts):
    """Their own numbers, and how many experts there are at least, are nothing that a proof knows."""
    assert not fused(written(ROWS, **SORTED | parts))


@pytest.mark.parametrize(
    "parts",
    [
        {"last": "out = out * 2 if isinstance(e, object) else out"},
        {"last": "out = out * 2 if type(e) is int else out"},
        {"last": "out = out * 2 if getattr(expert, 'gate_proj', None) is not None else out"},
        {"last": "out = out * 2 if hasattr(expert, 'gate_proj') else out"},
        {"last": "out = out if hasattr(e, 'shape') else out * 2"},
        {"last": "out = out * 2 if out.requires_grad else out"},
        {"last": "out = out if x.grad_fn is None else out * 2"},
    ],
)
def test_kinds_and_attributes(written, parts):
    assert not fused(written(SOURCE, **PLAIN | parts))


@pytest.mark.parametrize(
    "asked",
    [
        *(
            "type(out) is torch.Tensor",
            "type(x) in (torch.Tensor,)",
            "type(expert) is Mlp",
            "type(self).__name__ != ''",
        ),
        *(
            "type(x) is not nn.Parameter",
            "type(self.gate.weight) == nn.Parameter",
            "type(self.experts) is nn.ModuleList",
        ),
    ],
)
def test_types_that_the_loop_asks_for(written, asked):
    """Are those of what stands for them."""
    assert fused(written(SOURCE, **PLAIN | {"last": f"out = out * 2 if {asked} else out"}))


@pytest.mark.parametrize("asked", ["type(e) is int", "out.__class__ is torch.Tensor", "list(map(type, [e])) == [int]"])
def test_types_that_nothing_stands_for(written, asked):
    assert not fused(written(SOURCE, **PLAIN | {"last": f"out = out * 2 if {asked} else out"}))


def is_plain(tensor):
    return type(tensor) is torch.Tensor


class Named(Plain):
    def named(self):
        return f"Named {type(self).__name__}"


class Asking(Named):
    """Experts that do one thing with a tensor, and another one with what stands for it."""

    asks = staticmethod(lambda self, x: type(x) is torch.Tensor)

    def named(self):
        return super().named() if type(self) is Asking else ""

    def forward(self, x):
        return self.fc2((F.gelu if self.asks(self, x) else F.relu)(self.fc1(x)))


ASKED = {
    "is": lambda self, x: type(x) is torch.Tensor,
    "is not": lambda self, x: not (type(x) is not torch.Tensor),
    "equal": lambda self, x: type(x) == torch.Tensor,  # noqa: E721
    "name": lambda self, x: type(x).__name__ == "Tensor",
    "parameter": lambda self, x: type(self.fc1.weight) is nn.Parameter,
    "class": lambda self, x: x.__class__ is torch.Tensor,
    "by name": lambda self, x: getattr(x, "__class__") is torch.Tensor,  # noqa: B009
    "elsewhere": lambda self, x: is_plain(x),
    "mapped": lambda self, x: list(map(type, [x])) == [torch.Tensor],
    "inside": lambda self, x: all(type(t) is torch.Tensor for t in (x,)),
    "fake mode": lambda self, x: not hasattr(x, "fake_mode"),
    "fake": lambda self, x: not isinstance(x, torch._subclasses.FakeTensor),
    "printed": lambda self, x: "Fake" not in repr(x),
    "formatted": lambda self, x: "Fake" not in f"{x}",
}


@pytest.mark.parametrize("asked", ASKED)
def test_experts_that_ask_for_the_type_of_a_tensor(monkeypatch, asked):
    """They get an answer of their own in a proof, so that nothing is proven."""
    monkeypatch.setattr(Asking, "asks", staticmethod(ASKED[asked]))
    block = Ranged([Asking() for _ in range(E)])
    assert not fused(block)
    (site,) = [site for site in explain(block)(tokens(2, 9)).sites if site.status == "missed"]
    wanted = "prints a tensor" if asked in ("printed", "formatted") else "asks for the type of something"
    wanted = "a fake one" if asked.startswith("fake") else wanted
    assert site.reason == "data-dependent" and wanted in site.detail, site


def _warn(message):
    warnings.warn(message, stacklevel=2)


SPEAKING = {
    "print": lambda self, x: print("expert") is None,
    "warn": lambda self, x: warnings.warn("expert", stacklevel=2) is None,
    "imported": lambda self, x: warn("expert", stacklevel=1) is None,
    "elsewhere": lambda self, x: _warn("expert") is None,
}


@pytest.mark.filterwarnings("ignore:expert")
@pytest.mark.parametrize("says", SPEAKING)
def test_experts_that_print_or_warn(monkeypatch, says, capsys):
    """One op for all would not."""
    monkeypatch.setattr(Asking, "asks", staticmethod(SPEAKING[says]))
    block = Ranged([Asking() for _ in range(E)])
    assert not fused(block)
    capsys.readouterr()
    (site,) = [site for site in explain(block)(tokens(2, 9)).sites if site.status == "missed"]
    wanted = "the loop calls print," if says == "print" else "the loop calls warn,"
    assert site.reason == "mutation" and wanted in site.detail, site


def test_experts_that_could_print_are_fused(monkeypatch):
    def asks(self, x):
        if len(x.shape) > 5:
            print("unexpected")
        return True

    monkeypatch.setattr(Asking, "asks", staticmethod(asks))
    assert fused(Ranged([Asking() for _ in range(E)]))


@pytest.mark.parametrize(
    "asked",
    [
        lambda self, x: isinstance(x, torch.Tensor) and isinstance(self.fc1.weight, nn.Parameter),
        lambda self, x: type(self).__name__ == "Asking" and self.__class__ is Asking,
        lambda self, x: x.type() == "torch.FloatTensor" and x.type(torch.float32) is not None,
        lambda self, x: self.named() == "Named Asking",
    ],
)
def test_what_experts_may_ask(monkeypatch, asked):
    monkeypatch.setattr(Asking, "asks", staticmethod(asked))
    assert fused(Ranged([Asking() for _ in range(E)]))


@pytest.mark.parametrize("kind", ["expert, Mlp", "self.experts, nn.ModuleList", "self, Ranged"])
def test_kinds_of_modules(written, kind):
    """Are those of what stands for them."""
    assert fused(written(SOURCE, **PLAIN | {"last": f"out = out * 2 if isinstance({kind}) else out"}))


@pytest.mark.parametrize("skipped", ["isinstance(expert, nn.Identity)", "not expert"])
def test_experts_that_are_skipped_for_their_kind(written, skipped):
    block = written(SOURCE, **PLAIN | {"turn": f"if {skipped}:\n                continue"})
    block.experts[-1] = nn.Identity() if "Identity" in skipped else nn.Sequential()
    assert fused(block)


@pytest.mark.parametrize(
    "parts",
    [
        {"idle": "self.seen.add_(1)"},
        {"last": "self.seen.add_(1)"},
        {"before": "mask = F.one_hot(ids, E).permute(2, 0, 1)", "mask": "mask[e]", "last": "mask.mul_(0)"},
        {"before": "mask = F.one_hot(ids, E).permute(2, 0, 1)", "mask": "mask[e]", "idle": "mask.mul_(0)"},
    ],
)
def test_tensors_that_are_written_into(written, parts):
    block = written(SOURCE, **PLAIN | parts)
    block.register_buffer("seen", torch.zeros(()))
    block(tokens(1, 1))
    once = block.seen.clone()
    assert not fused(block, tokens(1, 1))
    assert block.seen == 3 * once  # twice in eager mode, once compiled


@pytest.mark.parametrize(
    ("drawn", "source"),
    [
        ("next(self.source)", lambda: itertools.cycle([0, 1, 1])),
        ("self.source.random() < 0.5", lambda: random.Random(0)),
        ("self.source.random() < 0.5", lambda: __import__("numpy").random.default_rng(0)),
        ("np.random.rand() < 0.5", lambda: __import__("numpy").random.seed(0)),
    ],
)
def test_draws(written, drawn, source):
    block = written(SOURCE, **PLAIN | {"last": f"out = out * 2 if {drawn} else out"})
    block.source = source()
    wanted = block(tokens(2, 9))
    block.source = source()
    traced = Traced(block, verify=False)
    assert torch.allclose(traced(tokens(2, 9)), wanted, atol=1e-5)
    assert not any(site.detail == LOOP for site in traced.report.sites if site.status == "fused"), traced.report


class OneRow(Mlp):
    """Does something else with one row, which it tells by a dimension that is gone."""

    def forward(self, x):
        y = self.squeezed(super().forward(x))
        return y * 2 if y.dim() == 1 else y

    def squeezed(self, y):
        return y.squeeze()


class OneRowOfThese(OneRow):
    def squeezed(self, y):
        return y.squeeze(0)


class Learnt(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if isinstance(self.up_proj.weight, nn.Parameter) else y


@pytest.mark.parametrize("make", [OneRow, OneRowOfThese, Learnt])
def test_experts_that_ask(make):
    assert not fused(Ranged([make() for _ in range(E)]))


class Half(Ranged):
    """A size that may be one, though the one that it is half of may not."""

    def forward(self, x):
        x = x[: x.shape[0] // 2]
        weights, ids = self.gate(x).softmax(-1).topk(K, dim=-1)
        return self.moe(x, ids, weights)

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            out = self.experts[e](x[t]) * weights[t, k, None]
            if x.shape[0] < 2:
                out = out * 2
            y.index_add_(0, t, out)
        return y


def test_sizes_that_may_be_one():
    fused(Half(), tokens(9), tokens(7), tokens(3), tokens(2), dynamic=True)


class OtherOrder(Ranged):
    """Places in the order of slots before tokens, outputs in that of tokens before slots."""

    def forward(self, x):
        y = torch.zeros_like(x)
        ids = self.gate(x).topk(K, dim=-1)[1]
        for e in range(self.num_experts):
            mask = ids == e
            b, _, t = torch.where(mask.transpose(1, 2))
            batch, length, _ = torch.where(mask)
            y[batch, length] += self.experts[e](x[b, t])
        return y


def test_places_in_another_order():
    assert not fused(OtherOrder(), tokens(2, 9))


class OntoWeight(Ranged):
    """What is added up is an expert's own weight, which later turns read."""

    @torch.no_grad()
    def moe(self, x, ids, weights):
        y = self.experts[-1].fc1.weight
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y.clone()


class OntoBuffer(Ranged):
    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.ones(I, H))

    @torch.no_grad()
    def moe(self, x, ids, weights):
        y = self.kept[:]
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](self.kept[t]) * weights[t, k, None])
        return y.clone()


@pytest.mark.parametrize("make", [lambda: OntoWeight([Plain() for _ in range(E)]), OntoBuffer])
def test_what_is_added_onto_is_read_by_another_name(make):
    block, plain = make(), make()
    plain.load_state_dict(block.state_dict())
    traced = Traced(block, verify=False)
    with torch.no_grad():
        assert torch.allclose(traced(tokens(1, I)), plain(tokens(1, I)), atol=1e-5)


class Moved(nn.Module):
    """Something is added behind dropout, which does not drop it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(H, I, bias=False), nn.Linear(I, H, bias=False)
        self.bias = nn.Parameter(torch.full((H,), 100.0))

    def forward(self, x):
        return F.dropout(self.down(F.relu(self.up(x))), 0.9) + self.bias


def test_a_bias_behind_dropout():
    block = Ranged([Moved() for _ in range(E)])
    assert Traced(block, verify=False)(tokens(2, 9)).min() > 10
