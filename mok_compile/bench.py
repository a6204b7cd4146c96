"""A benchmark that fits this machine: one MoE block under eager mode, Inductor and this backend, side by side.

The three run in turns within each repetition, so that a busy or throttled machine slows all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mok_compile.spec import dtype_name

WAYS = ("eager", "inductor", "mok")


@dataclass(frozen=True)
class Shape:
    """Sizes of a block, legend in `mok_compile.spec`."""

    name: str
    hidden: int
    inner: int
    experts: int
    k: int
    tokens: tuple[int, ...]
    dtype: torch.dtype


# A block that a machine without GPU runs in milliseconds, and that of Qwen3-30B-A3B.
ON_CPU = Shape("a small block", 512, 256, 32, 4, (1, 64, 512), torch.bfloat16)
ON_GPU = Shape("a block of Qwen3-30B-A3B", 2048, 768, 128, 8, (1, 128, 2048, 16384), torch.bfloat16)


@dataclass(frozen=True)
class Result:
    """Median seconds by way; `error` is the relative difference of the fused output from the eager one."""

    tokens: int
    what: str
    seconds: dict[str, float]
    error: float


class Block(nn.Module):
    """Softmax router and SwiGLU experts, spelled as Hugging Face's grouped_mm experts are."""

    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()

        def new(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*size, device=device, dtype=shape.dtype) * size[-1] ** -0.5)

        self.k, self.experts = shape.k, shape.experts
        self.gate = new(shape.experts, shape.hidden)
        self.up = new(shape.experts, 2 * shape.inner, shape.hidden)
        self.down = new(shape.experts, shape.hidden, shape.inner)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.gate.t()).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.logits(x), -1)
        weights, ids = scores.topk(self.k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        sorted_ids, order = torch.sort(ids.reshape(-1))
        counted = sorted_ids.float() if x.device.type == "cpu" else sorted_ids.int()
        counts = torch.histc(counted, bins=self.experts, min=0, max=self.experts - 1)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        h = torch._grouped_mm(x[order // self.k], self.up.transpose(1, 2), offs=offsets)
        rows = torch._grouped_mm(self.activate(*h.chunk(2, -1)), self.down.transpose(1, 2), offs=offsets)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return rows[inverse].view(-1, self.k, x.shape[-1]).sum(1)

    def activate(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up


def run(
    device: str | None = None, repetitions: int = 10, progress: Callable[[int, int, str], None] = lambda *a: None
) -> tuple[Shape, list[Result]]:
    """Runs everything; `progress` is told (done, of how many, what comes next)."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = ON_GPU if device.startswith("cuda") else ON_CPU
    torch.manual_seed(0)
    block = Block(shape, device)
    jobs = [(tokens, what) for tokens in shape.tokens for what in ("forward", "forward+backward")]
    results = []
    for done, (tokens, what) in enumerate(jobs):
        progress(done, len(jobs), f"{tokens} tokens, {what}")
        x = torch.randn(tokens, shape.hidden, device=device, dtype=shape.dtype, requires_grad=what != "forward")
        torch._dynamo.reset()  # one graph for each job: Dynamo counts them by the code of `forward`
        ways = {
            "eager": block,
            "inductor": torch.compile(block, dynamic=False),
            "mok": torch.compile(block, backend="mok", dynamic=False),
        }
        calls = {way: _call(model, block, x, what) for way, model in ways.items()}
        outputs = {way: call() for way, call in calls.items()}  # compiles
        seconds = {way: [] for way in calls}
        for _ in range(repetitions):
            for way, call in calls.items():
                seconds[way].append(_time(call, device))
        wanted, found = (outputs[way].detach().double() for way in ("eager", "mok"))
        error = float((found - wanted).norm() / wanted.norm())
        results.append(Result(tokens, what, {w: statistics.median(s) for w, s in seconds.items()}, error))
    progress(len(jobs), len(jobs), "")
    return shape, results


def _call(model: Callable, block: nn.Module, x: torch.Tensor, what: str) -> Callable[[], torch.Tensor]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    def both() -> torch.Tensor:
        block.zero_grad(set_to_none=True)
        x.grad = None
        y = model(x)
        y.sum().backward()
        return y

    return forward if what == "forward" else both


def _time(call: Callable, device: str) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def text(shape: Shape, results: list[Result]) -> str:
    """The comparison table."""
    sizes = (
        f"H {shape.hidden}, I {shape.inner}, {shape.experts} experts, {shape.k} per token, {dtype_name(shape.dtype)}"
    )
    lines = [f"{shape.name}: {sizes}; median milliseconds"]
    lines.append(f"{'tokens':>7}  {'':17}{''.join(f'{way:>11}' for way in WAYS)}{'speed-up':>11}{'error':>10}")
    for r in results:
        times = "".join(f"{r.seconds[way] * 1e3:11.3f}" for way in WAYS)
        gain = r.seconds["inductor"] / r.seconds["mok"]
        lines.append(f"{r.tokens:7}  {r.what:17}{times}{gain:10.2f}x{r.error:10.1e}")
    lines.append("speed-up: over inductor; error: relative difference of the output from eager mode's")
    return "\n".join(lines)
