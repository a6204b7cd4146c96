"""A mixture of experts the slow way, one token and one expert at a time: what `ExpertsSpec` promises, literally."""

import itertools

import torch

from mok_compile import activation
from mok_compile.spec import ExpertsSpec


def experts(x, ids, weights, up, down, up_bias, down_bias, spec):
    """The op `mok::experts` in float64 with plain autograd; `up`, `down` and the biases as for the op."""
    num_experts = down[0].shape[0] if down[0].dim() == 3 else len(down)
    y = [torch.zeros(x.shape[1], dtype=torch.float64) for _ in range(x.shape[0])]
    for t, k in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        e = int(ids[t, k])
        if not 0 <= e < num_experts:
            continue
        row, weight = x[t].double(), weights[t, k].double()
        if spec.weight_on == "input":
            row, weight = row * weight, 1.0
        h = torch.cat([part @ row for part in matrices(up, e, num_experts)])
        if up_bias:
            h = h + torch.cat(list(matrices(up_bias, e, num_experts)))
        a = activation.evaluate(spec.expr, *halves(h, spec.layout))
        out = next(matrices(down, e, num_experts)) @ a
        if down_bias:
            out = out + next(matrices(down_bias, e, num_experts))
        y[t] = y[t] + weight * out
    return torch.stack(y) if y else x.double()


def matrices(tensors, e, num_experts):
    """What expert `e` owns of a list of stacked tensors, or of lists with one tensor an expert."""
    if len(tensors) % num_experts == 0 and not stacked(tensors, num_experts):
        yield from (tensors[i].double() for i in range(e, len(tensors), num_experts))
    else:
        yield from (t[e].double() for t in tensors)


def stacked(tensors, num_experts):
    return tensors[0].dim() == 3 or (tensors[0].dim() == 2 and len(tensors) <= 2 and tensors[0].shape[0] == num_experts)


def halves(h, layout):
    if layout == "single":
        return None, h
    if layout == "interleaved":
        return h[0::2], h[1::2]
    return h.chunk(2)


class Problem:
    """Random arguments of the op. `lists`: one tensor per expert instead of stacked ones."""

    def __init__(
        self,
        layout="concat",
        activation="silu(gate) * up",
        weight_on="output",
        bias=False,
        lists=False,
        tokens=7,
        hidden=6,
        inner=5,
        experts=4,
        k=2,
        dtype=torch.float64,
        seed=0,
    ):
        self.spec = ExpertsSpec(activation, layout, str(dtype).removeprefix("torch."), weight_on)
        generator = torch.Generator().manual_seed(seed)

        def new(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        columns = inner if layout in ("separate", "single") else 2 * inner
        parts = 2 if layout == "separate" else 1
        self.x = new(tokens, hidden)
        scores = torch.rand(tokens, experts, generator=generator)
        self.ids = scores.topk(min(k, experts), -1)[1]
        self.weights = new(*self.ids.shape)
        if lists:
            self.up = [new(columns, hidden) for _ in range(parts * experts)]
            self.down = [new(hidden, inner) for _ in range(experts)]
            self.up_bias = [new(columns) for _ in range(parts * experts)] if bias else []
            self.down_bias = [new(hidden) for _ in range(experts)] if bias else []
        else:
            self.up = [new(experts, columns, hidden) for _ in range(parts)]
            self.down = [new(experts, hidden, inner)]
            self.up_bias = [new(experts, columns) for _ in range(parts)] if bias else []
            self.down_bias = [new(experts, hidden)] if bias else []

    @property
    def operands(self):
        return [self.x, self.ids, self.weights, self.up, self.down, self.up_bias, self.down_bias]

    @property
    def leaves(self):
        """The tensors that have a gradient, with names."""
        named = {"x": [self.x], "weights": [self.weights], "up": self.up, "down": self.down}
        named |= {"up_bias": self.up_bias, "down_bias": self.down_bias}
        return {f"{name} {i}": t for name, ts in named.items() for i, t in enumerate(ts) if t.requires_grad}

    def call(self, engine="portable"):
        return torch.ops.mok.experts(*self.operands, self.spec.to_json(), engine)

    def op(self, engine="portable"):
        return self.call(engine)[0]

    def naive(self):
        return experts(*self.operands, self.spec)

    def gradients(self, function, dy=None):
        """Output and gradients of `function()` for a fixed gradient of the output."""
        y = function()
        if dy is None:
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(y.dtype)
        grads = torch.autograd.grad(y, list(self.leaves.values()), dy, allow_unused=True)
        return y.detach(), dict(zip(self.leaves, grads, strict=True))
