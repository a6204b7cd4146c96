"""Calls of a loop's code that nobody can see into, and that may do more than compute.

What a call of Python's own code does can be compared before and after (`mok_compile.passes.loops.effects`). A function
written in C may write a file, put something into a queue or change a setting, or answer with the time of day: with one
op for all experts that would not happen, or happen once. Python's profiler tells of each such call before it runs.
Known are those that only compute; any other ends the proof, and has done nothing.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import functools
import gc
import itertools
import operator
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mok_compile.passes.facts.rules import Break
from mok_compile.passes.graph.source import INSIDE
from mok_compile.passes.loops.reach import Reach, codes_of

_VIEWS = tuple(type(getattr({}, name)()) for name in ("keys", "values", "items"))
# What never changes, so that all its methods only compute.
_VALUES = (
    *(bool, int, float, complex, str, bytes, tuple, frozenset, range, slice, type(None), re.Pattern, re.Match),
    *(types.MappingProxyType, types.GeneratorType, types.FunctionType, types.MethodType, types.CodeType, *_VIEWS),
    *(torch.Tensor, torch.dtype, torch.device, torch.finfo, torch.iinfo, torch.layout, torch.memory_format),
)
_CONTAINERS = (list, dict, set, collections.deque)
_READS = frozenset(
    {
        *("copy", "count", "difference", "get", "index", "intersection", "isdisjoint", "issubset", "issuperset"),
        *("items", "keys", "symmetric_difference", "union", "values"),
        *("__contains__", "__getitem__", "__iter__", "__len__", "__reversed__"),
    }
)
_OF_ALL_OBJECTS = frozenset({"__dir__", "__format__", "__init_subclass__", "__reduce_ex__", "__sizeof__"})
_BUILTINS = frozenset(
    {
        *("abs", "all", "any", "ascii", "bin", "callable", "chr", "dir", "divmod", "format", "getattr", "hasattr"),
        *("hash", "hex", "id", "isinstance", "issubclass", "iter", "len", "locals", "max", "min", "next", "oct"),
        *("ord", "pow", "repr", "round", "sorted", "sum", "vars"),
    }
)
_FUNCTIONS = frozenset(
    {
        *(("_functools", "cmp_to_key"), ("_functools", "reduce"), ("_thread", "RLock"), ("_thread", "allocate_lock")),
        *(("_thread", "get_ident"), ("nt", "fspath"), ("posix", "fspath"), ("sys", "getsizeof"), ("sys", "intern")),
    }
)
_LOCKS = (type(_thread.allocate_lock()), type(_thread.RLock()))
_MODULES = frozenset({"_abc", "_bisect", "_operator", "_string", "cmath", "itertools", "math", "unicodedata"})
_WRITE = frozenset(  # of the functions in these modules, or call others unseen
    {
        *("call", "delitem", "iadd", "iand", "iconcat", "imul", "insort", "insort_left", "insort_right", "ior"),
        *("ixor", "setitem"),
    }
)
_TORCH = frozenset({"torch._C._nn", "torch._C._special", "torch._C._linalg", "torch._C._fft", "torch._C._sparse"})
_ASKS = ("is_", "_is_", "get_", "_get_", "has_", "_has_", "sym_", "_check", "_assert", "are_", "__")
_NUMPY_WRITES = frozenset(
    {
        *("byteswap", "dump", "fill", "itemset", "partition", "put", "resize", "setfield", "setflags", "sort"),
        *("tofile", "copyto", "place", "putmask", "seterrobj", "set_printoptions", "fromfile"),
    }
)
# Python's part of torch that only computes, besides modules that are its own affair, and what in these does more.
_TORCH_CODE = (
    *("torch._dynamo.decorators", "torch._dynamo.eval_frame", "torch._dynamo.external_utils", "torch.amp"),
    *("torch.autograd", "torch.cpu.amp", "torch.cuda.amp", "torch.functional", "torch.fx.experimental", "torch.jit"),
    *("torch.nn", "torch.overrides", "torch.torch_version", "torch.utils.checkpoint"),
)
_TORCH_ASKS = frozenset({"current_device", "device_count"})
_TORCH_DOES = re.compile("backward$|grad$|register_|retain_grad$|save|set_|share_memory_$")
_WRAPPERS = frozenset(
    {"torch._compile", "torch._dynamo.eval_frame", "torch._dynamo.external_utils", "torch.utils._contextlib"}
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep
# Call others without the profiler's being told.
_CALLERS = (
    *(map, filter, functools.partial, functools.reduce, itertools.starmap, itertools.accumulate, itertools.takewhile),
    *(itertools.dropwhile, itertools.filterfalse, itertools.groupby, iter, collections.defaultdict),
)


def check_called(reach: Reach) -> None:
    """No object that code of `reach` can call is one whose calls the profiler says nothing of."""
    hidden = next((value for value in reach.held(reach.owner) if _is_hidden(value)), None)
    if hidden is not None:
        named = getattr(hidden, "__qualname__", type(hidden).__qualname__)
        raise Break("mutation", f"the loop can call {named}, which may do more than compute, unseen")


class _Refused(BaseException):
    """Goes through code that catches any Exception."""


@contextlib.contextmanager
def watched(reach: Reach) -> Iterator[None]:
    """While this lasts, a call from the code of this thread that may do more than compute does not happen, and is
    Break("mutation"), also where the code has caught that."""
    watch = _Watch(reach)
    paused = gc.isenabled()
    gc.disable()  # finalisers of others are no code of the loop
    try:
        with _profiled(watch):
            yield
    except (Exception, _Refused):
        if watch.stop is None:
            raise
    finally:
        if paused:
            gc.enable()
    if watch.stop is not None:
        raise watch.stop


def unwatched(function: Callable) -> Callable:
    """`function`, which no code of the loop is called from, without the cost of watching it."""

    @functools.wraps(function)
    def unseen(*args, **kwargs):
        watch = sys.getprofile()
        if not isinstance(watch, _Watch):
            return function(*args, **kwargs)
        sys.setprofile(None)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(watch)

    return unseen


@contextlib.contextmanager
def _profiled(watch: Callable) -> Iterator[None]:
    before = sys.getprofile()
    switch = before is not None and not callable(before)  # a profiler written in C
    if switch and not hasattr(before, "disable"):
        raise Break("data-dependent", f"a profiler ({type(before).__name__}) runs that nothing can stand in for")
    if switch:
        before.disable()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None if switch else before)
        if switch:
            before.enable()


class _Watch:
    """The profiler's function; `stop` is why the proof has ended."""

    def __init__(self, reach: Reach) -> None:
        self.stop: Break | None = None
        self._reach = reach
        self._code = {id(code) for function in reach.functions for code in codes_of(function.__code__)}
        self._known: set[types.CodeType] = set()
        self._callbacks: dict[types.CodeType, bool] = {}
        self._mark: list = []  # is older than all that is made from now on

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "c_call":
            if self._is_loops(frame) and not self._computes(arg):
                # What a `with` has entered, of which nothing was told, is left: another turn might wait for it.
                self._refuse(frame, arg.__qualname__, at_once=arg.__name__ != "__exit__")
        elif event == "call":
            if not _is_inside(code.co_filename):
                if code not in self._known and self._is_loops(frame):
                    self._known.add(code)
                    self._check_named(frame)
            elif self._is_loops(caller := _caller(frame)) and not _may_enter(frame) and not self._is_callback(frame):
                self._refuse(caller, f"{frame.f_globals.get('__name__')}.{code.co_name}")

    def _is_loops(self, frame: types.FrameType | None) -> bool:
        """Whether `frame` is of the loop's code, or of a library that this calls: not torch."""
        while frame is not None and not _is_inside(frame.f_code.co_filename):
            if id(frame.f_code) in self._code and not _is_library(frame.f_code):
                return True
            if self._is_callback(frame):
                return False
            frame = frame.f_back
        return False

    def _is_callback(self, frame: types.FrameType) -> bool:
        """Whether `frame` is called because something that a weak reference is of has died, which is no call of the
        code that it interrupts."""
        code = frame.f_code
        if code not in self._callbacks:
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            self._callbacks[code] = isinstance(first, weakref.ref) and first() is None
        return self._callbacks[code]

    def _refuse(self, frame: types.FrameType, name: str, at_once: bool = True) -> None:
        """Ends the proof at a call of `name` from `frame`, or behind it; told is what the user's own code called, and
        where."""
        while id(frame.f_code) not in self._code or _is_library(frame.f_code):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            frame = frame.f_back
        detail = f"the loop calls {name}, which may do more than compute: one op for all experts would not"
        at = types.TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
        self.stop = self.stop or Break("mutation", detail).with_traceback(at)
        if at_once:
            raise _Refused

    def _computes(self, function: Any) -> bool:
        """Whether a call of `function`, which is written in C, leaves nothing behind."""
        owner, name = getattr(function, "__self__", None), function.__name__
        if name in _OF_ALL_OBJECTS:
            return True
        if isinstance(owner, _CONTAINERS):
            return name in _READS or self._is_new(owner)
        if isinstance(owner, _LOCKS):
            return name == "__exit__"
        return computes(function)

    def _is_new(self, container: Any) -> bool:
        """Whether `container` was made while this watches."""
        young = gc.get_objects(generation=0)
        new = {id(o) for o in itertools.dropwhile(lambda o: o is not self._mark, young)}
        if gc.is_tracked(container):
            return id(container) in new
        # Of numbers and strings alone, so that nobody keeps an account of it: new if nothing that is older holds it.
        passing = (types.FrameType, types.BuiltinMethodType)
        holders = (o for o in gc.get_referrers(container) if o is not young and not isinstance(o, passing))
        return all(id(o) in new for o in holders)

    def _check_named(self, frame: types.FrameType) -> None:
        """No call of what the code of `frame` names goes past the profiler."""
        code = frame.f_code
        found = [value for value in _named(frame) if not isinstance(value, types.ModuleType)]
        hidden = next((value for value in found if _is_hidden(value)), None)
        calls = any(value in _CALLERS for value in found if isinstance(value, (type, types.BuiltinFunctionType)))
        if hidden is None and (calls or any(isinstance(c, tuple) and "key" in c for c in code.co_consts)):
            held = (value for value in self._reach.held(self._reach.owner) if not _is_of_module(value))
            hidden = next((value for value in (*found, *held) if _may_do(value)), None)
        if hidden is not None:
            self._refuse(frame, getattr(hidden, "__qualname__", type(hidden).__qualname__))


def computes(function: Any) -> bool:
    """Whether a call of `function`, which is written in C, leaves nothing behind, whatever it is given."""
    owner, name = getattr(function, "__self__", None), function.__name__
    if isinstance(function, types.MethodDescriptorType):
        return name in _READS or issubclass(function.__objclass__, _VALUES)
    module = function.__module__ or (owner.__name__ if isinstance(owner, types.ModuleType) else "")
    if isinstance(owner, types.ModuleType) or owner is None:
        known = name in _BUILTINS if module == "builtins" else (module, name) in _FUNCTIONS
        known = known or (module in _MODULES and name not in _WRITE) or module in _TORCH
        known = known or function.__qualname__ == f"_VariableFunctionsClass.{name}"  # torch's, that are ops
        torchs = module.partition(".")[0] == "torch" and name.startswith(_ASKS)
        return known or torchs or (_is_numpys(module) and name not in _NUMPY_WRITES)
    if isinstance(owner, type):
        return issubclass(owner, (*_VALUES, *_CONTAINERS, types.SimpleNamespace)) or name in ("mro", "from_iterable")
    return isinstance(owner, _VALUES) or (_is_numpys(type(owner).__module__) and name not in _NUMPY_WRITES)


def _is_numpys(module: str) -> bool:
    return module.partition(".")[0] == "numpy" and not module.startswith("numpy.random")


def _caller(frame: types.FrameType) -> types.FrameType | None:
    """Who calls the function of `frame`, past what torch wraps its functions in."""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WRAPPERS:
        caller = caller.f_back
    return caller


def _may_enter(frame: types.FrameType) -> bool:
    """Whether other code may call this function of torch, written in Python, or of ours."""
    module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
    if module.partition(".")[0] != "torch" or name.startswith(_ASKS) or name in _TORCH_ASKS:
        return True
    if _TORCH_DOES.match(name):
        return False
    own = any(part.startswith("_") for part in module.split(".")) and not module.startswith("torch._dynamo")
    return own or any(module == known or module.startswith(f"{known}.") for known in _TORCH_CODE)


@functools.lru_cache(maxsize=4096)
def _is_inside(file: str) -> bool:
    """Whether `file` is one of torch's or of this package, or of Python's import."""
    return file.startswith((*INSIDE, "<frozen importlib"))


def _is_library(code: types.CodeType) -> bool:
    """Whether `code` is of Python's own library."""
    file = code.co_filename
    return file.startswith("<frozen ") or (file.startswith(_STDLIB) and "-packages" not in file[len(_STDLIB) :])


def _named(frame: types.FrameType) -> Iterator[Any]:
    """The globals and builtins that the code of `frame` names, what it names of modules, and what it has enclosed."""
    names = frame.f_code.co_names
    for name in names:
        space = frame.f_globals if name in frame.f_globals else frame.f_builtins
        value = space.get(name)
        yield value
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] != "torch":
            yield from (vars(value)[other] for other in names if other in vars(value))
    if frame.f_code.co_freevars:
        held = frame.f_locals
        yield from (held[name] for name in frame.f_code.co_freevars if name in held)


def _is_hidden(value: Any) -> bool:
    """Whether a call of `value` is one that the profiler says nothing of: of a type, or of an object, written in C."""
    if isinstance(value, functools._lru_cache_wrapper):
        return _may_do(value.__wrapped__)
    if isinstance(value, functools.partial):
        return any(map(_may_do, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, type):
        return _is_foreign(value) and not issubclass(value, Exception)
    return callable(value) and not isinstance(value, _SEEN) and _is_foreign(type(value))


def _is_of_module(value: Any) -> bool:
    """Whether `value` is a function of a module that is written in C, which code calls by its name."""
    return isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType)


def _may_do(value: Any) -> bool:
    """Whether something may be left behind where other code calls `value`, or a method of it."""
    if isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType)):
        return not isinstance(getattr(value, "__self__", None), _CONTAINERS) and not computes(value)
    return _is_hidden(value) or (not isinstance(value, (type, *_SEEN)) and _is_foreign(type(value)))


# Of what calls of these do, the profiler tells.
_SEEN = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType),
    *(staticmethod, classmethod, property, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.ModuleType),
)
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: of types that are written in C


def _is_foreign(cls: type) -> bool:
    """Whether `cls` has a base that is written in C, and that holds more than values."""
    bases = (base for base in cls.__mro__ if base.__flags__ & _IMMUTABLE)
    return not all(base in _PLAIN_TYPES or base.__module__.partition(".")[0] in _PLAIN_MODULES for base in bases)


_PLAIN_MODULES = (
    *("_functools", "_weakref", "builtins", "functools", "itertools", "numpy", "torch", "types", "typing", "weakref"),
)
_PLAIN_TYPES = frozenset(
    {
        *(*_VALUES, collections.deque, collections.OrderedDict, collections.defaultdict),
        *(operator.attrgetter, operator.itemgetter),
    }
)
