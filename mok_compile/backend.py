"""The backend object that `torch.compile(..., backend="mok")` finds through its entry point.

It fuses the MoE blocks of the graph that Dynamo hands over and gives the result to Inductor, with Inductor's own
options and mode. A graph without MoE block goes on exactly as it came.
"""

from __future__ import annotations

from mok_compile._version import require_torch

require_torch()

import logging  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
from torch import fx  # noqa: E402

from mok_compile import dump  # noqa: E402
from mok_compile.cache import AfterPartition, salt  # noqa: E402
from mok_compile.integrations import watch  # noqa: E402
from mok_compile.integrations.capture import trace_again_if_open  # noqa: E402
from mok_compile.integrations.counts import trace_again_if_for_nothing  # noqa: E402
from mok_compile.integrations.loops import trace_again_if_wrong  # noqa: E402
from mok_compile.integrations.missed import Loop, by_their_ends  # noqa: E402
from mok_compile.integrations.places import name_places  # noqa: E402
from mok_compile.options import Options, split  # noqa: E402
from mok_compile.passes.fusing.fuse import fuse, uses_ops  # noqa: E402
from mok_compile.report import Report, StrictError  # noqa: E402

log = logging.getLogger("mok_compile")
_POST_GRAD = "post_grad_custom_post_pass"


class Backend:
    """Callable with Dynamo's backend signature; `mode` and `options` as for Inductor, plus the ``mok.*`` options."""

    compiler_name = "mok"

    def __call__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable:
        mine, rest = split(options)
        inductor = torch._TorchCompileInductorWrapper(mode, rest, None)
        if mine.enabled:
            transform(gm, example_inputs, mine)
        if uses_ops(gm):
            users = inductor.config.get(_POST_GRAD) or getattr(torch._inductor.config, _POST_GRAD)
            inductor.config[_POST_GRAD] = AfterPartition(salt(mine), users)
        return inductor(gm, example_inputs)

    def tell(self, loop: Loop, mine: Options) -> None:
        """Called for a loop over experts at which the graph breaks. StrictError under ``mok.strict``."""
        watched = dump.wanted(mine)
        report = Report([loop.site(watched=watched)])
        if watched:
            dump.publish(report, mine)
        _tell(report, mine)

    def reset(self) -> None:
        """Called by `torch._dynamo.reset()`: forgets recorded CUDA graphs.

        Dynamo calls this in a loop over all backends, which an import for the first time can upset.
        """
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            trees.reset_cudagraph_trees()


def transform(gm: fx.GraphModule, example_inputs: Sequence[Any] | None, mine: Options) -> Report:
    """Fuses the blocks of `gm` in place, tells everybody who asked, and returns the report.

    StrictError under ``mok.strict`` if a recognisable block is left unfused.
    """
    watched = dump.wanted(mine)
    trace_again_if_wrong(gm, example_inputs, mine)
    before = dump.code(gm) if watched else None
    report = Report(by_their_ends(fuse(gm, example_inputs, mine, watched)))
    name_places(report.sites)
    trace_again_if_open(gm)
    trace_again_if_for_nothing(report.fused)
    report.graphs.append(dump.graph(before, dump.code(gm) if watched else None))
    if watched and (report.sites or mine.dump):
        dump.publish(report, mine)
    if not report.sites:
        log.debug(report.summary())
    else:
        _tell(report, mine)
    return report


def _tell(report: Report, mine: Options) -> None:
    """Counters, log and ``mok.strict``."""
    report.count()
    if not dump.rank():  # ranks compile the same graphs: the first one speaks for all
        log.info(report.summary())
    log.debug("%s", report)
    if mine.strict and report.missed:
        raise StrictError(f"mok.strict is on and a block was left unfused\n{report}")


_backend = Backend()


def __getattr__(name: str) -> Any:
    """`mok`, the object of the entry point. Importing this module changes nothing; fetching the backend, which only
    `torch.compile(backend="mok")` does, lets the bridges to other libraries look out for them."""
    if name != "mok":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    watch()
    return _backend
