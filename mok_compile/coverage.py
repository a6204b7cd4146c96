"""Which families of transformers are fused, in which settings, and why not: ``doctor --zoo``.

Each model is compiled with the passes alone, without Inductor, and runs once. Blocks that run as the fused op, told
apart by their weights, are set against the modules of experts that run in eager mode. ``mok.verify`` is on: a block
counts only if its outputs, and in training its gradients, were compared with the graph that it replaces.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

import mok_compile
from mok_compile import backend, engines, families
from mok_compile.options import Options


@dataclass(frozen=True)
class Setting:
    """How a model is run; a column of the table."""

    name: str
    dtype: torch.dtype = torch.float32
    training: bool = False
    dynamic: bool = False
    checkpointed: bool = False


SETTINGS = (
    Setting("inference"),
    Setting("inference bf16", torch.bfloat16),
    Setting("training", training=True),
    Setting("training bf16", torch.bfloat16, training=True),
    Setting("dynamic shapes", training=True, dynamic=True),
    Setting("checkpointed", training=True, checkpointed=True),
)


@dataclass(frozen=True)
class Cell:
    """So many of the `blocks` that run are `fused`; `routers` of them take the router along. `why` not: reason code and
    sentence of each miss, or what the model raised. `blocks` is None if the model does not run at all, 0 if there is no
    such setting."""

    fused: int
    blocks: int | None
    routers: int = 0
    why: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return self.fused == self.blocks

    def __str__(self) -> str:
        shown = "does not run" if self.blocks is None else "–"
        return f"{self.fused}/{self.blocks}" if self.blocks else shown


Row = dict[str, Cell]  # by the name of the setting


def measure(names: list[str], device: str = "cpu", report: Callable[[str, Row], None] | None = None) -> dict[str, Row]:
    """The rows of families `names`; `report` is told of each as soon as it is there."""
    rows = {}
    backend.mok  # noqa: B018  lets the bridges to transformers look out for it
    with _quiet():
        for name in names:
            rows[name] = {setting.name: cell(name, setting, device) for setting in SETTINGS}
            if report is not None:
                report(name, rows[name])
    return rows


def cell(name: str, setting: Setting, device: str = "cpu") -> Cell:
    """Builds family `name` and runs it in one setting."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    blocks = None
    try:
        model, inputs = families.make(name, setting.dtype)
        model, inputs = model.to(device).train(setting.training), {k: v.to(device) for k, v in inputs.items()}
        if setting.checkpointed and not _checkpointed(model):
            return Cell(0, 0)
        with torch.set_grad_enabled(setting.training):
            blocks = len(_running(model, inputs))
            if not blocks:
                return Cell(0, None, why=("error: no module with experts was called",))
            fused, routers = _fused(model, inputs, setting.dynamic)
            why = () if fused == blocks else _reasons(model, inputs)
    except Exception as error:  # whatever a model raises
        text = next(iter(str(error).strip().splitlines()), "")
        return Cell(0, blocks, why=(f"error: {type(error).__name__}: {text}"[:200],))
    return Cell(fused, blocks, routers, why)


def _checkpointed(model: nn.Module) -> bool:
    """Switches checkpointing on; False where the model has none."""
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError:
        return False
    return True


def _running(model: nn.Module, inputs: dict[str, Any]) -> set[str]:
    """The blocks that run in one eager call: text alone does not reach the experts for images."""
    seen: set[str] = set()
    hooks = []
    for name in families.blocks_of(model):
        block = model.get_submodule(name)
        # A container need not be called itself, its experts are.
        for module in [block, *(block.children() if isinstance(block, (nn.ModuleList, nn.ModuleDict)) else ())]:
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: seen.add(name)))
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return seen


def _fused(model: nn.Module, inputs: dict[str, Any], dynamic: bool) -> tuple[int, int]:
    """How many blocks run as a fused op in one call of the compiled model, and how many with their router."""
    engine, options = engines.get("portable"), Options(verify=True, engine="portable")
    weights: dict[int, torch.Tensor] = {}
    routed: set[str] = set()

    def counting(*args, **kwargs):
        down = args[4][0]
        weights[down.data_ptr()] = down
        return type(engine).forward(engine, *args, **kwargs)

    def compiler(gm, example_inputs):
        report = backend.transform(gm, example_inputs, options)
        routed.update(s.location for s in report.sites if s.status == "fused" and s.router is not None)

        def run(*args):
            with mock.patch.object(engine, "forward", counting):
                return gm.forward(*args)

        return run

    compiler.compiler_name, compiler.options = "mok", options  # bridges to other libraries act for this name only
    torch.compile(model, backend=compiler, dynamic=dynamic or None)(**inputs)
    return len(weights), len(routed)


def _reasons(model: nn.Module, inputs: dict[str, Any]) -> tuple[str, ...]:
    torch._dynamo.reset()
    report = mok_compile.explain(model, {"mok.verify": True, "mok.engine": "portable"})(**inputs)
    missed = dict.fromkeys(f"{site.reason}: {site.detail}" for site in report.sites if site.status == "missed")
    return tuple(missed) or ("not reported",)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tiny models on one thread; what libraries say of them is of no interest here."""
    import transformers

    threads, torch_log = torch.get_num_threads(), logging.getLogger("torch")
    levels = torch_log.level, transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    torch_log.setLevel(logging.CRITICAL)
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
        torch_log.setLevel(levels[0])
        transformers.logging.set_verbosity(levels[1])


def codes(row: Row) -> list[str]:
    """Reason codes of a row, each once."""
    return sorted({why.partition(":")[0] for cell in row.values() for why in cell.why})


def complete(row: Row) -> bool:
    return all(cell.complete for cell in row.values())


def head() -> str:
    names = [setting.name for setting in SETTINGS]
    return f"| family | {' | '.join(names)} | router | why not |\n|---|{'---|' * (len(names) + 2)}"


def line(name: str, row: Row) -> str:
    """One line of the table: fused / blocks in each setting, the blocks whose router is in the op, reason codes."""
    cells = [str(row[setting.name]) for setting in SETTINGS]
    routers = max(cell.routers for cell in row.values())
    return f"| {name} | {' | '.join(cells)} | {routers or ''} | {', '.join(codes(row))} |"


def details(rows: dict[str, Row]) -> list[str]:
    """What was missed, a line a family: every reason in words."""
    said = []
    for name, row in rows.items():
        why = dict.fromkeys(why for cell in row.values() for why in cell.why)
        if why:
            said.append(f"- {name}: {'; '.join(why)}")
    return said


def to_dict(rows: dict[str, Row]) -> dict[str, Any]:
    """For JSON; `from_dict` reads it."""
    torch_version, transformers_version = versions()
    families = {name: {key: asdict(cell) for key, cell in row.items()} for name, row in rows.items()}
    return {"torch": torch_version, "transformers": transformers_version, "families": families}


def from_dict(stored: dict[str, Any]) -> dict[str, Row]:
    return {
        name: {key: Cell(**{**cell, "why": tuple(cell["why"])}) for key, cell in row.items()}
        for name, row in stored["families"].items()
    }


def versions() -> tuple[str, str]:
    """Of torch and transformers."""
    import transformers

    return torch.__version__.partition("+")[0], transformers.__version__


def summary(rows: dict[str, Row]) -> str:
    """How many families are complete, under which versions."""
    torch_version, transformers_version = versions()
    done = sum(map(complete, rows.values()))
    return (
        f"{done} of {len(rows)} families have every block fused in every setting "
        f"(torch {torch_version}, transformers {transformers_version})"
    )
