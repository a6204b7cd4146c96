"""What was found, what became of it, and why: reason codes, sites, reports, counters."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mok_compile import table
from mok_compile.router import RouterSpec
from mok_compile.spec import ExpertsSpec, dtype_name

if TYPE_CHECKING:
    from mok_compile.dump.listing import Listing
    from mok_compile.engines import Problem
    from mok_compile.integrations.missed import Loop
    from mok_compile.passes.fusing.extract import Slice

# Stable codes: meaning, and what the user can do about it. docs/reasons.md explains each at more length.
REASONS = {
    "no-match": (
        "the graph around the experts is not one whose meaning could be proven",
        "the detail says where: spell it in a way that is known (docs/own_block.md), or file an issue with the site's "
        "folder (mok.dump)",
    ),
    "dtype": (
        "dtypes inside the block differ in a way that fusing would change",
        "keep x, weights and activations in one dtype, as model.to(dtype) does; autocast leaves the weights wide",
    ),
    "layout": (
        "weights or biases are stored in a way no engine knows, or experts are not of one make",
        "store gate and up alike: both with or both without bias, as halves, interleaved or apart; and make all "
        "experts of one class, with the same settings and shapes",
    ),
    "activation": (
        "the activation uses values from outside the experts",
        "make it a function of gate and up alone; apply scales and masks before or after the experts; merge adapters "
        "such as LoRA into the weights (peft: merge_and_unload())",
    ),
    "dropout": (
        "dropout, or something else with random numbers, works inside the experts",
        "set its rate to 0; on the block's input or result, or on the experts' outputs, it does no harm",
    ),
    "soft": (
        "every token goes through every expert: a soft mixture, which has nothing sparse to fuse",
        "nothing: it runs under Inductor as before; with weights of a top-k choice it would be a block",
    ),
    "routing": (
        "tokens are shared out in another way than K experts for every token",
        "nothing: it runs under Inductor as before; with top-k over the experts and no capacity it would be a block",
    ),
    "router": (
        "the experts are fused, the router is not",
        "nothing: the router runs under Inductor as before; router_detail says where it differs from the known ones",
    ),
    "interior-use": (
        "a value inside the block is read outside of it",
        "do not return, keep or record it; what a hook needs, compute from the block's inputs or result",
    ),
    "mutation": (
        "an input of the block is overwritten before the block ends, or its loop writes something besides",
        "do not write it in place, or write into a copy; add onto a new tensor; keep statistics outside of the experts "
        "and their loop",
    ),
    "hooks": (
        "a hook sits on a value inside the block",
        "remove the hook, or put it on the module that holds the whole block",
    ),
    "subclass": (
        "weights or activations are a tensor subclass (DTensor, quantised)",
        "use plain tensors here: unwrap or dequantise them before the experts",
    ),
    "post-norm": (
        "something else than the weighted sum follows the experts",
        "nothing where the experts are fused: what follows runs under Inductor as before. Else move it behind the sum, "
        "if the model allows that",
    ),
    "data-dependent": (
        "a Python loop over the experts broke the graph",
        "spell the loop in a way that is known (docs/own_block.md); one without a branch on the data, such as "
        "out[mask] += ..., is fused under fullgraph=True or options={'mok.capture': True} wherever it stands",
    ),
    "split": (
        "the block is cut by a graph break",
        "remove the break: TORCH_LOGS=graph_breaks says where and why",
    ),
    "arch": ("no native engine for this device", "nothing: the portable engine runs"),
    "shape": (
        "sizes do not fit one expert MLP",
        "per expert the up projection must be [2I, H] (or [I, H]) and the down projection [H, I], with fixed sizes",
    ),
    "engine": (
        "the wanted engine cannot run this block",
        "the detail says why; set mok.engine to auto or to another engine",
    ),
    "verify": (
        "the fused block differs from the graph it would replace",
        "file an issue with the site's folder (mok.dump); the block runs unfused meanwhile",
    ),
    "disabled": ("switched off by mok.enabled", "set mok.enabled to True, or MOK_ENABLED=1"),
}

# What there is to do besides about a block of the library transformers.
IN_TRANSFORMERS = {
    "no-match": "or try experts_implementation='grouped_mm'",
    "dropout": "the rate is a setting such as config.dropout_rate or config.activation_dropout",
    "data-dependent": "model.set_experts_implementation('grouped_mm'), where the model has that setting, has no loop",
    "split": "on transformers 5 experts implementation 'mok' (mok_compile.integrations.transformers.register) needs no "
    "graph",
}
# In the path of its code, and of remote code; other projects have folders of that name too.
_IN_TRANSFORMERS = re.compile(r"(^|[ /])(transformers/(models|integrations)|transformers_modules)/")


class StrictError(RuntimeError):
    """Raised under ``mok.strict`` when a recognisable MoE block is left unfused."""


@dataclass(frozen=True)
class Spread:
    """The ranks that the experts of a block are spread over (`mok_compile.distributed`), and how tokens get there."""

    num_experts: int
    ranks: int
    transport: str

    def __str__(self) -> str:
        return f"{_count(self.num_experts, 'expert')} over {_count(self.ranks, 'rank')} (transport {self.transport})"


@dataclass
class Site:
    """One MoE block of a compiled graph."""

    status: str  # "fused" or "missed"
    reason: str | None  # a key of REASONS; None when fused and nothing is to be said
    detail: str
    location: str  # module path, class, file and line
    spec: ExpertsSpec | None = None
    engine: str | None = None
    verify_error: float | None = None
    node: str = ""  # the node that was replaced, or where the proof broke
    graph: int = 0
    problem: Problem | None = None  # sizes and dtypes of a fused block
    subgraph: str = ""  # the body that the block lies in (of a checkpoint, of a branch), empty for the graph itself
    slice: Slice | None = field(default=None, repr=False)  # what was proven; only when somebody watches
    router: RouterSpec | None = None  # the router that was fused too
    router_detail: str = ""  # why the router was not
    combine_detail: str = ""  # why the experts' rows alone were fused, not their weighted sum
    spread: Spread | None = None  # of an expert-parallel block
    cut_off: bool = False  # of a miss: a router, whose experts are not in its graph
    loop: Loop | None = field(default=None, repr=False)  # that no graph holds; only when somebody watches

    @property
    def op(self) -> str:
        """``"moe"`` for a block that is fused with its router, ``"experts"`` for one without it, ``"experts_parallel"``
        for one whose experts are spread over ranks; else empty."""
        if self.spread is not None:
            return "experts_parallel"
        return "" if self.status != "fused" else "moe" if self.router is not None else "experts"

    @property
    def about_router(self) -> str:
        """What became of the router of a fused block; empty where nobody asked."""
        if self.router is not None:
            return f"{self.router} (mok::moe)"
        return f"not fused: {self.router_detail}" if self.router_detail else ""

    @property
    def cure(self) -> str:
        """What the user can do about it."""
        if not self.reason:
            return ""
        more = IN_TRANSFORMERS.get(self.reason) if _IN_TRANSFORMERS.search(self.location) else None
        return "; ".join(filter(None, (REASONS[self.reason][1], more)))

    def to_dict(self) -> dict[str, Any]:
        """The JSON of this site; docs/dumps.md describes the fields."""
        return {
            "status": self.status,
            "reason": self.reason,
            "detail": self.detail,
            "what_to_do": self.cure,
            "location": self.location,
            "op": self.op,
            "spec": asdict(self.spec) if self.spec else None,
            "router": self.router.to_dict() if self.router else None,
            "router_detail": self.router_detail,
            "combine_detail": self.combine_detail,
            "engine": self.engine,
            "spread": asdict(self.spread) if self.spread else None,
            "verify_error": self.verify_error,
            "node": self.node,
            "graph": self.graph,
            "subgraph": self.subgraph,
            "sizes": _sizes(self.problem) if self.problem else None,
        }


def _sizes(problem: Problem) -> dict[str, Any]:
    return {
        "hidden": problem.hidden,
        "intermediate": problem.intermediate,
        "num_experts": problem.num_experts,
        "top_k": problem.top_k,
        "dtype": dtype_name(problem.dtype),
        "weights_dtype": dtype_name(problem.weights_dtype),
        "device": str(problem.device),
        "stacked": problem.stacked,
    }


@dataclass
class Graph:
    """The code of one compiled graph, before and after fusing; empty when nobody watches."""

    before: str
    after: str
    listings: tuple[Listing, Listing] | None = field(default=None, repr=False)


@dataclass(repr=False)
class Report:
    """The sites of one or more graphs. `str(report)` is a table, `report.to_dict()` the JSON.

    `notes` are sentences about what stood in the way before there was a graph to look at.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def fused(self) -> int:
        return sum(site.status == "fused" for site in self.sites)

    @property
    def missed(self) -> int:
        return sum(site.status == "missed" for site in self.sites)

    def add(self, other: Report) -> None:
        """Takes the graphs and sites of `other` over, numbering its graphs on."""
        for site in other.sites:
            site.graph += len(self.graphs)
        self.sites += other.sites
        self.graphs += other.graphs
        self.notes += [note for note in other.notes if note not in self.notes]

    def to_dict(self) -> dict[str, Any]:
        return {
            "fused": self.fused,
            "missed": self.missed,
            "notes": list(self.notes),
            "sites": [site.to_dict() for site in self.sites],
            "graphs": [{"before": graph.before, "after": graph.after} for graph in self.graphs],
        }

    def summary(self) -> str:
        """One line: ``3 MoE blocks: 2 fused (cpu), 1 missed (hooks)``."""
        if not self.sites:
            return f"no MoE block found in {_count(len(self.graphs), 'graph')}"
        engines = sorted({s.engine for s in self.sites if s.engine})
        reasons = sorted({s.reason for s in self.sites if s.status == "missed" and s.reason})
        parts = [f"{self.fused} fused" + (f" ({', '.join(engines)})" if engines else "")]
        if self.missed:
            parts.append(f"{self.missed} missed ({', '.join(reasons)})")
        return f"{_count(len(self.sites), 'MoE block')}: {', '.join(parts)}"

    def __str__(self) -> str:
        return table.text(self)

    __repr__ = __str__

    def show(self, file=None) -> None:
        """Writes the table to `file`, by default standard output: in colour if that is a terminal."""
        table.show(self, file)

    def _repr_html_(self) -> str:
        return table.html(self)

    def count(self) -> None:
        """Adds this report to ``torch._dynamo.utils.counters["mok"]``."""
        from torch._dynamo.utils import counters

        mine = counters["mok"]
        mine["found"] += len(self.sites)
        mine["fused"] += self.fused
        mine["missed"] += self.missed
        for site in self.sites:
            if site.status == "missed":
                mine[f"missed:{site.reason}"] += 1


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
