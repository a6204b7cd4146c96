"""`ExpertParallel`: how `parallelize_module` spreads the experts of a block over the ranks of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from mok_compile.distributed import ops
from mok_compile.distributed.binding import Binding, binding_of, find_experts
from mok_compile.distributed.sharding import Sharding
from mok_compile.engines import Problem
from mok_compile.integrations.tracing import constant_of_module

_STATE = "_mok_parallel"


class ExpertParallel(ParallelStyle):
    """Each rank of the mesh holds some of the experts, and every rank has its own tokens.

    For `parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": ExpertParallel()})`, or with `plan(model)`
    in place of the dictionary. The module's forward takes x [..., H], ids [T, K] and weights [T, K] of this rank's
    tokens; ids count all experts. Its parameters become DTensors with placement ``Shard(0)``, and its forward one call
    of ``mok::experts_parallel``, in eager mode and under every backend. The router stays as it is.

    binding: what the module computes; found out by itself for experts of Hugging Face transformers 5.
    engine: the engine that runs a rank's experts, or "auto".
    transport: who brings the tokens there and back, or "auto".

    Errors: ValueError for a mesh of more than one dimension, for a module whose meaning is not known, and for
    parameters that the binding does not name.
    """

    def __init__(self, binding: Binding | None = None, *, engine: str = "auto", transport: str = "auto") -> None:
        super().__init__()
        self.binding, self.engine, self.transport = binding, engine, transport

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if device_mesh.ndim != 1:
            raise ValueError(f"ExpertParallel wants one dimension of a mesh, as in mesh['ep']; got {device_mesh}")
        if _STATE in module.__dict__:
            raise ValueError(f"{type(module).__name__} is expert parallel already")
        binding = self.binding or binding_of(module)
        if binding is None:
            raise ValueError(
                f"what {type(module).__name__} computes is not known: ExpertParallel knows the stacked experts of "
                "Hugging Face transformers 5; for any other module pass ExpertParallel(binding=Binding(...))"
            )
        num_experts = _check(module, binding)
        for name in binding.names:
            parameter = module.get_parameter(name)
            sharded = distribute_tensor(parameter.data, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        sharding = Sharding(num_experts, device_mesh.size())
        state = Parallel(binding, sharding, device_mesh.get_group().group_name, self.engine, self.transport)
        module.__dict__[_STATE] = state
        module.forward = MethodType(_forward, module)
        return module


def plan(model: nn.Module, **how) -> dict[str, ExpertParallel]:
    """For `parallelize_module`: an `ExpertParallel` (with these arguments) for each experts module of a Hugging Face
    model. ValueError if there is none."""
    found = find_experts(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that ExpertParallel knows: it looks for the stacked experts of "
            "Hugging Face transformers 5"
        )
    return {name: ExpertParallel(binding, **how) for name, binding in found.items()}


@dataclass(frozen=True)
class Parallel:
    """What an expert-parallel module remembers."""

    binding: Binding
    sharding: Sharding
    group: str
    engine: str
    transport: str


def _check(module: nn.Module, binding: Binding) -> int:
    """The number of experts of `module`. ValueError where its parameters are not those of `binding`."""
    own = dict(module.named_parameters())
    missing, more = set(binding.names) - own.keys(), own.keys() - set(binding.names)
    if missing or more:
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"also has {', '.join(sorted(more))}"
        raise ValueError(f"{type(module).__name__} is not as its binding says: it {what}")
    counts = {name: own[name].shape[0] for name in binding.names}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the first dimension of {type(module).__name__}'s parameters is not the experts: {counts}")
    return next(iter(counts.values()))


def _forward(module: nn.Module, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The forward of an expert-parallel module: x [..., H], ids [T, K], weights [T, K] -> as x, in whatever dtype x
    is; the experts compute in that of their weights, also under autocast. RuntimeError under torch.func.vmap."""
    if not torch.compiler.is_dynamo_compiling() and torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            "ExpertParallel does not run under the transforms of torch.func (vmap, grad, ...): its parameters are "
            "DTensors, which these do not know. Take the experts out of the transform, or give it all tokens at once"
        )
    binding = module.__dict__[_STATE].binding
    up = [_local(module, name) for name in binding.up]
    down = [_local(module, binding.down)]
    if binding.transposed:
        up, down = [t.transpose(1, 2) for t in up], [t.transpose(1, 2) for t in down]
    up_bias = [_local(module, name) for name in binding.up_bias]
    down_bias = [_local(module, binding.down_bias)] if binding.down_bias else []
    flat = x.reshape(-1, x.shape[-1]).to(down[0].dtype)
    how = _call_of(module, x.dtype, weights.dtype, down[0].dtype, x.device)
    operands = (flat, ids, weights, up, down, up_bias, down_bias, *how)
    if torch.is_grad_enabled():
        return torch.ops.mok.experts_parallel(*operands)[0].view(x.shape)
    return torch.ops.mok.experts_parallel_infer(*operands).view(x.shape)


def _local(module: nn.Module, name: str) -> torch.Tensor:
    parameter = getattr(module, name)
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@constant_of_module
def _call_of(
    module: nn.Module, dtype: torch.dtype, weights_dtype: torch.dtype, experts_dtype: torch.dtype, device: torch.device
) -> tuple:
    """(transport, group, ranks, num_experts, spec, engine) of a module's calls."""
    state = module.__dict__[_STATE]
    binding = state.binding
    down = getattr(module, binding.down)
    inner, hidden = (1, 2) if binding.transposed else (2, 1)
    sharding = state.sharding
    problem = Problem(
        hidden=down.shape[hidden],
        intermediate=down.shape[inner],
        num_experts=sharding.per_rank,
        top_k=1,
        dtype=experts_dtype,
        weights_dtype=weights_dtype,
        device=device,
        stacked=True,
        row_major=not binding.transposed,
    )
    where = (state.group, sharding.ranks, sharding.num_experts)
    return ops.call_of(binding.spec(dtype), problem, state.engine, state.transport, *where)
