"""What an experts module computes, and with which of its parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from mok_compile.activation import parse
from mok_compile.spec import LAYOUTS, ExpertsSpec, dtype_name


@dataclass(frozen=True)
class Binding:
    """An experts module in the op's terms. Its forward takes x [..., H], ids [T, K] and weights [T, K] and returns what
    x is, as `mok_compile.spec.ExpertsSpec` says for this `activation`, `layout` and `weight_on`.

    The other fields name parameters of the module: `up` one, or two for the layout ``separate``, [E, N, H]; `down`
    [E, H, I]; biases as many as these, or none. With `transposed` the matrices are stored [E, in, out].
    """

    activation: str
    layout: str
    up: tuple[str, ...]
    down: str
    up_bias: tuple[str, ...] = ()
    down_bias: str | None = None
    transposed: bool = False
    weight_on: str = "output"

    def __post_init__(self) -> None:
        parse(self.activation)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        parts = 2 if self.layout == "separate" else 1
        if len(self.up) != parts or len(self.up_bias) not in (0, parts):
            raise ValueError(f"layout {self.layout!r} has {parts} up projections, got {self.up} and {self.up_bias}")

    @property
    def names(self) -> tuple[str, ...]:
        """All parameters, each with the experts as its first dimension."""
        return (*self.up, self.down, *self.up_bias, *((self.down_bias,) if self.down_bias else ()))

    def spec(self, dtype: torch.dtype) -> ExpertsSpec:
        """The spec for x of `dtype`."""
        return ExpertsSpec(self.activation, self.layout, dtype_name(dtype), self.weight_on)


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of an experts module of Hugging Face transformers 5: one whose class went through its
    ``use_experts_implementation``. None for any other module, and for experts that the op cannot express."""
    from mok_compile.passes.blocks.gate import gate_of

    if not all(hasattr(module, name) for name in _SETTINGS) or getattr(module, "has_post_expert_norm", False):
        return None
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name, None), getattr(module, "down_proj", None)
    if not all(isinstance(t, nn.Parameter) and t.dim() == 3 for t in (up, down)):
        return None
    function = module._apply_gate if module.has_gate else module.act_fn
    found = gate_of(function, up.shape[2 if module.is_transposed else 1], up.dtype)
    if found is None:
        return None
    layout, activation = found
    bias = (f"{name}_bias",) if module.has_bias else ()
    down_bias = "down_proj_bias" if module.has_bias else None
    return Binding(str(activation), layout, (name,), "down_proj", bias, down_bias, module.is_transposed)


# has_post_expert_norm came later than these (transformers 5.17 lacks it).
_SETTINGS = ("has_gate", "has_bias", "is_transposed")


def find_experts(model: nn.Module) -> dict[str, Binding]:
    """The experts modules of a Hugging Face model (transformers 5, whose experts are stacked): path -> binding."""
    found = {name: binding_of(module) for name, module in model.named_modules()}
    return {name: binding for name, binding in found.items() if binding is not None}
