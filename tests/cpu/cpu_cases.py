"""Inputs for the CPU engine, its answers and the errors of these against the float64 oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from mok_compile import engines
from mok_compile.engines import cpu
from mok_compile.spec import LAYOUTS, ExpertsSpec, dtype_name

ACTIVATIONS = {
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up",
    "geglu_tanh": "gelu_tanh(gate) * up",
    "reglu": "relu(gate) * up",
    "gpt_oss": "clamp(gate, -inf, 7.0) * sigmoid(clamp(gate, -inf, 7.0) * 1.702) * (clamp(up, -7.0, 7.0) + 1.0)",
    "bilinear": "gate * up",
    "odd": "softplus(gate) * tanh(up) + exp(clamp(up, -2.0, 2.0)) * sqrt(square(gate) + 0.5) * -0.25",
    "odder": "erf(gate) * reciprocal(square(up) + 1.0) + rsqrt(square(gate) + square(up) + 0.1) * sigmoid(up)",
}
UNGATED = {"relu2": "square(relu(up))", "gelu": "gelu(up)", "silu": "silu(up)"}
WEIGHTS = ("stacked", "list", "transposed", "odd_bytes", "strided")
ROUTINGS = ("random", "skewed", "one_expert", "sentinels", "none")


@dataclass(frozen=True)
class Case:
    T: int = 17
    H: int = 72
    I: int = 50
    E: int = 5
    K: int = 3
    dtype: torch.dtype = torch.bfloat16
    layout: str = "concat"
    activation: str = ACTIVATIONS["swiglu"]
    weight_on: str = "output"
    bias: bool = False
    weights: str = "stacked"
    routing: str = "random"
    out_dtype: torch.dtype | None = None
    seed: int = 0

    @property
    def spec(self) -> ExpertsSpec:
        return ExpertsSpec(self.activation, self.layout, dtype_name(self.out_dtype or self.dtype), self.weight_on)

    def __str__(self) -> str:
        default = Case()
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return "-".join(f"{k}={v}" for k, v in changed.items() if v != getattr(default, k)).replace(" ", "")


@dataclass
class Inputs:
    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    up_bias: list[torch.Tensor]
    down_bias: list[torch.Tensor]
    dy: torch.Tensor

    def operands(self) -> tuple:
        return self.x, self.ids, self.weights, self.up, self.down, self.up_bias, self.down_bias

    def map(self, f) -> Inputs:
        """f applied to every floating tensor."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return Inputs(
            *([f(t) for t in v] if isinstance(v, list) else f(v) if v.dtype.is_floating_point else v for v in values)
        )

    def tokens(self, index) -> Inputs:
        """The same experts for some of the tokens."""
        pick = {name: getattr(self, name)[index] for name in ("x", "ids", "weights", "dy")}
        return dataclasses.replace(self, **pick)


def route(case: Case, g: torch.Generator) -> torch.Tensor:
    shape = (case.T, case.K)
    if case.routing == "none":
        return torch.full(shape, case.E)
    if case.routing == "one_expert":
        return torch.full(shape, case.E - 1)
    if case.routing == "skewed":
        return (torch.rand(shape, generator=g) ** 4 * case.E).long()
    if case.routing == "sentinels":
        return torch.randint(-2, case.E + 2, shape, generator=g)
    return torch.randint(0, case.E, shape, generator=g)


def arranged(t: torch.Tensor, how: str) -> list[torch.Tensor]:
    """The tensors that hold a stacked weight or bias when a model keeps it in one of the ways of `WEIGHTS`."""
    if how == "list":
        return [part.clone() for part in t]
    if how == "transposed":
        return [t.transpose(1, -1).contiguous().transpose(1, -1)]
    if how == "odd_bytes" and t.numel():
        raw = bytearray(1) + bytearray(t.contiguous().view(torch.uint8).numpy().tobytes())
        return [torch.frombuffer(raw, dtype=t.dtype, offset=1).view(t.shape)]
    if how == "strided":
        return [torch.stack([t, t + 1], -1)[..., 0]]
    return [t]


def make(case: Case) -> Inputs:
    g = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * scale).to(case.dtype)

    T, H, I, E = case.T, case.H, case.I, case.E
    parts, columns = {"separate": (2, I), "single": (1, I)}.get(case.layout, (1, 2 * I))
    up = [arranged(normal(E, columns, H, scale=max(H, 1) ** -0.5), case.weights) for _ in range(parts)]
    up_bias = [arranged(normal(E, columns), case.weights) for _ in range(parts)] if case.bias else []
    return Inputs(
        x=normal(T, H),
        ids=route(case, g),
        weights=torch.rand(T, case.K, generator=g),
        up=[t for part in up for t in part],
        down=arranged(normal(E, H, I, scale=max(I, 1) ** -0.5), case.weights),
        up_bias=[t for part in up_bias for t in part],
        down_bias=arranged(normal(E, H), case.weights) if case.bias else [],
        dy=normal(T, H),
    )


ALL = [True] * 6


def run(engine: str, case: Case, inputs: Inputs, needs: list[bool] = ALL) -> dict[str, torch.Tensor]:
    """The output and the gradients asked for, by name."""
    spec, e = case.spec, engines.get(engine)
    if inputs.x.dtype == torch.float64:
        spec = dataclasses.replace(spec, out_dtype="float64")
    operands = inputs.operands()
    needs = [
        need and not (isinstance(operand, list) and not operand)
        for need, operand in zip(needs, [*operands[:1], *operands[2:]], strict=True)
    ]
    y, h, order, offsets = e.forward(*operands, spec, save=True)
    dy = inputs.dy.to(y.dtype)
    flat = e.backward(dy, *operands, h, order, offsets, spec, needs)
    results = {"y": y, "order": order, "offsets": offsets}
    groups = {"dx": [inputs.x], "dweights": [inputs.weights]}
    groups |= {f"d{name}": getattr(inputs, name) for name in ("up", "down", "up_bias", "down_bias")}
    for (name, tensors), need in zip(groups.items(), needs, strict=True):
        if need:
            grads = [flat.pop(0) for _ in tensors]
            assert all(g.shape == t.shape and g.dtype == t.dtype for g, t in zip(grads, tensors, strict=True)), name
            results[name] = torch.stack(grads)
    assert not flat
    return results


def oracle(case: Case, inputs: Inputs) -> dict[str, torch.Tensor]:
    return run("portable", case, inputs.map(torch.Tensor.double))


def errors(found: torch.Tensor, exact: torch.Tensor) -> dict[str, torch.Tensor]:
    """Relative errors, in the norm, of the whole and of each row and column; infinite where exact zeros are missed.

    A row or column of less than a hundredth of the mean norm counts as one of a hundredth: where an expert has one
    token, a whole column is one activation times dy, and that may happen to be next to nothing.
    """
    if exact.numel() == 0:
        return {}
    views = {"all": (found.double().reshape(1, -1), exact.reshape(1, -1))}
    if exact.dim() >= 2 and min(exact.shape[-2:]) >= 16:
        views["row"] = found.double().flatten(0, -2), exact.flatten(0, -2)
        views["column"] = found.double().transpose(-1, -2).flatten(0, -2), exact.transpose(-1, -2).flatten(0, -2)
    relative = {}
    for name, (f, x) in views.items():
        error, norm = (f - x).norm(dim=-1), x.norm(dim=-1)
        least = norm[norm > 0].mean().nan_to_num(1.0) / 100
        relative[name] = torch.where(norm == 0, torch.where(error == 0, 0.0, torch.inf), error / norm.clamp_min(least))
    return relative


def check(case: Case, inputs: Inputs | None = None, at: list[str] | None = None) -> None:
    """Asserts that the engine, at each of the levels `at` (default: the best), is at most 1.1 times as far from the
    oracle as plain PyTorch in the same dtype (float32: or within 1e-5), in the mean over rows and columns. The single
    worst row is where sums cancel and is a matter of luck: ten times there."""
    inputs = inputs or make(case)
    plain, exact = run("portable", case, inputs), oracle(case, inputs)
    for level in at or [cpu.level()]:
        with at_level(level):
            compare(f"{level} {case}", run("cpu", case, inputs), plain, exact)


def compare(what: str, found: dict, plain: dict, exact: dict) -> None:
    assert torch.equal(found.pop("order"), exact["order"]) and torch.equal(found.pop("offsets"), exact["offsets"])
    for name, tensor in found.items():
        # A few numbers (idle experts have none), each a sum that may cancel, are a matter of luck as well; so is a long
        # and narrow matrix, whose error is that of the few numbers along its short side.
        few = exact[name].count_nonzero() < 200 or (exact[name].dim() >= 2 and min(exact[name].shape[-2:]) < 16)
        dtype = found["dx"].dtype
        slack = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps * (1 if few else 1 / 4)
        ours, theirs = errors(tensor, exact[name]), errors(plain[name], exact[name])
        for view, error in ours.items():
            for kind, factor in (("mean", 1.1), ("max", 10.0)):
                e, bound = (getattr(t, kind)().item() for t in (error, theirs[view]))
                assert e <= factor * bound + slack, f"{what}: {name}, {kind} by {view}: {e:.2e}, plain {bound:.2e}"


@contextlib.contextmanager
def at_level(name: str) -> Iterator[None]:
    """MOK_CPU_ISA set to `name`."""
    before = os.environ.get("MOK_CPU_ISA")
    os.environ["MOK_CPU_ISA"] = name
    try:
        assert cpu.level() == name
        yield
    finally:
        os.environ.pop("MOK_CPU_ISA")
        if before is not None:
            os.environ["MOK_CPU_ISA"] = before


def levels() -> list[str]:
    """The instruction sets of this machine that the engine uses."""
    return list(cpu.LEVELS[: cpu.LEVELS.index(cpu.level()) + 1])


def grid(full: bool) -> list[Case]:
    """Every option with every dtype, and sizes on both sides of each tile boundary; `full` crosses them."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    cases = []
    for dtype in dtypes:
        for layout in LAYOUTS:
            for weight_on in ("output", "input"):
                activation = UNGATED["gelu"] if layout == "single" else ACTIVATIONS["swiglu"]
                for bias in (False, True):
                    for weights in WEIGHTS if full else ("stacked",):
                        cases.append(
                            Case(dtype=dtype, layout=layout, activation=activation, weight_on=weight_on, bias=bias,
                                 weights=weights, routing="sentinels")
                        )  # fmt: skip
        cases += [
            Case(dtype=dtype, weights=w, bias=True, layout=lay) for w in WEIGHTS for lay in LAYOUTS[: 3 if full else 1]
        ]
        cases += [Case(dtype=dtype, activation=a, T=40) for a in ACTIVATIONS.values()]
        cases += [Case(dtype=dtype, activation=a, layout="single", T=40) for a in UNGATED.values()]
        cases += [Case(dtype=dtype, routing=r, T=64) for r in ROUTINGS]
        cases += [Case(dtype=dtype, T=t) for t in (0, 1, 2, 33)]
        cases += [Case(dtype=dtype, out_dtype=out) for out in dtypes]
        cases += [
            Case(dtype=dtype, E=1, K=1), Case(dtype=dtype, K=5), Case(dtype=dtype, E=40, K=2, T=9),
            Case(dtype=dtype, H=0), Case(dtype=dtype, I=0), Case(dtype=dtype, H=1, I=1), Case(dtype=dtype, H=33, I=129),
        ]  # fmt: skip
        if dtype == torch.float16 and not full:
            continue
        cases += [
            Case(dtype=dtype, T=130, H=64, I=64, E=2, K=2), Case(dtype=dtype, T=700, E=1, K=1, H=130, I=66),
            Case(dtype=dtype, T=40, H=1100, I=1061, E=2, K=2, bias=True, weight_on="input"),
            Case(dtype=dtype, T=3, H=1100, I=1061, E=2, K=1, weights="transposed"),
            Case(dtype=dtype, T=24, H=4200, I=20, E=2, K=2), Case(dtype=dtype, T=14, H=40, I=8300, E=2, K=1),
        ]  # fmt: skip
    if full:
        sizes = [(t, h, i) for t in (1, 5, 8, 9, 50, 500) for h in (16, 31, 100, 1030) for i in (2, 48, 65, 520)]
        cases += [Case(T=t, H=h, I=i, dtype=d, bias=True) for t, h, i in sizes for d in dtypes]
    return cases


if __name__ == "__main__":
    # For runs under a sanitizer or on other machines: the small or the full grid at each level.
    chosen = grid(full="full" in sys.argv[1:])
    for case in chosen:
        check(case, at=levels())
    print(f"{len(chosen)} cases right at {', '.join(levels())}")
