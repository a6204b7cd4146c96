"""Hugging Face transformers 5: two doors into its registry of experts implementations.

``"eager"``: the loop over the experts that were hit cannot be traced, so models that ask for it (or default to it)
would break every graph. While Dynamo traces for our backend, and only then, such experts take the library's own
grouped form, which the matcher knows; everywhere else, other backends included, the loop runs as before.

``"mok"``, after `register()`: ``model.set_experts_implementation("mok")`` calls the fused op straight from the experts
module, without any graph matching, in eager mode and under every backend: the way to go should a release change its
graphs.
"""

from __future__ import annotations

import importlib
import sys

import torch

from mok_compile.integrations.tracing import constant_of_module, our_options

_MODULE = "transformers.integrations.moe"


def register() -> None:
    """Makes ``"mok"`` a valid experts implementation. ImportError without transformers 5."""
    moe = importlib.import_module(_MODULE)
    _registry(moe).register("mok", experts_forward)


def open_eager() -> None:
    """Opens the ``"eager"`` door, if transformers is there."""
    moe = sys.modules.get(_MODULE)
    if moe is None or not hasattr(moe, "grouped_mm_experts_forward"):
        return
    registry = _registry(moe)
    if "eager" not in registry:
        registry.register("eager", _eager)


def _registry(moe):
    return moe.ALL_EXPERTS_FUNCTIONS


def _eager(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_dynamo_compiling() and _for_us():
        return sys.modules[_MODULE].grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return type(self).forward.__wrapped__(self, hidden_states, top_k_index, top_k_weights)


@torch._dynamo.assume_constant_result
def _for_us() -> bool:
    return our_options() is not None


def experts_forward(
    self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts implementation ``"mok"``: hidden_states [T, H], top_k_index and top_k_weights [T, K] -> [T, H].

    Experts that the op cannot express (a norm after each expert, a gate that is no pointwise function of gate and up)
    take the library's grouped form, with one warning.
    """
    call = _call_of(self, hidden_states.dtype, top_k_weights.dtype, top_k_index.shape[1])
    if call is None:
        return sys.modules[_MODULE].grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    spec, engine = call
    up = self.gate_up_proj if self.has_gate else self.up_proj
    down = self.down_proj
    up_bias, down_bias = [], []
    if self.has_bias:
        up_bias, down_bias = [self.gate_up_proj_bias if self.has_gate else self.up_proj_bias], [self.down_proj_bias]
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    x = hidden_states.to(up.dtype)
    return torch.ops.mok.experts(x, top_k_index, top_k_weights, [up], [down], up_bias, down_bias, spec, engine)[0]


def call_without_graph(experts: torch.nn.Module) -> tuple[str, str] | None:
    """(spec, engine) of a module whose experts implementation is ``"mok"`` and that has run; None for any other."""
    config = getattr(experts, "config", None)
    if getattr(config, "_experts_implementation", None) != "mok":
        return None
    return next((call for call in reversed(experts.__dict__.get("_mok_calls", {}).values()) if call is not None), None)


@constant_of_module
def _call_of(
    experts: torch.nn.Module, dtype: torch.dtype, weights_dtype: torch.dtype, top_k: int
) -> tuple[str, str] | None:
    """(spec, engine) for an experts module, or None. Remembered on the module for each dtype and device."""
    weight = experts.down_proj
    key = (dtype, weights_dtype, top_k, weight.dtype, weight.device)
    known = experts.__dict__.setdefault("_mok_calls", {})
    if key not in known:
        known[key] = _derive(experts, dtype, weights_dtype, top_k)
    return known[key]


def _derive(experts, dtype: torch.dtype, weights_dtype: torch.dtype, top_k: int) -> tuple[str, str] | None:
    from mok_compile import engines, ops  # noqa: F401  registers the op
    from mok_compile.passes.blocks.gate import gate_of
    from mok_compile.spec import ExpertsSpec, dtype_name

    up = experts.gate_up_proj if experts.has_gate else experts.up_proj
    down = experts.down_proj.transpose(1, 2) if experts.is_transposed else experts.down_proj
    found = None
    if not getattr(experts, "has_post_expert_norm", False):
        function = experts._apply_gate if experts.has_gate else experts.act_fn
        found = gate_of(function, up.shape[2 if experts.is_transposed else 1], up.dtype)
    if found is None:
        engines.warn_once(
            f"{type(experts).__name__} computes what the op cannot express; it takes the grouped_mm implementation"
        )
        return None
    layout, activation = found
    spec = ExpertsSpec(str(activation), layout, dtype_name(dtype))
    problem = engines.Problem(
        hidden=down.shape[1],
        intermediate=down.shape[2],
        num_experts=down.shape[0],
        top_k=top_k,
        dtype=up.dtype,
        weights_dtype=weights_dtype,
        device=up.device,
        stacked=True,
    )
    return spec.to_json(), engines.choose(spec, problem).name
