"""The portable engine: `mok_compile.reference` in the model's own dtype. Runs every spec on every device."""

from __future__ import annotations

import torch

from mok_compile import reference, routing
from mok_compile.engines import Problem
from mok_compile.reference import Experts, Schedule
from mok_compile.router import RouterSpec
from mok_compile.spec import ExpertsSpec


class Portable:
    name = "portable"

    def usable(self) -> str | None:
        return None

    def supports(self, spec: ExpertsSpec, problem: Problem) -> str | None:
        return None

    def forward(self, x, ids, weights, up, down, up_bias, down_bias, spec, *, save):
        y, h, plan = reference.forward(x, ids, weights, Experts.of(up, down, up_bias, down_bias, spec), spec)
        return y, h, plan.order, plan.offsets

    def backward(self, dy, x, ids, weights, up, down, up_bias, down_bias, h, order, offsets, spec, needs):
        experts = Experts.of(up, down, up_bias, down_bias, spec)
        return reference.backward(dy, x, ids, weights, experts, h, Schedule(order, offsets), spec, needs)

    def row_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def combine(self, rows, order, ids, weights, num_experts, spec):
        on_output = spec.weight_on == "output"
        weights = reference.routed(weights, ids, num_experts) if on_output else None
        return reference.combine(rows, weights, ids.shape, order.long(), spec.dtype)

    def supports_router(self, router: RouterSpec, weight: torch.Tensor) -> str | None:
        return None

    def route(self, x, weight, bias, correction, router) -> routing.Routed:
        return routing.route(x, weight, bias, correction, router)


engine = Portable()
