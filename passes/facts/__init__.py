"""What values of a graph are in MoE terms: the kinds of facts, and the rules by which ops pass them on.

Where several modules have a rule for an op, the one that is imported last is asked first.
"""

# isort: off
from mok_compile.passes.facts import rules
from mok_compile.passes.facts import masks, shares, picked, single, parts, dense, batched, selected

__all__ = ["batched", "dense", "masks", "parts", "picked", "rules", "selected", "shares", "single"]
