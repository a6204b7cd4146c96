"""``mok::experts_parallel``: the experts of a block, spread over the ranks of a process group.

Every rank passes its own tokens (as many as it has, or none) and its own experts, and gets its own tokens' outputs.
Arguments are those of ``mok::experts``, but ids [T, K] count the experts of all ranks, the experts' weights are stacked
and those of this rank only ([E of this rank, ...], see `mok_compile.distributed.sharding`), and there are the name of
the transport, of the group, its number of ranks, and the number of experts of all ranks. Every rank of the group must
call the op, and run its backward pass.

Gradients are those of one process that has the tokens of all ranks and whose loss is the sum of the ranks' losses.

Errors: ValueError on all ranks where arguments do not fit together, on one rank or between them; RuntimeError with
rank, phase and counts where the communication fails.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from mok_compile import engines, ops
from mok_compile.define import count_flops, define
from mok_compile.distributed import transports
from mok_compile.distributed.sharding import Sharding
from mok_compile.distributed.transports import Call, Operands, Saved
from mok_compile.engines import Problem
from mok_compile.grouped import empty_as
from mok_compile.spec import ExpertsSpec

lib = torch.library.Library("mok", "FRAGMENT")
_OPERANDS = "Tensor x, Tensor ids, Tensor weights, Tensor[] up, Tensor[] down, Tensor[] up_bias, Tensor[] down_bias"
_HOW = "str transport, str group, SymInt ranks, SymInt num_experts, str spec, str engine"
_TENSORS = 7  # arguments before `transport`


def call_of(
    spec: ExpertsSpec, problem: Problem, engine: str, transport: str, group: str, ranks: int, num_experts: int
) -> tuple:
    """The arguments of ``mok::experts_parallel`` behind its tensors: (transport, group, ranks, num_experts, spec,
    engine). `problem` is that of this rank's experts; `engine` and `transport` are names or "auto"."""
    sharding = Sharding(num_experts, ranks)
    problem = _of_rows(problem, sharding.per_rank)
    chosen = engines.choose(transports.row_spec(spec, problem.dtype), problem, engine).name
    call = Call(spec, chosen, group, sharding)
    return transports.choose(call, problem, transport), group, ranks, num_experts, spec.to_json(), chosen


@functools.lru_cache(maxsize=1024)
def _of_rows(problem: Problem, experts: int) -> Problem:
    """The problem of one rank's experts, with one slot for each row."""
    return replace(problem, top_k=1, num_experts=experts)


@functools.lru_cache(maxsize=1024)
def _call(transport, group, ranks, num_experts, spec, engine) -> Call:
    sharding, options = Sharding(num_experts, ranks), transports.options_of(transport)
    return Call(ExpertsSpec.from_json(spec), engine, group, sharding, options)


def _experts_parallel(*args):
    operands, transport, call = Operands(*args[:_TENSORS]), args[_TENSORS], _call(*args[_TENSORS:])
    with torch._C._DisableAutocast():
        y, saved = transports.get(transport).forward(operands, call, save=True)
    return y, saved.rows, saved.h, saved.plan


def _experts_parallel_infer(*args):
    operands, transport, call = Operands(*args[:_TENSORS]), args[_TENSORS], _call(*args[_TENSORS:])
    with torch._C._DisableAutocast():
        return transports.get(transport).forward(operands, call, save=False)[0]


def _experts_parallel_backward(dy, *args):
    operands, saved = Operands(*args[:_TENSORS]), Saved(*args[_TENSORS : _TENSORS + 3])
    transport, *how, needs = args[_TENSORS + 3 :]
    with torch._C._DisableAutocast():
        return transports.get(transport).backward(dy, operands, saved, _call(transport, *how), needs)


def _experts_parallel_fake(*args):
    operands, transport, call = Operands(*args[:_TENSORS]), args[_TENSORS], _call.__wrapped__(*args[_TENSORS:])
    saved = transports.get(transport).saved(operands, call)
    return _experts_parallel_infer_fake(*args), saved.rows, saved.h, saved.plan


def _experts_parallel_infer_fake(x, *args):
    return x.new_empty(x.shape, dtype=ExpertsSpec.from_json(args[-2]).dtype)


def _experts_parallel_backward_fake(dy, *args):
    operands, needs = Operands(*args[:_TENSORS]), args[-1]
    rows = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (operands.x, operands.weights)]
    lists = [[empty_as(t) for t in tensors] for tensors in operands.lists]
    groups = ([rows[0]], [rows[1]], *lists)
    return [t for group, need in zip(groups, needs, strict=True) if need for t in group]


define(
    lib,
    f"experts_parallel({_OPERANDS}, {_HOW}) -> (Tensor y, Tensor rows, Tensor h, Tensor plan)",
    _experts_parallel,
    _experts_parallel_fake,
)
define(
    lib,
    f"experts_parallel_infer({_OPERANDS}, {_HOW}) -> Tensor",
    _experts_parallel_infer,
    _experts_parallel_infer_fake,
)
define(
    lib,
    f"experts_parallel_backward(Tensor dy, {_OPERANDS}, Tensor rows, Tensor h, Tensor plan, {_HOW}, bool[] needs)"
    " -> Tensor[]",
    _experts_parallel_backward,
    _experts_parallel_backward_fake,
)
ops.register_gradient("experts_parallel", lib)
torch.library.register_autograd("mok::experts_parallel_infer", ops.nothing_saved, lib=lib)
torch.library.register_autograd("mok::experts_parallel_backward", ops.no_double_backward, lib=lib)


def _flops(x, ids, weights, up, down, *args, out_shape=None, **kwargs) -> int:
    """Of this rank's routes, wherever they are computed: what each rank computes depends on the data."""
    return ops.flops(x, ids, up, down, 1)


def _backward_flops(dy, x, ids, weights, up, down, *args, out_shape=None, **kwargs) -> int:
    return ops.flops(x, ids, up, down, 2)


count_flops(_flops, torch.ops.mok.experts_parallel, torch.ops.mok.experts_parallel_infer)
count_flops(_backward_flops, torch.ops.mok.experts_parallel_backward)
