"""Guards on what a proof read of modules that Dynamo does not trace through.

A block that is proven from its modules' own code is valid as long as their attributes, types and the globals of that
code are what they were: a limit, an activation, whether a submodule is in training. Dynamo guards what it reads itself;
what only the proof has read is guarded here, by the same means, so that a change makes it trace anew. So is the code
itself with its defaults and closures, and the state of classes, by one guard of our own. What the traced
code itself has changed on the way is not yet done when the proof reads: there is no proof then.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource, Source, UnspecializedNNModuleSource
from torch._dynamo.variables.misc import NewGlobalVariable
from torch._guards import Guard

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.loops.likeness import HOOKS, describe_held
from mok_compile.passes.loops.reach import CALLS, CONTAINERS, Reach, is_constant, is_object


def guard(owner: torch.nn.Module, source: Source, reach: Reach) -> None:
    """Guards all that is in `reach` of a function called with `owner`. `source`: where Dynamo has `owner` from.

    Break if any of that is changed by what Dynamo has traced so far.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    _check_settled(owner, reach, InstructionTranslator.current_tx().output.side_effects)
    walk = _Walk(reach)
    walk.attributes(owner, source)
    space = InstructionTranslator.current_tx().import_source
    for module, name in sorted(reach.globals):
        walk.value(getattr(sys.modules[module], name), AttrSource(space(module), name))
    install_guard(space("torch").make_guard(_unchanged(reach, walk.rest, walk.unhooked)))


def _unchanged(reach: Reach, held: list, unhooked: list[dict]) -> Callable:
    """A guard of what has no source of Dynamo's: the code itself, what its closures hold, what belongs to classes, and
    the objects in `held`, which are none that Dynamo can look into. And of hooks, since a loop that stays one calls
    modules in eager mode, which runs those that came later (in a graph Dynamo would leave them out, and has guards for
    them only on request): one look at all of them, where experts may have hundreds."""
    methods = [(cls, name, getattr(cls, name, None)) for cls, name, _ in reach.methods()]
    methods = [method for method in methods if getattr(*method[:2], None) is method[2]]  # no bound methods
    functions = [(f, (f.__code__, f.__defaults__, f.__kwdefaults__)) for f in reach.functions]
    held = [*held, *(f.__kwdefaults__ for f in reach.functions if f.__kwdefaults__)]
    told = describe_held(reach, held)

    def check(_) -> bool:
        return (
            not any(unhooked)
            and all(getattr(cls, name, None) is method for cls, name, method in methods)
            and all((f.__code__, f.__defaults__, f.__kwdefaults__) == then for f, then in functions)
            and (not told or describe_held(reach, held) == told)
        )

    def create(builder: GuardBuilder, _: Guard) -> None:
        # Not `add_lambda_guard`, which took another argument on: https://github.com/pytorch/pytorch/pull/169999
        shown = [f"the code of experts is what it was ({id(check):x})"]
        builder.add_python_lambda_leaf_guard_to_root(["check(L)"], shown, {"check": check}, is_epilogue=False)

    return create


def _check_settled(owner: torch.nn.Module, reach: Reach, side_effects: SideEffects) -> None:
    """Dynamo does what the traced code does to objects only once the graph has run."""
    names = {name for _, name in reach.globals}
    globals_set = [set(m) for v, m in side_effects.store_attr_mutations.items() if isinstance(v, NewGlobalVariable)]
    changed = any(names & stored for stored in globals_set)
    for value in reach.objects(owner):
        variable = side_effects.id_to_variable.get(id(value))
        names = reach.names if value is not owner or reach.calls_owner else reach.names - CALLS
        changed |= not names.isdisjoint(side_effects.store_attr_mutations.get(variable, ()))
        held = [attribute for _, attribute in reach.attributes(value)]
        if isinstance(value, torch.nn.Module):
            held.append(value._modules)
        for container in (v for v in held if isinstance(v, CONTAINERS)):
            variable = side_effects.id_to_variable.get(id(container))
            changed |= variable is not None and side_effects.is_modified(variable)
    if changed:
        raise Break("mutation", "what the experts depend on is changed in the code before them")


class _Walk:
    """Guards one value after the other, each once; `rest` collects what no guard of Dynamo's tells apart, `unhooked`
    the dictionaries in which modules would have hooks."""

    def __init__(self, reach: Reach) -> None:
        self.reach, self.rest, self.unhooked = reach, [], []
        self._seen: set[int] = set()

    def attributes(self, value: Any, source: Source) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        for store in ("_parameters", "_buffers") if isinstance(value, torch.nn.Module) else ():
            for name in [name for name, tensor in getattr(value, store).items() if tensor is None]:
                place: Source = DictGetItemSource(AttrSource(source, store), name)
                install_guard(place.make_guard(GuardBuilder.CONSTANT_MATCH))
        if isinstance(value, torch.nn.Module) and value is not self.reach.owner:
            self.unhooked += [hooks for name in HOOKS if not (hooks := getattr(value, name))]
        if isinstance(value, torch.nn.Module) and self.reach.is_dynamic(value):
            install_guard(AttrSource(source, "_modules").make_guard(GuardBuilder.DICT_KEYS_MATCH))
        for name, attribute in self.reach.attributes(value):
            if isinstance(value, torch.nn.Module) and value._modules.get(name, value) is attribute:
                place = UnspecializedNNModuleSource(DictGetItemSource(AttrSource(source, "_modules"), name))
            else:
                place = AttrSource(source, name)
            self.value(attribute, place)

    def value(self, value: Any, source: Source) -> None:
        if isinstance(value, torch.Tensor):
            return
        if is_constant(value):
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        elif is_object(value):
            install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
            if isinstance(value, torch.nn.Module) and "forward" not in value.__dict__:
                absent = functools.partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr="forward")
                install_guard(source.make_guard(absent))
            self.attributes(value, source)
        elif type(value) in (list, tuple, dict, collections.OrderedDict):
            keyed = isinstance(value, dict)
            install_guard(source.make_guard(GuardBuilder.DICT_KEYS_MATCH if keyed else GuardBuilder.SEQUENCE_LENGTH))
            for key, item in value.items() if keyed else enumerate(value):
                self.value(item, DictGetItemSource(source, key) if keyed else GetItemSource(source, key))
        else:
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
            if not isinstance(value, (types.FunctionType, type)) and id(value) not in self._seen:
                self._seen.add(id(value))
                self.rest.append(value)
