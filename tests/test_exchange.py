"""What Python and the kernels of an exchange must agree on."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mok_compile import build, engines
from mok_compile.distributed import peer_memory, transports, windows
from mok_compile.distributed.sharding import Sharding
from mok_compile.engines import Problem, sm90
from mok_compile.spec import ExpertsSpec, dtype_name

HEADER = (build.csrc() / "cuda" / "sm90" / "exchange.h").read_text(encoding="utf-8")


def enumerators(name: str) -> list[str]:
    body = re.search(rf"enum (?:class )?{name} : int {{(.*?)}}", HEADER, re.DOTALL).group(1)
    return [e.strip() for e in re.sub(r"//[^\n]*", "", body).split(",") if e.strip()]


def test_every_fault_has_its_words():
    kinds = enumerators("Fault")
    assert kinds[0] == "kNone"
    assert len(windows.FAULTS) == len(kinds) - 1
    numbers = {"rank": 1, "peer": 2, "have": 300, "room": 256, "timeout": 3.0}
    for kind, (phase, words) in zip(kinds[1:], windows.FAULTS, strict=True):
        said = words.format(**numbers)
        assert phase in ("dispatch", "experts", "combine"), kind
        assert ("300" in said) == (kind in ("kTokens", "kRows", "kStuck")), (kind, said)


def test_faults_that_the_host_finds():
    kinds = enumerators("Fault")
    assert kinds[windows.TOKENS] == "kTokens"
    assert kinds[windows.REFUSED] == "kRefused"


def test_the_most_ranks():
    assert f"kMaxRanks = {peer_memory.MAX_RANKS};" in HEADER


def test_group_has_as_many_numbers_as_the_kernels_take():
    tensors = (build.csrc() / "cuda" / "tensors.h").read_text(encoding="utf-8")
    wanted = int(re.search(r"a group has (\d+) numbers", tensors).group(1))
    shape = windows.Shape("group", None, 64, 2, False)
    fields = [_Somewhere() for _ in range(4)]
    made = windows.Windows(shape, 0, 2, 128, 3, 3.0, (16, 16), *fields)
    assert len(made.numbers) == wanted
    assert made.numbers[:6] == [0, 2, 128, 64, 2, 0]
    assert made.numbers[9] == 3_000_000_000
    assert made.numbers[13] == 3
    assert made.most == 384


@given(
    tokens=st.integers(0, 1 << 17), ranks=st.integers(1, 72), hidden=st.integers(1, 1024), megabytes=st.integers(0, 900)
)
def test_turns_fit_the_ring(tokens, ranks, hidden, megabytes):
    shape, row = windows.Shape("group", None, 8 * hidden, 2, False, megabytes * 1_000_000), 16 * hidden * (ranks - 1)
    if 0 < shape.ring < 128 * row:
        with pytest.raises(ValueError, match=f"at least {-(-128 * row // 1_000_000)} MB"):
            shape.turns(tokens, ranks)
        return
    capacity, turns = shape.turns(tokens, ranks)
    assert capacity % 128 == 0 and capacity > 0 and turns > 0
    assert capacity * turns >= tokens and (turns == 1 or capacity * (turns - 1) < tokens)
    assert capacity * row <= shape.ring or turns == 1
    assert turns == 1 or row * (tokens + 127) > shape.ring > 0, "cut without need"


class _Somewhere:
    """In the place of a tensor on a GPU."""

    def data_ptr(self) -> int:
        return 4096


def test_names_of_transports_carry_options():
    assert transports.get("peer_memory room=1.5") is transports.get("peer_memory")
    assert transports.options_of("peer_memory room=1.5 exact=1") == "room=1.5 exact=1"
    assert transports.options_of("collectives") == ""
    assert peer_memory.Options.parse("room=1.5 exact=1").exact
    with pytest.raises(ValueError, match="unknown transport 'nothing'"):
        transports.get("nothing")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_transport_that_is_passed_over_on_a_gpu_is_named(device, caplog):
    problem = Problem(16, 32, 8, 2, torch.float32, torch.float32, torch.device(device), True)
    _, call = call_for(dtype="float32")
    engines.warn_once.cache_clear()
    assert [transports.choose(call, problem) for _ in range(2)] == ["collectives"] * 2
    said = [record.message for record in caplog.records]
    assert len(said) == (device == "cuda")
    assert all("transport peer_memory cannot run" in text and "not torch.float32" in text for text in said)


@pytest.mark.parametrize(
    "text",
    [
        "room=0",
        "room=nan",
        "timeout=inf",
        "max_tokens=-1",
        "exact=yes",
        "rom=2",
        "room",
        "ring=-1",
        "ring=1000000",
        "ring=0.5",
    ],
)
def test_wrong_options_are_named(text):
    with pytest.raises(ValueError, match=re.escape(text.partition("=")[0])):
        peer_memory.Options.parse(text)


def call_for(**changed) -> tuple[transports.Operands, transports.Call]:
    spec = ExpertsSpec("silu(gate) * up", "concat", changed.pop("dtype", "bfloat16"))
    call = transports.Call(spec, "sm90", changed.pop("group", "0"), Sharding(changed.pop("experts", 8), 2))
    x, ids = torch.zeros(3, changed.pop("hidden", 16)).bfloat16(), torch.zeros(changed.pop("tokens", 3), 2)
    operands = transports.Operands(x, ids, ids, [], [], [], [])
    return operands, replace(call, **changed)


def test_ranks_in_one_call_have_one_number():
    """Of all that ranks may differ in, nothing changes it; of what they must have in common, everything."""
    number = peer_memory._number(*call_for(), "forward")
    for same in ({}, {"options": "room=3"}, {"group": "7"}, {"tokens": 0}):
        assert peer_memory._number(*call_for(**same), "forward") == number
    others = [peer_memory._number(*call_for(**other), "forward") for other in ({"hidden": 32}, {"experts": 6})]
    others += [peer_memory._number(*call_for(dtype="float32"), "forward"), peer_memory._number(*call_for(), "backward")]
    assert number not in others and len(set(others)) == len(others)


def numbers_of(rank, ranks, options="", phase="forward", experts=5, capacity=256, turns=1):
    _, call = call_for(options=options)
    call = replace(call, sharding=Sharding(experts, ranks), spec=replace(call.spec, out_dtype="float32"))
    operands = call_for()[0]
    where = SimpleNamespace(rank=rank, ranks=ranks, capacity=capacity, turns=turns, tokens=ranks * capacity)
    return peer_memory._how(operands, call, phase, where, peer_memory.Options.parse(options))


def test_a_call_has_as_many_numbers_as_the_kernels_take():
    """In the order of `Exchange`: experts, those of a rank, this rank's first, how many it has, room, the call's
    number, and the layout and dtype as the kernels count them."""
    header = (build.csrc() / "cuda" / "exchange_ops.h").read_text(encoding="utf-8")
    arguments = (build.csrc() / "cuda" / "sm90" / "arguments.h").read_text(encoding="utf-8")
    how = numbers_of(1, 2)
    assert len(how.numbers) == int(re.search(r"a call has (\d+) numbers", header).group(1))
    assert how.numbers[:5] == [5, 3, 3, 2, 1024] and how.kept == 3 * 1024 + 4
    assert numbers_of(1, 2, turns=4).kept == 4 * how.kept
    dtypes = re.search(r"enum class Dtype : int \{ (.*?) \}", arguments).group(1).split(", ")
    layouts = re.search(r"enum class Layout : int \{ (.*?) \}", arguments).group(1).split(", ")
    assert (layouts[how.numbers[6]], dtypes[how.numbers[7]]) == ("kConcat", "kFloat32")
    assert all(dtypes[n].lower() == f"k{dtype_name(d)}" for d, n in sm90.NUMBERS.items())
    assert how.numbers[5] != numbers_of(1, 2, phase="backward").numbers[5]


def test_rows_that_a_rank_has_room_for():
    """`room` times an even share, rounded up to blocks of 128 rows, never more than there can be, never none."""
    assert [numbers_of(0, 4, f"room={r}").numbers[4] for r in (0.001, 0.5, 1, 1.01, 3, 100)] == [
        *(128, 256, 512, 640, 1536, 2048)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int8])
def test_ids_of_no_integer_type_reach_the_check(dtype):
    operands = replace(call_for()[0], ids=torch.zeros(3, 2, dtype=dtype), down=[torch.zeros(4, 16, 8)])
    assert peer_memory._tensors(operands)[1].dtype == dtype
