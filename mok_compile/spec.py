"""What an MoE block computes, in the field's own terms.

Legend, used throughout the project: T tokens, K experts per token, E experts, H hidden size, I expert (intermediate)
size, S = T * K slots (slot s = t * K + k). ``ids`` [T, K] are expert numbers, ``weights`` [T, K] routing weights,
``offsets`` [E] the ends of the experts' rows once the slots are sorted by expert.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch

from mok_compile import activation as act

# How the up projection stores gate and up. N is the number of its output columns.
#   concat       one weight [E, 2I, H], gate rows first       interleaved  one weight [E, 2I, H], gate and up alternate
#   separate     two weights [E, I, H], gate then up          single       one weight [E, I, H], ungated
LAYOUTS = ("concat", "interleaved", "separate", "single")
WEIGHT_ON = ("output", "input")


@dataclass(frozen=True)
class ExpertsSpec:
    """The experts part of an MoE block: everything about the computation that is not a tensor.

    y[t] = sum_k weights[t, k] * (a @ down[e].T + down_bias[e]),  a = activation(x[t] @ up[e].T + up_bias[e]),
    e = ids[t, k]

    Slots whose id lies outside [0, E) contribute exactly nothing. Products accumulate in float32 (float64 for float64
    inputs). With ``weight_on == "input"`` the routing weight multiplies x instead of the expert's output.

    Weights are given as [E, out, in] with any strides: a model that stores [E, in, out] passes the transposed view.
    """

    activation: str
    layout: str
    out_dtype: str
    weight_on: str = "output"

    def __post_init__(self) -> None:
        act.parse(self.activation)
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.weight_on not in WEIGHT_ON:
            raise ValueError(f"weight_on {self.weight_on!r} is not one of {', '.join(WEIGHT_ON)}")
        if not isinstance(getattr(torch, self.out_dtype, None), torch.dtype):
            raise ValueError(f"out_dtype {self.out_dtype!r} is not the name of a torch dtype")

    @property
    def expr(self) -> act.Expr:
        return act.parse(self.activation)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the output."""
        return getattr(torch, self.out_dtype)

    @property
    def gated(self) -> bool:
        return self.layout != "single"

    def to_json(self) -> str:
        """One line that goes into the op call and into reports; `from_json` reads it back."""
        return self._line

    @functools.cached_property
    def _line(self) -> str:
        fields = {"activation": self.activation, "layout": self.layout, "out_dtype": self.out_dtype}
        if self.weight_on != "output":
            fields["weight_on"] = self.weight_on
        return to_line(fields)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> ExpertsSpec:
        return ExpertsSpec(**from_line(text))

    def __str__(self) -> str:
        weight = ", weights on the input" if self.weight_on == "input" else ""
        return f"{self.activation} ({self.layout}){weight} -> {self.out_dtype}"


def to_line(fields: dict[str, Any]) -> str:
    """JSON as an op's argument: in single quotes, which nothing else here has. Inductor's `cpp_wrapper` puts a string
    between double quotes into C++ as it is (torch/_inductor/codegen/cpp_wrapper_cpu.py)."""
    return json.dumps(fields).replace('"', "'")


def from_line(text: str) -> dict[str, Any]:
    """What `to_line` was given; takes plain JSON too."""
    return json.loads(text.replace("'", '"'))


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
