"""`doctor`: sound about equal layers, frugal with big models, and useful as a check in CI."""

import json
import re
import subprocess
import sys

import pytest
import torch
from blocks import HIDDEN, Moe
from torch import nn

from mok_compile import cli, doctor
from mok_compile.explaining import explain
from mok_compile.report import Site
from mok_compile.spec import ExpertsSpec

transformers = pytest.importorskip("transformers")


class Config:
    def __init__(self, layers, kinds):
        self.num_hidden_layers, self.layer_types, self.other = layers, kinds, 7

    def to_dict(self):
        return vars(self)


class Layer(nn.Module):
    def __init__(self, index, hidden=HIDDEN):
        super().__init__()
        self.layer_idx, self.eps = index, 1e-5
        self.mlp = Moe(hidden=hidden, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.mlp(x)


class Dense(Layer):
    def forward(self, x):
        return torch.tanh(x)


class Model(nn.Module):
    """Layers 0 and 3 are dense, 1, 2, 4 and 5 are equal."""

    def __init__(self):
        super().__init__()
        kinds = ["dense", "moe", "moe", "dense", "moe", "moe"]
        self.config = Config(6, kinds)
        self.layers = nn.ModuleList((Dense if kind == "dense" else Layer)(i) for i, kind in enumerate(kinds))

    def forward(self, x):
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x)
        return x


def subject(**changes):
    model = Model()
    for name, value in changes.items():
        setattr(model.layers[5], name, value)
    with torch.device("meta"):
        x = torch.randn(2, 7, HIDDEN, dtype=torch.bfloat16)
    return doctor.Subject("Model", model.to("meta"), {"x": x})


def test_equal_layers_are_traced_once_and_counted_all():
    result = doctor.examine(subject())
    assert [stack.kinds for stack in result.stacks] == [((0, 3), (1, 2, 4, 5))]
    assert result.report.fused == 4 and result.healthy
    places = sorted(site.location.split()[0] for site in result.report.sites)
    assert [re.match(r"layers\.(\d)", place)[1] for place in places] == ["1", "2", "4", "5"]
    assert "layers.1-2,4-5.mlp (x4)" in str(result.report)


@pytest.mark.parametrize(
    "change",
    [{"eps": 1e-6}, {"training": False}, {"mlp": Moe(dtype=torch.float32)}, {"act": nn.functional.relu}],
    ids=["number", "mode", "dtype", "function"],
)
def test_layers_that_differ_in_anything_are_told_apart(change):
    layers = Model().layers
    for name, value in change.items():
        setattr(layers[5], name, value)
    assert doctor.signature(layers[5], 5) != doctor.signature(layers[4], 4)
    assert doctor.signature(layers[2], 2) == doctor.signature(layers[4], 4)


def test_a_hook_makes_a_layer_different():
    layers = Model().layers
    layers[4].mlp.register_forward_hook(lambda *_: None)
    assert doctor.signature(layers[4], 4) != doctor.signature(layers[5], 5)


def test_the_model_is_put_back():
    given = subject()
    before, settings = given.model.layers, json.dumps(given.model.config.to_dict())
    doctor.examine(given)
    assert given.model.layers is before and len(before) == 6
    assert json.dumps(given.model.config.to_dict()) == settings


def test_a_list_of_experts_is_no_list_of_layers():
    model = nn.Module()
    model.config = Config(4, [])
    model.config.num_experts = 8
    model.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    with doctor.shrunk(model) as stacks:
        assert stacks == [] and len(model.experts) == 8


def test_a_model_that_needs_all_its_layers_is_traced_whole():
    class Whole(Model):
        def forward(self, x):
            if len(self.layers) != 6:
                raise RuntimeError("six layers, please")
            return super().forward(x)

    given = subject()
    given.model.__class__ = Whole
    result = doctor.examine(given)
    assert result.report.fused == 4 and not result.stacks and not result.failure
    assert "traced whole" in result.remarks[0]


def test_memory_formula_is_what_eager_saves():
    """Of Hugging Face's experts in bfloat16, by what autograd really keeps."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    tokens, k, experts, hidden, inner = 512, 4, 8, 64, 32
    config = OlmoeConfig(
        hidden_size=hidden, intermediate_size=inner, num_experts=experts, num_experts_per_tok=k, num_attention_heads=2,
        experts_implementation="grouped_mm",
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    module = OlmoeExperts(config).to(torch.bfloat16)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    ids, weights = torch.rand(tokens, experts).topk(k).indices, torch.rand(tokens, k, dtype=torch.bfloat16)
    weights.requires_grad_()
    report = explain(module, {"mok.engine": "portable"})(x, ids, weights)
    predicted = doctor.saved_bytes(report.sites[0], tokens)

    kept = {}

    def pack(t):
        if t.dtype == torch.bfloat16 and t.untyped_storage().nbytes() >= tokens * k * inner * 2:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes(), t
        return t

    inputs = {t.untyped_storage().data_ptr() for t in (x, weights, *module.parameters())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x, ids, weights)
    measured = sum(size for place, (size, _) in kept.items() if place not in inputs)
    assert y.shape == x.shape and measured == pytest.approx(predicted.eager, rel=0.05)

    h, order, offsets = torch.ops.mok.experts(
        x, ids, weights, [module.gate_up_proj], [module.down_proj], [], [], report.sites[0].spec.to_json(), "portable"
    )[1:]
    assert sum(t.numel() * t.element_size() for t in (h, order, offsets)) == predicted.fused


def test_ungated_blocks_have_no_product():
    problem = doctor.engines.Problem(64, 32, 8, 2, torch.float32, torch.float32, torch.device("cpu"), True)
    site = Site("fused", None, "", "", ExpertsSpec("relu(up)", "single", "float32"), "cpu", problem=problem)
    assert doctor.saved_bytes(site, 10).eager == 20 * (2 * 64 + 32 + 32) * 4


CONFIG = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def run(capsys, *arguments):
    status = cli.main(["doctor", *map(str, arguments)])
    return status, capsys.readouterr()


def test_config_file_folder_and_class(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    for target in ([path], [tmp_path], ["OlmoeForCausalLM", path], ["transformers.OlmoeForCausalLM", tmp_path]):
        status, said = run(capsys, *target, "--require-all")
        assert status == 0 and "model.layers.0-4.mlp.experts (x5)" in said.out
        assert "5 layers of one kind; layer 0 was traced" in said.out


def test_json_for_machines(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    status, said = run(capsys, tmp_path, "--json", "--tokens", 1000)
    found = json.loads(said.out)
    assert status == 0 and found["fused"] == 5 and found["healthy"] and len(found["memory"]) == 5
    assert found["memory"][0]["tokens"] == 1000 and found["stacks"][0]["kinds"] == [[0, 1, 2, 3, 4]]
    assert found["sites"][0]["sizes"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_function_that_misses_fails_the_check(tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from test_dump import Net, Scaled\n"
        "from blocks import HIDDEN, Moe\n"
        "def tiny():\n"
        "    return Net(Moe(), Scaled()), (torch.randn(2, 7, HIDDEN),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    status, said = run(capsys, "mine:tiny", "--require-all", "--dump", tmp_path / "dump")
    assert status == 1 and "activation" in said.out and "make it a function of gate and up alone" in said.out
    assert (tmp_path / "dump" / "index.html").exists()
    assert run(capsys, "mine:tiny")[0] == 0


@pytest.mark.parametrize("target", ["no_such_type", "nowhere/config.json", "os:getcwd", "nowhere:nothing"])
def test_wrong_targets_are_explained(target, capsys):
    status, said = run(capsys, target)
    assert status == 2 and said.err.startswith("doctor: ") and said.out == ""


# The most memory that the process had. Not ru_maxrss: that begins with what its parent has had.
BIG = """
import re, sys
from pathlib import Path
from mok_compile import cli
status = cli.main(["doctor", sys.argv[1], "--json"])
print(int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_trillion_parameters_in_a_minute_and_two_gibibytes(tmp_path):
    config = {"model_type": "deepseek_v3", "n_routed_experts": 400, "num_hidden_layers": 61, "vocab_size": 163840}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-c", BIG, tmp_path], capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(done.stdout)
    assert found["parameters"] > 1e12 and found["fused"] == 58 and found["healthy"]
    assert int(done.stderr.splitlines()[-1]) < 2 * 2**30
    assert found["seconds"] < 60
