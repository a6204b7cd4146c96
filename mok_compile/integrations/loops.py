"""Python loops over experts, traced as one op: models whose experts are a list of modules, such as those of
transformers 4, and classes of transformers 5 outside of its registry of experts implementations.

Such a loop asks which experts were hit, which would break every graph. While Dynamo traces for our backend, and only
then, a method with such a loop runs in another form (`mok_compile.passes.loops.cut`): where the loop is proven to be
experts (`mok_compile.passes.loops.iteration`) it becomes one call of ``mok::experts`` with the experts' own weights,
and all around it stays the method's own code. Where there is no proof, in eager mode and under other backends, the
method itself runs.

Idle experts get gradients of zeros, not None: the op does not know at trace time which ones those will be.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import math
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.comptime import comptime
from torch._dynamo.utils import np  # None where there is none
from torch.utils import _contextlib

from mok_compile.integrations import capture, counts, missed
from mok_compile.integrations.missed import DATA_DEPENDENT, met, provers, refused
from mok_compile.integrations.tracing import constant_of_module, our_options, trace_again, variable_of
from mok_compile.options import Options

log = logging.getLogger("mok_compile")
_seen: weakref.WeakSet = weakref.WeakSet()
# Modules of which ``mok.verify`` has found that the op computes something else than their loop, and what.
distrusted: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
_live: list[tuple] = []
_proven: list[tuple] = []


def open_doors() -> None:
    """Gives methods that hold a loop over experts, of all module classes that exist by now, their traced form."""
    replaced = {}
    for cls in _classes(torch.nn.Module):
        if cls in _seen:
            continue
        _seen.add(cls)
        for name, function in list(vars(cls).items()):
            if _may_hold(_undecorated(function)) and _install(cls, name, function):
                pass
            elif counts.may_count(function):
                counts.install(cls, name, function)
            elif capture.may_fill(function):
                capture.install(cls, name, function)
            if vars(cls)[name] is not function:
                replaced[function] = vars(cls)[name]
    _replace_held(replaced)


def _replace_held(replaced: dict[types.FunctionType, types.FunctionType]) -> None:
    """The same for modules that hold such a method as an attribute of their own. In transformers 4 a call that records
    what modules return, as router logits, leaves them with ``module.forward = module.forward``."""
    for held in gc.get_referrers(*replaced) if replaced else ():
        if isinstance(held, types.MethodType) and isinstance(held.__self__, torch.nn.Module):
            attributes = vars(held.__self__)
            for name in [name for name, value in attributes.items() if value is held]:
                attributes[name] = types.MethodType(replaced[held.__func__], held.__self__)


def _classes(base: type) -> Iterator[type]:
    pending = [base]
    while pending:
        cls = pending.pop()
        yield cls
        pending += cls.__subclasses__()


def _may_hold(function: Any) -> bool:
    from mok_compile.passes.loops.cut import may_cut
    from mok_compile.passes.loops.uncut import may_be_named

    return may_cut(function) or may_be_named(function)


def _decorator(function: Any) -> torch.no_grad | torch.inference_mode | None:
    """The decorator of `function` if that is ``@torch.no_grad()`` or ``@torch.inference_mode()``, as which remote code
    has its inference."""
    theirs = isinstance(function, types.FunctionType) and function.__code__.co_filename == _contextlib.__file__
    makers = [getattr(cell.cell_contents, "__self__", None) for cell in function.__closure__ or ()] if theirs else []
    found = (maker for maker in makers if type(maker) in (torch.no_grad, torch.inference_mode))
    return next((maker for maker in found if getattr(maker, "mode", True)), None)


def _undecorated(function: Any) -> Any:
    """The function under such a decorator; any other as it is."""
    return function if _decorator(function) is None else function.__wrapped__


def _install(cls: type, name: str, function: Callable) -> bool:
    """Gives the method its traced form; False where it has no loop over experts, or one that is no more than named."""
    from mok_compile.passes.loops.cut import Cut, cut

    decorator = _decorator(function)
    masks = capture.may_fill(_undecorated(function))
    made = cut(_undecorated(function), functools.partial(_run, masks=masks))
    if made is not None:
        missed.register(made)
    if not isinstance(made, Cut):
        return False
    form = made.form if decorator is None else decorator(made.form)

    @functools.wraps(function)
    def method(self, *args, **kwargs):
        if torch.compiler.is_dynamo_compiling() and _for_us():
            return form(self, *args, **kwargs)
        return function(self, *args, **kwargs)

    setattr(cls, name, method)
    return True


@torch._dynamo.assume_constant_result
def _for_us() -> bool:
    return our_options() is not None


def _run(cut: Any, masks: bool) -> Callable[[torch.nn.Module, tuple], torch.Tensor | None]:
    """`run` for the loop of `cut`, which Dynamo itself gets to see nothing of."""
    plan_of = constant_of_module(lambda owner: _plan(cut, owner))
    at = None if cut.appends else cut.live.index(cut.total)
    masks = (masks or cut.fills) and not cut.asks  # a branch on the data breaks the graph whatever it has
    return lambda owner, live: run(plan_of, owner, live, at, masks)


def run(plan_of: Callable, owner: torch.nn.Module, live: tuple, at: int | None, masks: bool) -> torch.Tensor | None:
    """What a loop adds up in `owner`, as one op, or what it puts into its list, one after the other; None if that is
    not proven. Traced by Dynamo.

    `live`: the values of the loop's local variables; `at`: where among them is what it adds onto; `masks`: whether what
    is not proven of the loop may be of its graph.
    """
    if not torch.compiler.is_dynamo_compiling():
        return None  # Dynamo gave the form up and runs it as it is
    comptime(_look)
    plan = plan_of(owner)
    if plan is None:
        if masks:
            capture.ask_for_masks()
        return None
    call, passed = plan
    total = None
    if call is not None:
        x, ids, weights, dtype, *banks, spec, engine, rate, slots = call
        x, ids = _value(owner, live, x), _slots(_value(owner, live, ids), slots)
        weights = torch.ones_like(ids, dtype=x.dtype) if weights is None else _value(owner, live, weights)
        weights = weights if weights.dim() == 2 and weights.shape[1] == slots else weights.reshape(-1, slots)
        banks = [[t for bank in kind for t in _bank(owner, live, bank)] for kind in banks]
        if any(t.dtype != dtype for kind in banks for t in kind):
            return None  # others in their place while this is traced: `torch.func.functional_call`
        if rate:  # of each slot's row, so that there are tokens with one slot each
            x, ids, weights = x.unsqueeze(1).expand(-1, slots, -1).flatten(0, 1), *(_each(t) for t in (ids, weights))
        total = torch.ops.mok.experts.default(x.to(dtype), ids, weights, *banks, spec, engine)[0]
        comptime(_mark)
        if rate:
            comptime(_mark_open)
            total = torch.nn.functional.dropout(total, rate).unflatten(0, (-1, slots)).sum(1)
    for lo, hi, x, ids, weights in passed:
        x, ids, weights = _value(owner, live, x), _slots(_value(owner, live, ids)), _value(owner, live, weights)
        share = torch.where((ids >= lo) & (ids < hi), weights, 0).sum(1, keepdim=True)
        total = x * share if total is None else total + x * share
    if at is not None and live[at].dim() != total.dim():
        total = total.view(live[at].shape)
    if _verified():
        # The loop's variables stay in the graph for the backend to run it on.
        tensors, sizes = _leaves(live, torch.Tensor), _leaves(live, int)
        total = torch.ops.mok_loop.witness.default(total, tensors, sizes)
        comptime(_call_witness)
    return total


def _leaves(live: Any, kind: type) -> list:
    """All of this kind in `live`, in order."""
    found = []
    for value in live:
        if isinstance(value, (list, tuple)):
            found += _leaves(value, kind)
        elif kind is torch.Tensor and np is not None and isinstance(value, np.ndarray):
            found.append(torch.as_tensor(value))
        elif isinstance(value, kind) and not isinstance(value, bool):
            found.append(value)
    return found


@torch._dynamo.assume_constant_result
def _verified() -> bool:
    """Whether the op is to be compared with the loop."""
    from mok_compile.passes.loops import witness  # noqa: F401  registers the op

    return our_options().verify


def _slots(ids: torch.Tensor, slots: int = 1) -> torch.Tensor:
    ids = ids if ids.dim() == 2 else ids.reshape(-1, slots)
    return ids if ids.dtype in (torch.int64, torch.int32) else ids.long()


def _each(slots: torch.Tensor) -> torch.Tensor:
    return slots.reshape(-1, 1)


def _value(owner: torch.nn.Module, live: tuple, recipe: tuple) -> torch.Tensor:
    """The tensor that `recipe` (of `_recipe`) says."""
    kind, *rest = recipe
    if kind == "local":
        return live[rest[0]]
    if kind == "attribute":
        return _attribute(owner, rest[0])
    base, *more = rest
    base = _value(owner, live, base)
    if kind == "flat":
        return base.reshape(-1, base.shape[-1])
    if kind == "chosen":
        hit = base != 0
        return torch.where(hit.any(-1), hit.int().argmax(-1), base.shape[-1])
    if kind == "row_ids":
        rows = _value(owner, live, more[0])
        # The counts may be an array of numpy, in the CPU's memory.
        ends = torch.as_tensor(base, device=rows.device).cumsum(0)
        return torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    if kind == "sum":
        dims, keepdim, dtype = more
        return base.sum(dims, keepdim, dtype=dtype)
    if kind == "tally":
        base = base.reshape(-1).long()
        return base.new_zeros(more[0]).scatter_add(0, base, torch.ones_like(base))
    if kind == "gather":
        ids = _slots(_value(owner, live, more[0]))
        return torch.gather(base, 1, ids.long().clamp(0, base.shape[1] - 1))
    return getattr(base, kind)(*more)


def _attribute(module: torch.nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _bank(owner: torch.nn.Module, live: tuple, recipe: tuple) -> list[torch.Tensor]:
    """A weight or bias of all experts, as the op takes it: one tensor, or one for each expert."""
    kind, source, dtype, transposed = recipe
    if kind == "stacked":
        tensors = [_value(owner, live, source)]
    elif kind == "listed":
        place, count = source
        tensors = list(live[place][:count])
    else:
        # Straight from the dictionaries: thousands of parameters, each of which costs Dynamo every call on the way.
        container, keys, path, store, name = source
        modules = getattr(owner, container) if container else owner
        tensors = []
        for key in keys:
            module = modules._modules[key]
            for step in path:
                module = module._modules[step]
            tensors.append((module._parameters if store == "parameters" else module._buffers)[name])
    if dtype is not None:
        tensors = [t.to(dtype) for t in tensors]
    return [t.transpose(-2, -1) for t in tensors] if transposed else tensors


def _look(context: Any) -> None:
    """Notes the loop's local variables, and where its module is from, while Dynamo traces `run`."""
    _live.clear()
    try:
        owner, live = (variable_of(context, name) for name in ("owner", "live"))
        nodes = [v.as_proxy().node if v.realize().is_tensor() else None for v in live.items]
        _live.append((tuple(_example(variable) for variable in live.items), nodes, owner.source, _alone()))
    except AttributeError:  # Dynamo's own classes, which another release of torch may have changed: a loop stays a loop
        log.warning("mok-compile: this release of torch keeps its variables otherwise; please report", exc_info=True)


def _alone() -> bool:
    """Whether Dynamo traces what is asked for the loop's result as a frame of its own, having given the method up."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    code = InstructionTranslator.current_tx().output.root_tx.f_code
    return code.co_filename == __file__ and code.co_name in (run.__name__, "<lambda>")


def _mark(context: Any) -> None:
    """Marks the call of the op as a loop."""
    from mok_compile.passes.fusing.traced import MARK

    variable_of(context, "total").as_proxy().node.args[0].meta[MARK] = True


def _mark_open(context: Any) -> None:
    """Says what is done to the rows of the op's experts before they are added up."""
    from mok_compile.passes.fusing.traced import OPEN

    variable_of(context, "total").as_proxy().node.args[0].meta[OPEN] = "dropout works on the experts' outputs"


def _call_witness(context: Any) -> None:
    """Notes at the witness which loop it is of, and what its variables are."""
    from mok_compile.passes.loops.witness import MARK, Size, Tensor, Witness

    places, sizes = itertools.count(), itertools.count()

    def told(variable: Any) -> Any:
        variable = variable.realize()
        if variable.is_tensor():
            return Tensor(next(places))
        if variable.python_type() is list:
            return [told(v) for v in variable.items]
        if issubclass(variable.python_type(), tuple):
            return tuple(told(v) for v in variable.unpack_var_sequence(None))
        example = _example(variable)
        return Size(next(sizes)) if isinstance(example, (int, torch.SymInt)) and type(example) is not bool else example

    live = tuple(told(variable) for variable in variable_of(context, "live").items)
    cut, owner = _proven.pop()
    variable_of(context, "total").as_proxy().node.meta[MARK] = Witness(cut, owner, live)


def trace_again_if_wrong(gm: torch.fx.GraphModule, inputs: Sequence[Any] | None, options: Options) -> None:
    """Under ``mok.verify``: compares each block of `gm` that was a loop with that loop, on the real `inputs` of the
    graph. If one differs, has Dynamo trace the frame once more, with the loop as it is."""
    from mok_compile.passes.fusing.traced import VERIFIED
    from mok_compile.passes.loops.witness import question

    wrong = False
    for verdict in question(gm, inputs if options.verify else None):
        verdict.call.meta[VERIFIED] = verdict.comparison.worst
        if verdict.comparison.failed:
            wrong, detail = True, verdict.comparison.detail
            distrusted[verdict.owner] = f"its op differs from the loop: {detail}"
            log.warning("mok-compile: a loop in %s is not what it was proven to be (%s); please report",
                        type(verdict.owner).__name__, detail)  # fmt: skip
    if wrong:
        trace_again("a loop over experts is another")


def _example(variable: Any) -> Any:
    """A variable of Dynamo as a fake tensor, a number, or a list of these; None for anything else."""
    variable = variable.realize()
    if variable.is_tensor():
        return variable.as_proxy().node.meta["example_value"]
    if hasattr(variable, "sym_num"):
        return variable.sym_num
    if type(variable).__name__ == "ListVariable":
        return [_example(v) for v in variable.items]
    try:
        return variable.as_python_constant()
    except Exception:  # Dynamo's own error for what is no constant, which has changed its name before
        return None


def _plan(cut: Any, owner: torch.nn.Module) -> tuple | None:
    """What `run` has to call: nested tuples of constants. None, with the reason in `refused`, without a proof."""
    from mok_compile.integrations.guards import guard
    from mok_compile.integrations.proofs import proven
    from mok_compile.passes.facts.one_hot import is_blank, is_distinct, is_one_hot
    from mok_compile.passes.facts.rules import Break
    from mok_compile.passes.loops.iteration import Known

    if not _live:
        return None
    met.add(owner)
    live, nodes, source, alone = _live.pop()
    if cut.fills and not cut.asks and not capture.given_up():
        return None  # without a branch on the data the graph has it all, weights and sum included
    _proven[:] = [(cut, weakref.ref(owner))]
    try:
        if owner in distrusted:
            raise Break("verify", distrusted[owner])
        if not cut.appends and _is_given(nodes[cut.live.index(cut.total)]):
            raise Break("mutation", "the loop adds onto a tensor from outside of the graph, which it may read besides")
        told = (
            frozenset(i for i, n in enumerate(nodes) if n and says(n)) for says in (is_one_hot, is_distinct, is_blank)
        )
        known = Known(*told, *_counted(live, nodes)) if cut.appends else Known(*told)
        engine = our_options().engine
        provers[owner] = functools.partial(_refusal, cut, live, known, engine)
        plan, reach = proven(
            cut,
            owner,
            (*live, known.masks, known.distinct, known.blank, known.counted, known.sized, engine),
            lambda reach: _proof(cut, owner, live, known, engine, reach),
        )
        guard(owner, source, reach)
    except Break as stop:
        # Where the graph then breaks, the loop comes again, in a frame that knows less.
        if not alone:
            refused.setdefault(owner, (stop.reason, stop.detail))
        log.debug("mok-compile: a loop in %s stays a loop: %s", type(owner).__name__, stop.detail)
        return None
    except Exception as error:  # a bug of ours must not end the user's compile
        log.warning("mok-compile: a loop over experts could not be analysed; please report", exc_info=True)
        refused.setdefault(owner, (DATA_DEPENDENT, f"the loop could not be analysed: {error!r}"))
        return None
    refused.pop(owner, None)
    met.discard(owner)
    return plan


def _refusal(cut: Any, live: tuple, known: Any, engine: str, other: torch.nn.Module) -> tuple[str, str] | None:
    """Why the loop of `cut` stays one in a module that nothing was traced for; None if it would not."""
    from mok_compile.passes.facts.rules import Break
    from mok_compile.passes.loops.reach import Reach

    try:
        _proof(cut, other, live, known, engine, Reach(other, cut.probe))
    except Break as stop:
        return stop.reason, stop.detail
    except Exception as error:  # as in _plan
        return DATA_DEPENDENT, f"the loop could not be analysed: {error!r}"
    return None


def _proof(cut: Any, owner: torch.nn.Module, live: tuple, known: Any, engine: str, reach: Any) -> tuple:
    """What `run` has to call. Break with what the user is told where that is not proven."""
    from mok_compile.passes.facts.rules import Break
    from mok_compile.passes.loops.iteration import understand

    try:
        return _written(understand(cut, owner, live, known, reach), owner, engine)
    except Break as stop:
        raise Break(*_said(stop)) from None


def _said(stop: Any) -> tuple[str, str]:
    """Reason code and sentence of a loop that is not proven, with the line where that showed. The code is that of the
    graph's break, unless the proof ended at something that the experts compute."""
    from mok_compile.passes.graph.source import line_of_error, source_of

    source = line_of_error(stop) if stop.at is None else source_of(stop.at)
    line = "" if source is None else f" (at {source}{source.code and ': '}{source.code})"
    reason = DATA_DEPENDENT if stop.reason == "no-match" and stop.at is None else stop.reason
    return reason, f"{stop.detail}{line}"


def _is_given(node: torch.fx.Node | None) -> bool:
    """Whether the tensor of `node` is in the memory of one that the graph gets: an argument, a parameter, a buffer."""
    from mok_compile.passes.loops.iteration import memory_of

    if node is None:
        return False
    examples = (n.meta.get("example_value") for n in node.graph.nodes if n.op in ("placeholder", "get_attr"))
    given = {memory_of(example) for example in examples if isinstance(example, torch.Tensor)} - {None}
    return memory_of(node.meta["example_value"]) in given


def _counted(live: tuple, nodes: list) -> tuple[frozenset[tuple[int, int]], frozenset[tuple[int, int]]]:
    """The pairs of `Known.counted` and of `Known.sized`."""
    from mok_compile.passes.facts.counted import added_up
    from mok_compile.passes.facts.rules import same

    tensors = {i: live[i] for i, n in enumerate(nodes) if n is not None and live[i].dim()}
    integers = [i for i, t in tensors.items() if not t.dtype.is_floating_point and not t.dtype.is_complex]
    sums = {i: added_up(nodes[i]) for i, t in tensors.items() if i in integers or t.dim() == 1}
    sizes = {i: math.prod(live[i].shape) for i in integers}

    def with_rows(numbers: dict) -> frozenset[tuple[int, int]]:
        known = ((i, n) for i, n in numbers.items() if n is not None)
        return frozenset((i, j) for i, n in known for j, t in tensors.items() if same(n, t.shape[0]))

    return with_rows(sums), with_rows(sizes)


def _written(parts: tuple, owner: torch.nn.Module, wanted: str) -> tuple | None:
    from mok_compile import engines, ops  # noqa: F401  registers the op
    from mok_compile.passes.facts.rules import Break

    calls = [part for part in parts if part.block is not None]
    if len(calls) != 1:
        raise Break("no-match", "the loop runs no experts")
    (part,) = calls
    block, recipe = part.block, functools.partial(_recipe, part=part, owner=owner)
    bank = functools.partial(_bank_recipe, part=part, owner=owner)
    weight = lambda w: bank(w.stored, w.transposed)  # noqa: E731
    up_bias = tuple(bank(b, False) for b in block.up_bias)
    down_bias = () if block.down_bias is None else (bank(block.down_bias, False),)
    up, down = tuple(map(weight, block.up)), weight(block.down)
    if len({kind == "stacked" for kind, *_ in (*up, down, *up_bias, *down_bias)}) > 1:
        raise Break("layout", "some weights are stored for all experts together, others for each alone")
    experts, inner, hidden = block.down.shape
    problem = engines.Problem(
        hidden=hidden,
        intermediate=inner,
        num_experts=experts,
        top_k=1 if part.dropout else block.k,
        dtype=block.down.stored.meta.dtype,
        weights_dtype=block.x.meta.dtype if block.weights is None else block.weights.meta.dtype,
        device=block.x.meta.device,
        stacked=down[0] == "stacked",
        row_major=not block.down.transposed,
    )
    weights = None if block.weights is None else recipe(block.weights)
    engine = engines.choose(block.spec, problem, wanted).name
    operands = (recipe(block.x), recipe(block.ids), weights, problem.dtype, up, (down,), up_bias, down_bias)
    passed = tuple(_passed_recipe(p, owner) for p in parts if p.passed is not None)
    return (*operands, block.spec.to_json(), engine, part.dropout, block.k), passed


def _passed_recipe(part: Any, owner: torch.nn.Module) -> tuple:
    rows = part.passed.rows
    return part.lo, part.hi, *(_recipe(v, part, owner) for v in (rows.x, rows.ids, rows.weight))


def _recipe(value: Any, part: Any, owner: torch.nn.Module) -> tuple:
    """How to compute `value`, of the recorded turn, from local variables and attributes."""
    from mok_compile.passes.facts.rules import Break, same
    from mok_compile.passes.loops.standins import Local
    from mok_compile.passes.loops.turn import CHOSEN, FLAT, ROW_IDS

    recipe = functools.partial(_recipe, part=part, owner=owner)
    if value.op == "input":
        source = part.sources[value.args[0]]
        if isinstance(source, Local) and not source.listed:
            return "local", source.place
        for name, tensor in (*owner.named_parameters(), *owner.named_buffers()):
            if tensor is source:
                return "attribute", name
    aten, args = torch.ops.aten, value.args
    method = {
        aten.view.default: "view",
        aten._unsafe_view.default: "view",
        aten.transpose.int: "transpose",
        aten.unsqueeze.default: "unsqueeze",
        aten.squeeze.dim: "squeeze",
        aten._to_copy.default: "to",
        aten.slice.Tensor: "narrow",
        aten.select.int: "select",
        aten.mul.Tensor: "mul",
    }.get(value.op)
    if value.op is aten.gather.default and value.number < 0:
        return "gather", recipe(args[0]), recipe(args[2])
    if value.op == CHOSEN:
        return value.op, recipe(args[0])
    rows = method == "view" and len(value.meta.shape) == 2 and same(value.meta.shape[1], args[0].meta.shape[-1])
    if value.op == FLAT or rows:
        return FLAT, recipe(args[0])
    if method == "view" and len(value.meta.shape) == 1:
        return "reshape", recipe(args[0]), -1
    if value.op == ROW_IDS:
        return value.op, recipe(args[0]), recipe(args[1])
    if value.op is torch.ops.mok_loop.tally.default:
        counted = args[0]
        while counted.op in (aten.view.default, aten._unsafe_view.default):
            counted = counted.args[0]
        return "tally", recipe(counted), args[1]
    if value.op is aten.sum.dim_IntList and not value.meta.dtype.is_floating_point:
        dims, keepdim, *_ = (*args[1:], False)
        return "sum", recipe(args[0]), dims, keepdim, value.meta.dtype
    if value.op is aten._to_copy.default:
        return method, recipe(args[0]), value.meta.dtype
    if value.op is aten.slice.Tensor and all(map(same, value.meta.shape, args[0].meta.shape)):
        return recipe(args[0])  # takes everything
    if value.op in (aten.slice.Tensor, aten.mul.Tensor, aten.squeeze.dim) and value.number < 0:
        return method, recipe(args[0]), *args[1:]
    if method in ("select", "transpose", "unsqueeze"):
        return method, recipe(args[0]), *args[1:]
    if method == "view" and not any(isinstance(a, torch.SymInt) for a in value.meta.shape):
        return method, recipe(args[0]), *args[1:]
    raise Break("layout", f"an operand of the experts is computed inside the loop ({value.op})")


def _bank_recipe(value: Any, transposed: bool, part: Any, owner: torch.nn.Module) -> tuple:
    from mok_compile.passes.loops.standins import Local, Members

    dtype, base = None, value
    if value.op is torch.ops.aten._to_copy.default and value.number < 0:
        dtype, base = value.meta.dtype, value.args[0]
    source = part.sources.get(base.args[0]) if base.op == "input" else None
    if isinstance(source, Members):
        *path, name = source.name.split(".")
        members = getattr(owner, source.container) if source.container else owner
        module = members[source.keys[0]].get_submodule(".".join(path))
        store = "parameters" if name in module._parameters else "buffers"
        keys = tuple(map(str, source.keys))
        return "members", (source.container, keys, tuple(path), store, name), dtype, transposed
    if isinstance(source, Local) and source.listed:
        return "listed", (source.place, base.meta.shape[0]), dtype, transposed
    return "stacked", _recipe(value, part, owner), None, transposed
