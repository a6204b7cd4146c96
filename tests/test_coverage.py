"""`doctor --zoo`: what it counts, what it says of a miss, and that look-alikes are no blocks."""

import json

import pytest
import torch
from blocks import Moe, tokens
from torch import nn

from mok_compile import activation as act
from mok_compile import cli, coverage, families
from mok_compile.coverage import SETTINGS, Setting
from mok_compile.passes.facts import rules

pytest.importorskip("transformers")


class Experts(Moe):
    def forward(self, x):
        return super().forward(x)


class Scaled(Experts):
    """The activation is scaled by a tensor from elsewhere: nothing that is fused."""

    def activate(self, h):
        return super().activate(h) * self.gate.sum()


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return x + self.experts(x)


class Tiny(nn.Module):
    """Two layers, of which the second is fused; a third is never called."""

    def __init__(self, dtype):
        super().__init__()
        kinds = (Scaled, Experts, Experts)
        self.layers = nn.ModuleList(Layer(kind(dtype=dtype, seed=i)) for i, kind in enumerate(kinds))

    def forward(self, x):
        return self.layers[1](self.layers[0](x))

    def gradient_checkpointing_enable(self, how):
        first = self.layers[0].forward
        self.layers[0].forward = lambda x: torch.utils.checkpoint.checkpoint(first, x, **how)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(families, "make", lambda name, dtype: (Tiny(dtype), {"x": tokens(dtype=dtype, grad=False)}))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_blocks_that_run_are_counted(tiny, setting):
    found = coverage.cell("tiny", setting)
    assert (found.fused, found.blocks, found.complete) == (1, 2, False)
    assert [why.partition(":")[0] for why in found.why] == ["activation"]


def test_blocks_that_verify_withdraws_do_not_count(tiny, monkeypatch):
    monkeypatch.setattr(
        rules.act, "unary", lambda name, x, honest=act.unary: honest("tanh" if name == "silu" else name, x)
    )
    found = coverage.cell("tiny", SETTINGS[0])
    assert found.fused == 0 and any(why.startswith("verify") for why in found.why)


def test_settings_that_a_model_does_not_have(tiny, monkeypatch):
    def refuse(self, how):
        raise ValueError("does not support gradient checkpointing")

    monkeypatch.setattr(Tiny, "gradient_checkpointing_enable", refuse)
    (checkpointed,) = (setting for setting in SETTINGS if setting.checkpointed)
    found = coverage.cell("tiny", checkpointed)
    assert found.complete and str(found) == "–" and not found.why


def test_models_that_do_not_run_when_checkpointed(tiny, monkeypatch):
    """In eager mode either: nothing that a compiler could help."""

    def break_it(self, how):
        self.layers[0].forward = lambda x: x.expand(2)

    monkeypatch.setattr(Tiny, "gradient_checkpointing_enable", break_it)
    (checkpointed,) = (setting for setting in SETTINGS if setting.checkpointed)
    found = coverage.cell("tiny", checkpointed)
    assert str(found) == "does not run" and found.why[0].startswith("error: RuntimeError")


class Contained(nn.Module):
    """Experts in a container that is not called itself; one token goes to each."""

    def __init__(self, container):
        super().__init__()
        experts = {f"expert_{i}": nn.Linear(4, 4) for i in range(2)}
        self.experts = nn.ModuleDict(experts) if container is nn.ModuleDict else nn.ModuleList(experts.values())

    def forward(self, x):
        return torch.cat([expert(row) for row, expert in zip(x.split(1), self.experts.children(), strict=True)])


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict])
def test_experts_in_a_container_count_as_a_block(monkeypatch, container):
    monkeypatch.setattr(families, "make", lambda name, dtype: (Contained(container), {"x": torch.randn(2, 4)}))
    found = coverage.cell("contained", SETTINGS[0])
    assert (found.fused, found.blocks) == (0, 1) and found.why[0].startswith("no-match: "), found


def test_models_without_experts_are_told(monkeypatch):
    monkeypatch.setattr(families, "make", lambda name, dtype: (nn.Linear(4, 4), {"input": torch.randn(2, 4)}))
    found = coverage.cell("dense", SETTINGS[0])
    assert str(found) == "does not run" and found.why == ("error: no module with experts was called",)


def test_models_that_fail_are_told(monkeypatch):
    def broken(name, dtype):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(families, "make", broken)
    found = coverage.cell("broken", SETTINGS[0])
    assert str(found) == "does not run" and found.why == ("error: RuntimeError: no such luck",)


def test_table_and_json(tiny, monkeypatch, capsys):
    monkeypatch.setattr(families, "present", lambda: ["tiny"])
    monkeypatch.setattr(coverage, "SETTINGS", SETTINGS[:1])
    assert cli.main(["doctor", "--zoo", "--require-all"]) == 1
    said = capsys.readouterr().out
    assert "| tiny | 1/2 |" in said and "- tiny: activation: " in said and "0 of 1 families" in said
    assert cli.main(["doctor", "--zoo", "tiny", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    rows = coverage.from_dict(stored)
    assert rows["tiny"]["inference"].fused == 1 and coverage.codes(rows["tiny"]) == ["activation"]
    assert json.loads(json.dumps(coverage.to_dict(rows))) == stored
    for wrong in (["doctor"], ["doctor", "mixtral", "--zoo"], ["doctor", "--zoo", "nothing"]):
        assert cli.main(wrong) == 2
        assert capsys.readouterr().err.startswith("doctor: ")


def test_every_family_builds_and_has_blocks():
    names = families.present()
    assert len(names) > 25 and "mixtral" in names
    for name in ("mixtral", "gpt_oss", "deepseek_v3"):
        model, inputs = families.make(name)
        assert len(families.blocks_of(model)) == families.LAYERS
        with torch.no_grad():
            assert torch.isfinite(model(**inputs).logits).all()
    with pytest.raises(ValueError, match="has no nothing"):
        monkeypatched = dict(families.FAMILIES, nothing=families.Family("Nothing"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(families, "FAMILIES", monkeypatched)
            families.make("nothing")


@pytest.mark.parametrize("name", ["doge", "vitpose_backbone"])
def test_look_alikes_stay_as_they_are(name):
    if name not in families.present(routed=False):
        pytest.skip("not in this transformers")
    try:
        families.make(name)[0](**families.make(name)[1])
    except TypeError:
        pytest.skip("broken in this transformers")
    found = coverage.cell(name, Setting("inference"))
    assert found.fused == 0 and found.blocks and not any(why.startswith("error") for why in found.why)
