"""`torch.compile(model, backend="mok")` as users call it: the entry point, options, modes, and Inductor behind it."""

import copy
import logging
import os
import subprocess
import sys
import textwrap
import types
from dataclasses import fields

import pytest
import torch
from blocks import Fixed, Moe, Stack, routing, tokens
from harness import assert_close, compare
from loops import Hit
from torch import nn
from torch._dynamo.utils import counters

import mok_compile
from mok_compile import backend as backend_module
from mok_compile.backend import mok
from mok_compile.options import Options, split
from mok_compile.report import StrictError

PORTABLE = {"mok.engine": "portable", "mok.verify": True}


def small(**kwargs):
    """A block that Inductor compiles in a second or two."""
    return Moe(**kwargs)


def run_python(code, **env):
    env = {k: v for k, v in os.environ.items() if not k.startswith("MOK_")} | env
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# Options


def test_options_are_split():
    mine, rest = split({"mok.strict": True, "max_autotune": True, "mok.engine": "portable", "trace.enabled": False})
    assert mine == Options(strict=True, engine="portable")
    assert rest == {"max_autotune": True, "trace.enabled": False}
    assert split(None) == (Options(), {})


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_an_option_of_ours_without_its_prefix(name):
    assert not hasattr(torch._inductor.config, name)
    with pytest.raises(ValueError, match=f"unknown option '{name}'; this backend's own is 'mok.{name}'"):
        split({name: True})


def test_inputs_in_the_place_of_options():
    with pytest.raises(TypeError, match=r"got Tensor; inputs go into explain\(model\)\(inputs\)"):
        mok_compile.explain(torch.nn.Identity(), torch.zeros(2))


@pytest.mark.parametrize("key", ["mok.strickt", "mok.", "mok.Strict"])
def test_unknown_option_lists_the_valid_ones(key):
    with pytest.raises(ValueError, match="unknown option") as error:
        split({key: True})
    for name in ("enabled", "strict", "verify", "engine", "router", "dump"):
        assert f"mok.{name}" in str(error.value)
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mok.strict": 1}, "mok.strict must be a bool, got 1"),
        ({"mok.strict": "yes"}, "mok.strict must be a bool"),
        ({"mok.engine": None}, "mok.engine must be a str"),
        ({"mok.dump": True}, "mok.dump must be a str"),
    ],
)
def test_wrong_type_of_an_option(options, message):
    with pytest.raises(TypeError, match=message.replace(".", r"\.")):
        split(options)


def test_unknown_engine_lists_the_valid_ones():
    with pytest.raises(ValueError, match=r"mok\.engine must be one of auto, .*cpu, portable, got 'gpu'"):
        split({"mok.engine": "gpu"})


def test_environment(monkeypatch):
    monkeypatch.setenv("MOK_STRICT", "1")
    monkeypatch.setenv("MOK_ENGINE", "portable")
    monkeypatch.setenv("MOK_VERIFY", "off")
    assert split(None)[0] == Options(strict=True, engine="portable")
    assert split({"mok.strict": False})[0] == Options(engine="portable"), "the explicit option wins"
    monkeypatch.setenv("MOK_STRICT", "perhaps")
    with pytest.raises(ValueError, match="MOK_STRICT must be 0 or 1, got 'perhaps'"):
        split(None)
    monkeypatch.setenv("MOK_STRICT", "0")
    monkeypatch.setenv("MOK_ENGINE", "gpu")
    with pytest.raises(ValueError, match=r"environment variable MOK_ENGINE: .* must be one of auto, .*, got 'gpu'"):
        split(None)


@pytest.mark.parametrize("model", [small, lambda: nn.Sequential(Hit())], ids=["grouped", "loop"])
def test_errors_reach_the_user_of_torch_compile(model):
    """As errors of this backend, not as bugs of Dynamo, at the top; also where a loop asks for the options first."""
    message = r"^backend='mok' raised:\nValueError: unknown option 'mok\.fast'; valid options are mok\.enabled"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(model(), backend="mok", options={"mok.fast": True})(torch.randn(2, 7, 16))


def test_an_instruction_set_that_there_is_none_of(monkeypatch):
    monkeypatch.setenv("MOK_CPU_ISA", "mmx")
    message = r"^backend='mok' raised:\nValueError: MOK_CPU_ISA='mmx' is not one of scalar, avx2"
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        torch.compile(nn.Linear(4, 4), backend="mok")(torch.randn(2, 4))


def test_errors_in_inductors_options_too():
    torch._dynamo.reset()
    with pytest.raises(Exception, match="frobnicate"):
        torch.compile(small(), backend="mok", options={"frobnicate": True})(tokens())
    with pytest.raises(Exception, match="frobnicate"):
        mok_compile.explain(small(), {"frobnicate": True})


def test_mode_and_options_together_are_what_torch_says():
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(small(), backend="mok", mode="max-autotune", options={"mok.strict": True})


class Recorder:
    """Stands in for Inductor: what it is given, and the graph."""

    def __init__(self, monkeypatch):
        self.calls = []

        def compile_fx(gm, inputs, config_patches=None, **kwargs):
            self.calls.append((gm, dict(config_patches or {})))
            return gm.forward

        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)


@pytest.fixture
def inductor(monkeypatch):
    return Recorder(monkeypatch)


def test_inductor_gets_its_own_options_and_modes(inductor):
    post = "post_grad_custom_post_pass"
    x = tokens()
    torch.compile(small(), backend="mok", options={**PORTABLE, "max_autotune": True, "epilogue_fusion": False})(x)
    patches = inductor.calls[-1][1]
    assert patches.pop(post) is not None
    assert patches == {"max_autotune": True, "epilogue_fusion": False}
    torch._dynamo.reset()
    torch.compile(small(), backend="mok", mode="max-autotune-no-cudagraphs")(x)
    patches = inductor.calls[-1][1]
    assert patches.pop(post) is not None
    assert patches == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")


def test_users_own_pass_is_kept(inductor):
    class Mine(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph):
            graph.seen = True

        def uuid(self):
            return "mine"

    torch.compile(small(), backend="mok", options={**PORTABLE, "post_grad_custom_post_pass": Mine()})(tokens())
    installed = inductor.calls[-1][1]["post_grad_custom_post_pass"]
    assert installed.uuid()[1:] == ("mine",)
    graph = torch.fx.Graph()
    installed(graph)
    assert graph.seen


def test_a_pass_without_identity_is_not_cached(inductor):
    torch.compile(small(), backend="mok", options={"post_grad_custom_post_pass": lambda graph: None})(tokens())
    assert inductor.calls[-1][1]["post_grad_custom_post_pass"].uuid() is None


def test_graph_without_moe_goes_on_as_it_came(inductor):
    """The same graph object and not one more setting than under Inductor."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    torch.compile(model, backend="mok", options={"mok.strict": True})(torch.randn(2, 4))
    torch._dynamo.reset()
    torch.compile(model, backend="inductor")(torch.randn(2, 4))
    (mine, patches), (plain, plain_patches) = inductor.calls
    assert patches == plain_patches == {}
    assert str(mine.graph) == str(plain.graph)
    assert not counters["mok"]


def test_disabled(inductor, monkeypatch):
    """Exactly Inductor, without a look at the graph."""
    monkeypatch.setattr(backend_module, "fuse", lambda *args: pytest.fail("the passes ran"))
    torch.compile(small(), backend="mok", options={"mok.enabled": False})(tokens())
    gm, patches = inductor.calls[-1]
    assert patches == {}
    assert not any("mok" in str(n.target) for n in gm.graph.nodes)
    assert not counters["mok"]


def test_salt_depends_on_the_options_but_not_on_the_dump_folder():
    from mok_compile.cache import salt

    assert salt(Options()) == salt(Options()) == salt(Options(dump="/tmp/x"))
    assert len({salt(Options()), salt(Options(engine="portable")), salt(Options(verify=True))}) == 3


# Reports


class Broken(Moe):
    def activate(self, h):
        return super().activate(h) * self.gate.sum()


def test_strict(inductor):
    with pytest.raises(Exception, match="a block was left unfused") as error:
        torch.compile(Broken(), backend="mok", options={"mok.strict": True})(tokens())
    assert "activation" in str(error.value)
    assert isinstance(error.value.__cause__ or error.value, StrictError) or "StrictError" in repr(error.value)
    torch._dynamo.reset()
    torch.compile(small(), backend="mok", options={"mok.strict": True})(tokens())


def test_counters(inductor):
    torch.compile(Stack(Moe(), Broken()), backend="mok", options=PORTABLE)(tokens())
    assert dict(counters["mok"]) == {"found": 2, "fused": 1, "missed": 1, "missed:activation": 1}
    torch.compile(small(), backend="mok", options=PORTABLE)(tokens())
    assert counters["mok"]["found"] == 3


def test_one_line_for_each_graph(inductor, caplog):
    with caplog.at_level(logging.INFO, "mok_compile"):
        torch.compile(Stack(Moe(), Moe(), Broken()), backend="mok", options=PORTABLE)(tokens())
        torch.compile(nn.Linear(16, 4), backend="mok")(tokens())
    lines = [r.message for r in caplog.records if r.name == "mok_compile" and r.levelno == logging.INFO]
    assert lines == ["3 MoE blocks: 2 fused (portable), 1 missed (activation)"]


def test_explain():
    import mok_compile

    model, x = Stack(Moe(), Broken()), tokens()
    report = mok_compile.explain(model, {"mok.engine": "portable"})(x)
    assert (report.fused, report.missed) == (1, 1)
    assert [s.status for s in report.sites] == ["fused", "missed"]
    assert report.sites[0].engine == "portable"
    assert report.sites[1].reason == "activation"
    assert "from elsewhere" in report.sites[1].detail
    assert "MISSED" in str(report)
    assert report.to_dict()["fused"] == 1
    assert "grouped_mm" in report.graphs[0].before
    assert "mok.moe" in report.graphs[0].after
    assert mok_compile.explain(nn.Linear(16, 4))(x).sites == []


# Processes


def test_found_without_import_and_imports_little():
    out = run_python(
        """
        import sys, torch
        assert not [m for m in sys.modules if m.startswith("mok_compile")]
        compiled = torch.compile(torch.nn.Linear(3, 3), backend="mok", options={"mok.enabled": False})
        assert "mok_compile" in sys.modules
        assert "transformers" not in sys.modules
        assert "mok" in torch._dynamo.list_backends(exclude_tags=())
        print("found")
        """
    )
    assert out == "found"


def test_environment_variables_reach_the_backend():
    out = run_python(
        f"""
        import sys
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import torch
        import torch._inductor.compile_fx
        from blocks import Moe, tokens
        from torch._dynamo.utils import counters
        torch._inductor.compile_fx.compile_fx = lambda gm, inputs, config_patches=None, **kw: gm.forward
        torch.compile(Moe(), backend="mok")(tokens())
        print(dict(counters["mok"]))
        """,
        MOK_ENABLED="0",
    )
    assert out == "{}"


# For real


def test_training_and_inference_through_inductor():
    """Training, then no_grad, inference_mode, eval and training again, with weights changed in between."""
    model, x = small(), tokens()
    compiled = torch.compile(model, backend="mok", options=PORTABLE, fullgraph=True)
    compare(model, compiled, x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(compiled(x), model(x))
    model.eval()
    compare(model, compiled, x)
    model.train()
    with torch.no_grad():
        model.up.mul_(0.5)
    compare(model, compiled, x)
    other = small(seed=7)
    model.load_state_dict(other.state_dict())
    compare(model, compiled, x)
    model.down.data = small(seed=8).down.data.clone()
    compare(model, compiled, x)
    assert counters["mok"]["missed"] == 0
    assert counters["mok"]["fused"] == counters["mok"]["found"] > 0
    # Accumulation onto gradients that are there.
    model.zero_grad()
    for _ in range(3):
        compiled(x).sum().backward()
    accumulated = model.up.grad.clone()
    model.zero_grad()
    compiled(x).sum().backward()
    assert_close(accumulated, 3 * model.up.grad)


def test_wrappers_in_cpp():
    """Inductor writes an op's text arguments into C++ source as they are."""
    model, x = small(), tokens()
    compare(model, torch.compile(model, backend="mok", options={**PORTABLE, "cpp_wrapper": True}), x)
    assert counters["mok"]["fused"] == counters["mok"]["found"] == 1


def test_saved_outputs_are_dropped_where_nobody_reads_them():
    model, x = small(), tokens(grad=False)
    compiled = torch.compile(model, backend="mok", options=PORTABLE)
    with torch.no_grad(), torch.profiler.profile() as profile:
        compiled(x)
    names = {event.name for event in profile.events()}
    assert "mok::experts_infer_no_grad" in names
    compiled(tokens()).sum().backward()
    with torch.profiler.profile() as profile:
        compiled(tokens()).sum().backward()
    names = {event.name for event in profile.events()}
    assert {"mok::experts_no_grad", "mok::experts_backward_no_grad"} <= names
    assert not any(name.startswith("mok::experts_infer") for name in names)
    assert not names & {"mok::experts", "mok::experts_backward"}  # which would ask for a derivative at each call


def test_dynamic_shapes_compile_at_most_two_graphs_and_one_for_a_single_token():
    model = small()
    compiled = torch.compile(model, backend="mok", options=PORTABLE)
    for count in (14, 5, 2, 31):
        compare(model, compiled, tokens(count))
    assert counters["mok"]["found"] <= 2
    compare(model, compiled, tokens(1))
    assert counters["mok"]["found"] <= 3
    assert counters["mok"]["fused"] == counters["mok"]["found"]


def test_reduce_overhead_and_reset():
    model = Fixed()
    (ids, weights), x = routing(), tokens()
    compiled = torch.compile(model, backend="mok", mode="reduce-overhead")
    compare(model, compiled, x, ids, weights)
    mok.reset()
    compare(model, compiled, x, ids, weights)
    assert counters["mok"]["fused"] == 1


def test_reset_forgets_cuda_graphs_and_imports_nothing(monkeypatch):
    calls = []
    trees = types.SimpleNamespace(reset_cudagraph_trees=lambda: calls.append(1))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    mok.reset()
    assert calls == [1]
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees")
    before = set(sys.modules)
    mok.reset()
    assert set(sys.modules) == before


def test_compiled_in_place_layer_by_layer():
    """`layer.compile(backend="mok")`: names, copies and pickles stay as they were."""
    model, x = Stack(small(seed=0), small(seed=1)), tokens()
    keys, plain = list(model.state_dict()), copy.deepcopy(model)
    for layer in model.blocks:
        layer.compile(backend="mok", options=PORTABLE)
    wanted = plain(x)
    assert_close(model(x), wanted)
    assert counters["mok"]["fused"] in (1, 2)
    assert counters["mok"]["missed"] == 0
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == keys
    assert_close(twin(x), wanted)


def test_frozen_experts_and_frozen_router():
    x = tokens()
    for frozen in (("up", "down"), ("gate",)):
        torch._dynamo.reset()
        model = small()
        for name in frozen:
            getattr(model, name).requires_grad_(False)
        compiled = torch.compile(model, backend="mok", options=PORTABLE)
        compare(model, compiled, x)
        for name in frozen:
            assert getattr(model, name).grad is None
    assert counters["mok"]["missed"] == 0
