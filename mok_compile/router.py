"""What a router computes, in the field's own terms: from logits [T, E] to expert ids and routing weights [T, K].

Two chains of steps, because order and dtypes decide the bits: `scores` leads from the logits to the numbers that
experts are chosen by, `weights` from the chosen experts' numbers to their routing weights.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mok_compile.spec import from_line, to_line

# Functions of the numbers along the last dimension, and what they take.
#   cast dtype      softmax | softmax dtype      sigmoid, softplus, sqrt, tanh      mul, add, div: a constant
#   normalise       x / sum(x)                   normalise "add", eps: x / (sum(x) + eps); "clamp": sum at least eps
#   expert_scale    times a learned number for each expert
STEPS = ("cast", "softmax", "sigmoid", "softplus", "sqrt", "tanh", "mul", "add", "div", "normalise", "expert_scale")
LATE = ("normalise", "expert_scale")  # these follow the choice of experts


@dataclass(frozen=True)
class Step:
    """One function of `STEPS` and its arguments: numbers, or the name of a dtype."""

    op: str
    args: tuple[float | str, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in STEPS:
            raise ValueError(f"router step {self.op!r} is not one of {', '.join(STEPS)}")

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype that this step leads to; None if it keeps the one it gets."""
        return getattr(torch, self.args[0]) if self.op in ("cast", "softmax") and self.args else None

    def __str__(self) -> str:
        match self.op, self.args:
            case "cast", (dtype,):
                return str(dtype)
            case "softmax", (dtype,):
                return f"softmax in {dtype}"
            case "normalise", ("add", eps):
                return f"normalised (sum + {eps:g})"
            case "normalise", ("clamp", eps):
                return f"normalised (sum at least {eps:g})"
            case "normalise", _:
                return "normalised"
            case "expert_scale", _:
                return "scaled by expert"
        sign = {"mul": "* ", "add": "+ ", "div": "/ "}.get(self.op)
        return self.op if sign is None else f"{sign}{self.args[0]:g}"


@dataclass(frozen=True)
class Groups:
    """Experts of the best groups alone can be chosen: E experts in `count` groups, `chosen` of them stay.

    A group is as good as the sum of its `best` best experts; the others' numbers become `fill`. `ordered` is
    torch.topk's `sorted`, which can decide between equals.
    """

    count: int
    chosen: int
    best: int
    fill: float
    ordered: bool = False

    def __str__(self) -> str:
        best = "best" if self.best == 1 else f"best {self.best}"
        return f"{self.chosen} of {self.count} groups (by their {best}, others {self.fill:g})"


@dataclass(frozen=True)
class RouterSpec:
    """The router of an MoE block: everything about it that is not a tensor.

    logits = router_x @ router_weight.T + router_bias; s = scores(logits); ids = the `top_k` largest of s (+ a bias for
    each expert where `corrected`, within `groups`); weights = weights(s[ids]).

    With ``masked`` the weights start from what top-k saw: s, but `groups.fill` for an expert outside the chosen groups.
    """

    top_k: int
    scores: tuple[Step, ...]
    weights: tuple[Step, ...]
    groups: Groups | None = None
    corrected: bool = False
    masked: bool = False
    ordered: bool = True

    def __post_init__(self) -> None:
        late = [step.op for step in self.scores if step.op in LATE]
        if late:
            raise ValueError(f"router step {late[0]!r} has no place before the choice of experts")
        if self.masked and (self.groups is None or self.corrected):
            raise ValueError("weights can start behind the mask of groups only, and not from corrected scores")

    @property
    def scaled(self) -> bool:
        """Whether the routing weights are multiplied with a learned number for each expert."""
        return any(step.op == "expert_scale" for step in self.weights)

    def scores_dtype(self, logits: torch.dtype) -> torch.dtype:
        """dtype of the scores for logits of that dtype."""
        return functools.reduce(lambda dtype, step: step.dtype or dtype, self.scores, logits)

    def weights_dtype(self, values: torch.dtype, scale: torch.dtype | None) -> torch.dtype:
        """dtype of the routing weights for values and an expert scale of those."""
        dtype = values
        for step in self.weights:
            dtype = torch.promote_types(dtype, scale) if step.op == "expert_scale" else step.dtype or dtype
        return dtype

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; an infinite fill as text, which JSON has no number for."""
        fields = asdict(self)
        for name in ("scores", "weights"):
            fields[name] = [{"op": step.op, "args": list(step.args)} for step in getattr(self, name)]
        if self.groups is not None and not math.isfinite(self.groups.fill):
            fields["groups"]["fill"] = str(self.groups.fill)
        return fields

    def to_json(self) -> str:
        """One line that goes into the op call; `from_json` reads it back."""
        return to_line(self.to_dict())

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def from_json(text: str) -> RouterSpec:
        fields = from_line(text)
        for name in ("scores", "weights"):
            fields[name] = tuple(Step(step["op"], tuple(step["args"])) for step in fields[name])
        if fields["groups"] is not None:
            fields["groups"] = Groups(**{**fields["groups"], "fill": float(fields["groups"]["fill"])})
        return RouterSpec(**fields)

    @property
    def choice(self) -> str:
        """The choice of experts in words."""
        within = "" if self.groups is None else f" within {self.groups}"
        return f"top {self.top_k}{' of score + bias' if self.corrected else ''}{within}"

    def __str__(self) -> str:
        return ", ".join([*map(str, self.scores), self.choice, *map(str, self.weights)])
