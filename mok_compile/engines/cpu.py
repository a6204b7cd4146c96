"""The CPU engine: fused kernels in C++ (csrc/cpu) for whatever instruction set this machine has."""

from __future__ import annotations

import functools
import math
import os

import torch

from mok_compile import build
from mok_compile.activation import Expr, Value
from mok_compile.engines import Problem, get, warn_once
from mok_compile.engines.buffers import pool
from mok_compile.spec import LAYOUTS, ExpertsSpec

# Instruction sets, in the order of `Level` in csrc/cpu/block.h. MOK_CPU_ISA names the highest one to use.
LEVELS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
# Operations in the order of `Op` there.
OPS = (
    *("gate", "up", "constant", "add", "mul", "clamp", "sigmoid", "silu", "gelu", "gelu_tanh", "relu", "square"),
    *("tanh", "exp", "erf", "softplus", "sqrt", "rsqrt", "reciprocal"),
)
MAX_STACK = 12
TILE_COLUMNS = 64  # kColumns there
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Cpu:
    name = "cpu"

    def usable(self) -> str | None:
        try:
            wanted_level()
        except ValueError as error:
            return str(error)
        return build.unavailable("cpu")

    def supports(self, spec: ExpertsSpec, problem: Problem) -> str | None:
        if problem.device.type != "cpu":
            return f"it runs on the CPU, not on {problem.device.type}"
        if problem.dtype not in DTYPES:
            return f"it has no kernels for {problem.dtype}"
        if problem.weights_dtype not in DTYPES or spec.dtype not in DTYPES:
            return "routing weights and output must be bfloat16, float16 or float32"
        program = _program(spec.expr)
        if isinstance(program, str):
            return program
        return _not_built()

    def forward(self, x, ids, weights, up, down, up_bias, down_bias, spec, *, save):
        ops = _ops()
        if ops is None:
            return get("portable").forward(x, ids, weights, up, down, up_bias, down_bias, spec, save=save)
        slots, inner = ids.numel(), down[0].shape[-1]
        num_experts = down[0].shape[0] if down[0].dim() == 3 else len(down)
        y = torch.empty(x.shape, dtype=spec.dtype)
        columns = 2 * inner if spec.gated else inner
        h = pool.empty_strided((slots if save else 0, columns), (columns, 1), x.dtype)
        order, offsets = torch.empty(slots, dtype=torch.int32), torch.empty(num_experts, dtype=torch.int32)
        a = pool.empty_strided((slots, inner), (inner, 1), x.dtype)
        operands = (x.contiguous(), ids.contiguous(), weights.float().contiguous(), up, down, up_bias, down_bias)
        ops.forward(*operands, y, h, order, offsets, a, save, *_how(spec))
        return y, h, order, offsets

    def backward(self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs):
        ops = _ops()
        if ops is None:
            return get("portable").backward(
                dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs
            )
        slots, hidden, inner = ids.numel(), x.shape[1], down[0].shape[-1]
        need_x, need_weights, need_up, need_down, *_ = needs
        lists = ((up, need_up), (down, need_down), (up_bias, needs[4]), (down_bias, needs[5]))
        grads = [torch.empty(x.shape, dtype=x.dtype)] if need_x else []
        grads += [torch.empty(weights.shape, dtype=torch.float32)] if need_weights else []
        grads += [pool.empty_like(t) for tensors, need in lists if need for t in tensors]
        parts = -(-(inner if spec.weight_on == "output" else hidden) // TILE_COLUMNS) if need_weights else 0
        working = (
            pool.empty_like(h),
            pool.empty_strided((slots if need_down else 0, inner), (inner, 1), x.dtype),
            torch.empty(parts, slots, dtype=torch.float32),
        )
        operands = (x.contiguous(), ids.contiguous(), weights.float().contiguous(), up, down, up_bias, down_bias)
        dy = dy.to(x.dtype).contiguous()
        ops.backward(dy, *operands, h, order, offsets, *working, grads, [int(n) for n in needs], *_how(spec))
        if need_weights:
            grads[int(need_x)] = grads[int(need_x)].to(weights.dtype)
        return grads

    def row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if _ops() is not None else dtype

    def combine(self, rows, order, ids, weights, num_experts, spec):
        ops = _ops()
        if ops is None:
            return get("portable").combine(rows, order, ids, weights, num_experts, spec)
        y = torch.empty(ids.shape[0], rows.shape[1], dtype=spec.dtype)
        order, offsets = torch.empty(ids.numel(), dtype=torch.int32), torch.empty(num_experts, dtype=torch.int32)
        operands = (rows.contiguous(), ids.contiguous(), weights.float().contiguous(), y, order, offsets)
        ops.combine(*operands, spec.weight_on == "input", wanted_level())
        return y


def _not_built() -> str | None:
    """Why the library cannot be had, which a warning says too; None if it can."""
    reason = build.failure("cpu")
    if reason is not None:
        warn_once(f"mok-compile: no cpu kernels, the portable engine runs instead: {reason}")
    return reason


def _ops():
    """The library's ops, or None where it cannot be had: a graph compiled elsewhere may be run here."""
    return torch.ops.mok_cpu if _not_built() is None else None


def level() -> str:
    """The instruction set in use: the best that this machine has, or a lower one named by MOK_CPU_ISA."""
    build.load("cpu")
    return LEVELS[min(wanted_level(), torch.ops.mok_cpu.best_level())]


def wanted_level() -> int:
    """The number of the highest instruction set to use. ValueError where MOK_CPU_ISA names none."""
    name = os.environ.get("MOK_CPU_ISA") or LEVELS[-1]
    if name not in LEVELS:
        raise ValueError(f"MOK_CPU_ISA={name!r} is not one of {', '.join(LEVELS)}")
    return LEVELS.index(name)


def _how(spec: ExpertsSpec) -> tuple:
    operations, limits = _program(spec.expr)
    return LAYOUTS.index(spec.layout), spec.weight_on == "input", operations, limits, wanted_level()


@functools.lru_cache(maxsize=256)
def _program(expr: Expr) -> tuple[list[int], list[float]] | str:
    """`expr` in postfix order for the kernels' stack machine: operations and two numbers for each. A sentence if the
    machine cannot run it."""
    operations, limits = [], []
    depth = 0

    def visit(value: Value, below: int) -> None:
        nonlocal depth
        depth = max(depth, below + 1)
        if not isinstance(value, Expr):
            emit("constant", value)
            return
        operands = value.args[:1] if value.op == "clamp" else value.args
        for i, operand in enumerate(operands):
            visit(operand, below + i)
        emit(value.op, *(value.args[1:] if value.op == "clamp" else ()))

    def emit(op: str, low: float = 0.0, high: float = 0.0) -> None:
        operations.append(OPS.index(op))
        limits.extend((low, high))

    visit(expr, 0)
    if not math.isfinite(sum(abs(v) for v in limits if not math.isinf(v))):
        return "the activation has a constant that is not a number"
    return (operations, limits) if depth <= MAX_STACK else "the activation is nested too deeply"


engine = Cpu()
