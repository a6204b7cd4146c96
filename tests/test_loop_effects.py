"""Experts that do something besides computing: their loop stays one, and what they do is done, as often as in eager."""

import collections
import contextlib
import cProfile
import ctypes
import dataclasses
import enum
import functools
import gc
import io
import itertools
import logging
import math
import mmap
import numbers
import operator
import os
import queue
import random
import select
import socket
import subprocess
import sys
import threading
import time
import warnings
from array import array as numbers_in_a_row

import numpy as np
import pytest
import torch
from loops import E, H, Plain, Ranged
from test_module_lists import LOOP, Traced, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch.nn import functional as F

from mok_compile import explain

log = logging.getLogger("experts")
stats, deck, tally, names, lines = {}, collections.deque(), collections.Counter(), set(), []
counts, box = np.zeros(3), numbers_in_a_row("q", [0])
flag, waiting = threading.Event(), queue.SimpleQueue()
libc = ctypes.CDLL(None)
libc_time = libc.time
path = file = here = there = made = memory = later = output = None  # what each test has its own of


class Slotted:
    __slots__ = ("more", "seen")

    def __init__(self):
        self.seen = 0


class Kept:
    seen = 0
    told = ()


slotted = Slotted()
sink = io.StringIO()


class Doing(Plain):
    does = staticmethod(lambda x: None)

    def forward(self, x):
        self.does(x)
        return super().forward(x)


def _append(path, text):
    with open(path, "a") as file:
        file.write(text)


def _written(line):
    yield lines.append(line)


@functools.cache
def cached(size):
    path.open("a").write("cached")
    return size


def _count(holder=[0]):  # noqa: B006  that it is kept is the point
    holder[0] += 1


def _enclosed():
    number, kept = 0, []

    def count(x):
        nonlocal number
        number += 1

    def keep(x):
        kept.append(1)

    def update(x):
        kept[:] = [*kept, 1]

    return (count, lambda: number), (keep, lambda: list(kept)), (update, lambda: list(kept))


def _swallowed():
    with contextlib.suppress(Exception):
        path.open("a").write("kept")


def _content():
    return path.read_text() if path.exists() else ""


def _emptied():
    found = []
    while not waiting.empty():
        found.append(waiting.get())
    return found


# What an expert does, and what can be seen of it: never the same before and after.
EFFECTS = {
    "open": (lambda x: open(path, "a").write("a"), _content),  # noqa: SIM115
    "with open": (lambda x: _append(path, "a"), _content),
    "Path.open": (lambda x: path.open("a").write("a"), _content),
    "Path.write_text": (lambda x: path.write_text(_content() + "a"), _content),
    "FileIO": (lambda x: io.FileIO(path, "a").write(b"a"), _content),
    "os.write": (lambda x: os.write(file.fileno(), b"a"), _content),
    "os.system": (lambda x: os.system(f"echo a >> {path}"), _content),
    "subprocess": (lambda x: subprocess.run(["sh", "-c", f"echo a >> {path}"], check=True), _content),
    "write": (lambda x: file.write("a") and file.flush(), _content),
    "global sink": (lambda x: sink.write("a"), sink.getvalue),
    "stdout": (lambda x: sys.stdout.write("a"), lambda: output.readouterr().out),
    "print to": (lambda x: print("a", file=sink), sink.getvalue),
    "SimpleQueue": (lambda x: waiting.put("a"), waiting.qsize),
    "Queue": (lambda x: made.put("a"), lambda: made.qsize()),
    "mapped": (lambda x: list(map(waiting.put, [1])), waiting.qsize),
    "partial": (lambda x: functools.partial(waiting.put, 1)(), waiting.qsize),
    "kept partial": (lambda x: later(), waiting.qsize),
    "methodcaller": (lambda x: operator.methodcaller("put", 1)(waiting), waiting.qsize),
    "sort": (lambda x: [1].sort(key=waiting.put), waiting.qsize),
    "socket": (lambda x: here.send(b"a"), lambda: there.recv(1000, socket.MSG_PEEK) if _ready() else b""),
    "environ item": (lambda x: _environ(), lambda: os.environ.get("MOK_T")),
    "event": (lambda x: flag.set(), flag.is_set),
    "ctypes": (lambda x: libc.setenv(b"MOK_C", b"1", 1), lambda: _getenv(b"MOK_C")),
    "save": (lambda x: torch.save({}, path), lambda: path.stat().st_size),
    "threads": (lambda x: torch.set_num_threads(3), torch.get_num_threads),
    "default dtype": (lambda x: torch.set_default_dtype(torch.float16), torch.get_default_dtype),
    "deque": (lambda x: deck.append(1), lambda: list(deck)),
    "Counter": (lambda x: tally.update(a=1), lambda: dict(tally)),
    "setdefault": (lambda x: stats.setdefault("a", []).append(1), lambda: str(stats)),
    "dict item": (lambda x: stats.update(a=stats.get("a", 0) + 1), lambda: dict(stats)),
    "set": (lambda x: names.add("a"), lambda: set(names)),
    "list": (lambda x: lines.append("a"), lambda: list(lines)),
    "unbound": (lambda x: list(map(list.append, [lines], ["a"])), lambda: list(lines)),
    "function": (lambda x: _count_on_itself(), lambda: _count_on_itself.calls),
    "empty slot": (lambda x: _fill_slot(), lambda: getattr(slotted, "more", 0)),
    "generator": (lambda x: list(_written("a")), lambda: list(lines)),
    "default": (lambda x: _count(), lambda: str(_count.__defaults__)),
    "setattr": (lambda x: setattr(Kept, "seen", Kept.seen + 1), lambda: Kept.seen),
    "class attribute": (lambda x: _count_in_class(), lambda: Kept.seen),
    "class list": (lambda x: Kept.told.append(1), lambda: list(Kept.told)),
    "slots": (lambda x: _count_in_slots(), lambda: slotted.seen),
    "array": (lambda x: _count_in_array(), lambda: box[0]),
    "numpy": (lambda x: _count_in_numpy(), lambda: counts.tolist()),
    "memory": (lambda x: memory.write(b"a"), lambda: bytes(memory)),
    "memory item": (lambda x: _write_memory(), lambda: bytes(memory)),
    "globals": (lambda x: globals().update(number=number + 1), lambda: number),
    "cached": (lambda x: cached(3), _content),
    "logging": (lambda x: log.warning("a"), sink.getvalue),
    "swallowed": (lambda x: _swallowed(), _content),
    "thread": (lambda x: _threaded(), waiting.qsize),
    "switch interval": (lambda x: sys.setswitchinterval(0.004), sys.getswitchinterval),
    "filters": (lambda x: warnings.simplefilter("ignore", UnicodeWarning), lambda: str(warnings.filters)),
}
# What is told of those that are no call, or of which something else is told first.
CHANGES = "the loop changes more than tensors"
CHANGED = ("default", "class attribute", "slots", "empty slot", "function", "unbound", "array", "numpy", "memory item")
TOLD = dict.fromkeys(CHANGED, CHANGES) | {
    "os.write": "the loop can read an iterator",
    "write": "the loop can read an iterator",
    "global sink": "the loop can read an iterator",
    "stdout": "the loop can read an iterator",
    "print to": "the loop can read an iterator",
    **dict.fromkeys(("subprocess", "logging", "thread"), "asks for the type of something"),
}
number = 0


def _environ():
    os.environ["MOK_T"] = os.environ.get("MOK_T", "") + "a"


def _getenv(name):
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    return get(name)


def _count_in_class():
    Kept.seen += 1


def _count_in_slots():
    slotted.seen += 1


def _fill_slot():
    slotted.more = getattr(slotted, "more", 0) + 1


def _count_on_itself():
    _count_on_itself.calls += 1


_count_on_itself.calls = 0


def _count_in_array():
    box[0] += 1


def _count_in_numpy():
    counts[1] += 1


def _write_memory():
    memory[0] = memory[0] + 1


def _threaded():
    thread = threading.Thread(target=waiting.put, args=(1,))
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def world(tmp_path, monkeypatch, capsys):
    """All that effects can be seen in, as before any of them, also as a function that makes it so again."""
    monkeypatch.delenv("MOK_T", raising=False)
    handler = logging.StreamHandler(sink)
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "propagate", False)
    threads, interval, filters = torch.get_num_threads(), sys.getswitchinterval(), list(warnings.filters)

    def anew():
        global number, path, file, here, there, made, memory, later, output
        output = capsys
        path = tmp_path / "told"
        path.unlink(missing_ok=True)
        here, there = socket.socketpair()
        file, made, memory, later = path.open("a"), queue.Queue(), mmap.mmap(-1, 16), functools.partial(waiting.put, 1)
        for held in (stats, deck, tally, names, lines):
            held.clear()
        slotted.__init__(), setattr(_count_on_itself, "calls", 0)
        if hasattr(slotted, "more"):
            del slotted.more
        counts[:], box[0], number, slotted.seen, Kept.seen, Kept.told = 0, 0, 0, 0, 0, []
        _count.__defaults__[0][0] = 0
        flag.clear(), cached.cache_clear(), _emptied(), sink.seek(0), sink.truncate()
        os.environ.pop("MOK_T", None)
        libc.unsetenv(b"MOK_C")
        torch.set_num_threads(threads), torch.set_default_dtype(torch.float32)
        sys.setswitchinterval(interval)
        warnings.filters[:] = filters
        capsys.readouterr()

    anew()
    yield anew
    anew()


def _ready():
    return bool(select.select([there], [], [], 0)[0])


def left_alone(does, seen, anew=lambda: None):
    """The loop of experts that do this stays one, and what it does is seen as it is in eager mode."""
    before = seen()
    block = Ranged([Doing() for _ in range(E)])
    for expert in block.experts:
        expert.does = does
    x = tokens(2, 9)
    with torch.no_grad():
        block(x)
        wanted = seen()
        assert wanted != before
        anew()
        (site,) = [site for site in explain(block)(x).sites if site.status == "missed"]
        torch._dynamo.reset()
        anew()
        traced = Traced(block, verify=False)
        traced(x)
        found = seen()
    assert traced.report.fused == 0, traced.report
    assert found == wanted
    return site


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("effect", EFFECTS)
def test_effects(effect, world):
    site = left_alone(*EFFECTS[effect], world)
    assert site.reason in ("mutation", "data-dependent"), site
    told = TOLD.get(effect, "may do more than compute")
    assert told in site.detail, site


# What answers otherwise each time, or is seen in nothing that a test could look at.
ASKED = {
    "time": (lambda x: time.time(), "the loop calls time,"),
    "sleep": (lambda x: time.sleep(0), "the loop calls sleep,"),
    "random": (lambda x: random.random(), "the loop calls Random.random,"),
    "choice": (lambda x: random.choice([1, 2]), "the loop calls Random.choice,"),
    "the same seed": (lambda x: torch.manual_seed(0), "the loop calls torch.random.manual_seed,"),
    "a generator's seed": (lambda x: torch.default_generator.manual_seed(0), "the loop calls Generator.manual_seed,"),
    "a hook": (lambda x: x.register_hook(lines.append), "the loop calls torch._tensor.register_hook,"),
    "modes": (lambda x: torch.set_grad_enabled(False), "the loop changes more than tensors"),
    "collection": (lambda x: gc.collect(), "the loop calls collect,"),
    "a lock": (lambda x: lock.acquire() and lock.release(), "the loop calls lock.acquire,"),
    "memory": (lambda x: _looked_at(), "the loop calls memoryview.__exit__,"),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_is_asked(asked):
    block = Ranged([Doing() for _ in range(E)])
    for expert in block.experts:
        expert.does = ASKED[asked][0]
    torch.manual_seed(0)
    with torch.enable_grad():  # and as it was afterwards
        (site,) = [site for site in explain(block)(tokens(2, 9)).sites if site.status == "missed"]
    assert ASKED[asked][1] in site.detail, site


@pytest.mark.parametrize("kind", range(3))
def test_what_closures_hold(kind):
    does, seen = _enclosed()[kind]
    block = Ranged([Doing() for _ in range(E)])
    for expert in block.experts:
        expert.does = does
    traced = Traced(block, verify=False)
    with torch.no_grad():
        traced(tokens(2, 9))
    assert traced.report.fused == 0, traced.report
    assert seen() in (E, [1] * E), seen()


def _local(x):
    found, sizes = [], {}
    for size in x.shape:
        found.append(size)
    sizes["rows"] = found
    sizes.setdefault("more", []).append(1)
    sizes.update(less=2)
    return collections.OrderedDict(sizes).pop("less")


lock, nested = threading.Lock(), threading.RLock()


def _one_at_a_time(x):
    with lock, nested:
        return x.shape[0]


def _optional(**given):
    given.setdefault("scale", 2)
    return given.pop("scale") + len({"a": 1} | given)


def _modes(x):
    with torch.no_grad(), contextlib.nullcontext(), torch.autocast("cpu", enabled=False):
        return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")


@functools.cache
def warm(size):
    return size * 2


@dataclasses.dataclass
class Sizes:
    rows: int = 2
    more: list = dataclasses.field(default_factory=list)


def _looked_at():
    with memoryview(b"ab") as view:
        return len(view)


class Kind(enum.Enum):
    ONE = "one"


Pair = collections.namedtuple("Pair", "a b")
bent = functools.partial(F.gelu, approximate="tanh")
ORDINARY = {
    "math": lambda x: math.sqrt(x.shape[-1]) + math.prod((1, 2)),
    "containers": _local,
    "keywords": lambda x: _optional(scale=3),
    "strings": lambda x: "-".join(sorted({"a": 1}.keys())).upper().format(1) + str(3),
    "modes": _modes,
    "compiling": lambda x: torch.compiler.is_compiling() or torch.jit.is_scripting() or torch.is_tensor(x),
    "cached": lambda x: warm(3),
    "dataclass": lambda x: Sizes().rows + len(Sizes(more=[1]).more),
    "enum": lambda x: Kind("one") is Kind.ONE and Kind.ONE.value,
    "tuple": lambda x: Pair(1, 2)._replace(a=3).a,
    "getters": lambda x: sorted([(1, 2)], key=operator.itemgetter(1)) and operator.attrgetter("shape")(x),
    "sorting": lambda x: sorted([3, 1], key=lambda n: -n)[0] + max([1, 2], key=abs),
    "mapping": lambda x: sum(map(abs, [1, -2])) + len(list(filter(None, zip([1], [2], strict=True)))),
    "reducing": lambda x: functools.reduce(operator.add, [1, 2]) + sum(itertools.chain([1], range(3))),
    "partial": lambda x: bent(torch.ones(2, 4)),
    "numpy": lambda x: np.sqrt(4.0) + np.array([1, 2]).sum() + np.prod([2, 3]),
    "ops": lambda x: _ops(torch.ones(2, 4)),
    "splitting": lambda x: torch.split(torch.ones(2, 4).split(2, dim=-1)[0], 1, -1),
    "finfo": lambda x: torch.finfo(x.dtype).max + x.element_size() + x.dim(),
    "generator": lambda x: sum(n for n in (1, 2)) + next(iter([1])),
    "device": lambda x: x.device.type == "cpu" and x.is_cuda,
    "abstract": lambda x: isinstance([], collections.abc.Sequence) and isinstance(3, numbers.Number),
    "checkpoint": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2), use_reentrant=False),
    "nonlocal": lambda x: _counts_for_itself(),
    "locks": _one_at_a_time,
    "a module of its own": lambda x: torch.nn.SiLU()(torch.ones(2)),
    "versions": lambda x: torch.__version__ >= "2.0" and torch.cuda.is_available(),
}


def _ops(x):
    return torch.ops.aten.silu(x) + torch.einsum("ab->ab", x) + torch.special.expm1(x) + x.softmax(-1).abs()


def _counts_for_itself():
    number = 0

    def count():
        nonlocal number
        number += 1

    count()
    return number


@pytest.mark.parametrize("what", ORDINARY)
def test_ordinary_calls(what):
    warm(3)
    block = Ranged([Doing() for _ in range(E)])
    for expert in block.experts:
        expert.does = ORDINARY[what]
    site = explain(block)(tokens(2, 9)).sites[0]
    assert (site.status, site.detail) == ("fused", LOOP), site


class Statistics(Plain):
    """Of a weight, whatever the tokens are; no schema says that batch_norm writes them."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(H, affine=False)
        self.norm.num_batches_tracked = None

    def forward(self, x):
        F.batch_norm(self.fc1.weight.detach(), self.norm.running_mean, self.norm.running_var, training=True)
        return super().forward(x)


def test_running_statistics_are_written():
    torch.manual_seed(0)
    block = Ranged([Statistics() for _ in range(E)])
    (site,) = explain(block)(tokens(2, 9)).sites
    assert site.reason == "mutation" and "writes into a tensor" in site.detail, site
    traced, left = Traced(block, verify=False), []
    for run in (block, traced):
        for expert in block.experts:
            expert.norm.running_mean.zero_()
        run(tokens(2, 9))
        left.append([expert.norm.running_mean.clone() for expert in block.experts])
    assert traced.report.fused == 0
    torch.testing.assert_close(left[0], left[1])
    assert all(mean.any() for mean in left[0])


def test_a_profiler_goes_on():
    """Of the user's, in Python and in C: what it is told of what comes after a proof is what it was told before."""
    seen = []

    def profiler(frame, event, arg):
        seen.append(event)

    sys.setprofile(profiler)
    try:
        report = explain(Ranged([Plain() for _ in range(E)]))(tokens(2, 9))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert report.fused == 1 and seen
    torch._dynamo.reset()
    profile = cProfile.Profile()
    with profile:
        assert explain(Ranged([Plain() for _ in range(E)]))(tokens(2, 9)).fused == 1
        _content()
    assert any(entry.code is _content.__code__ for entry in profile.getstats())


def _never(x):
    if x.dim() > 5:
        path.write_text("a")


def test_an_effect_that_does_not_happen_is_none():
    block = Ranged([Doing() for _ in range(E)])
    for expert in block.experts:
        expert.does = _never
    assert explain(block)(tokens(2, 9)).fused == 1


def test_finalisers_of_others_are_no_code_of_the_loop():
    class Closing:
        def __del__(self):
            lines.append("closed")

    one, other = Closing(), Closing()
    one.other, other.other = other, one
    del one, other
    assert explain(Ranged([Plain() for _ in range(E)]))(tokens(2, 9)).fused == 1
    gc.collect()
    assert lines == ["closed"] * 2
