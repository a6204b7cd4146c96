"""Runs the passes on what Dynamo captures, without Inductor, and compares with eager."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from mok_compile.backend import transform
from mok_compile.options import Options
from mok_compile.report import Report


def _writes_ranges() -> bool:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        start, end = env.create_unbacked_symint(), env.create_unbacked_symint()
        tensor = torch.empty(9)
        try:
            tensor[start:end] = torch.empty(9)[start:end]
        except GuardOnDataDependentSymNode:
            return False
    return True


# Torch 2.10 and 2.11 break the graph there: https://github.com/pytorch/pytorch/pull/179635
WRITES_RANGES = _writes_ranges()
over_ranges = pytest.mark.skipif(not WRITES_RANGES, reason="this torch traces no a[i:j] = b[i:j] with counted i, j")


class Fused:
    """`model` compiled by our passes alone. `report` adds up the sites of all graphs, `graphs` are these graphs."""

    def __init__(self, model, dynamic=False, fullgraph=True, **options):
        options = {"verify": True, "engine": "portable", **options}
        self.report, self.graphs, self.options = Report(), [], Options(**options)
        self.call = torch.compile(model, backend=self._backend, dynamic=dynamic, fullgraph=fullgraph)

    def _backend(self, gm, inputs):
        self.report.add(transform(gm, inputs, self.options))
        self.graphs.append(gm)
        return gm.forward

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)

    @property
    def reasons(self):
        return [site.reason for site in self.report.sites if site.status == "missed"]

    @property
    def specs(self):
        return [site.spec for site in self.report.sites if site.status == "fused"]

    def counts(self):
        return self.report.fused, self.report.missed

    def targets(self):
        """Names of what the graphs call, in order."""
        return [str(node.target) for gm in self.graphs for node in gm.graph.nodes if node.op.startswith("call")]


def relative_error(found, wanted):
    """The largest error of a row or column, relative to the norm of that row or column (of at least a thousandth of
    the largest one, because sums that cancel leave nothing but rounding)."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert found.dtype == wanted.dtype or wanted.dtype == torch.float64, (found.dtype, wanted.dtype)
    found, wanted = found.detach().double(), wanted.detach().double()
    if wanted.numel() == 0:
        return 0.0
    if wanted.dim() == 0:
        found, wanted = found[None], wanted[None]
    assert torch.isfinite(wanted).all()
    worst = 0.0
    for dim in {-1, -2} if wanted.dim() > 1 else {-1}:
        size, off = wanted.norm(dim=dim), (found - wanted).norm(dim=dim)
        floor = (size.max() * 1e-3).clamp(min=1e-30)
        worst = max(worst, float(torch.nan_to_num(off / size.clamp(min=floor), nan=float("inf")).max()))
    return worst


def assert_close(found, wanted, tolerance=1e-5, what=""):
    error = relative_error(found, wanted)
    assert error <= tolerance, f"{what}: relative error {error:.2e}"


def gradients(model, run, inputs):
    """Output of `run(*inputs)` and the gradients of parameters and inputs for a fixed gradient of the output."""
    inputs = [i.detach().clone().requires_grad_(i.requires_grad) if isinstance(i, torch.Tensor) else i for i in inputs]
    model.zero_grad(set_to_none=True)
    out = run(*inputs)
    grads = {}
    if out.requires_grad:
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
        out.backward(seed)
        grads = {name: p.grad for name, p in model.named_parameters()}
        grads |= {f"input {i}": t.grad for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
    return out.detach(), grads, inputs


def compare(model, fused, *inputs, tolerance=1e-5):
    """Eager against fused: the output, every gradient (and that the same ones exist), and what becomes of inputs."""
    wanted, wanted_grads, left = gradients(model, model, inputs)
    found, found_grads, right = gradients(model, fused, inputs)
    assert found.dtype == wanted.dtype
    assert_close(found, wanted, tolerance, "output")
    for name, grad in wanted_grads.items():
        if grad is None or found_grads[name] is None:
            present = found_grads[name] if grad is None else grad
            assert present is None or not present.any(), f"only one side has a gradient of {name}"
        else:
            assert_close(found_grads[name], grad, tolerance, f"gradient of {name}")
    for a, b in zip(left, right, strict=True):
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b), "an input was changed otherwise than in eager"


def check_fused(model, *inputs, fused=1, missed=0, tolerance=1e-5, **options):
    """`model` is fused, so many blocks, with the numbers of eager."""
    torch._dynamo.reset()
    compiled = Fused(model, **options)
    compare(model, compiled, *inputs, tolerance=tolerance)
    assert compiled.counts() == (fused, missed), compiled.report
    return compiled


def check_refused(model, *inputs, reason, detail="", fused=0, missed=1, **options):
    """`model` is left alone for `reason`, with the numbers of eager: refused by proof, not by mok.verify."""
    torch._dynamo.reset()
    compiled = Fused(model, **options)
    compare(model, compiled, *inputs)
    assert compiled.counts() == (fused, missed), compiled.report
    assert set(compiled.reasons) == {reason}, compiled.report
    assert detail in str(compiled.report), compiled.report
    return compiled


def check_open(model, *inputs, detail="", fused=0, missed=0, **options):
    """The experts of `model` are fused, with the numbers of eager, but not what follows them, which is no weighted sum
    because of `detail`."""
    torch._dynamo.reset()
    compiled = Fused(model, **options)
    compare(model, compiled, *inputs)
    assert compiled.counts() == (fused + 1, missed), compiled.report
    (site,) = (site for site in compiled.report.sites if site.combine_detail)
    assert (site.status, site.reason) == ("fused", "post-norm") and detail in site.combine_detail, compiled.report
    return compiled


def check_stopped(model, *inputs, reason, detail="", **options):
    """Open for the reason "post-norm", refused for any other."""
    how = {} if reason == "post-norm" else {"reason": reason}
    return (check_open if reason == "post-norm" else check_refused)(model, *inputs, detail=detail, **how, **options)


def twin(model):
    return copy.deepcopy(model)
