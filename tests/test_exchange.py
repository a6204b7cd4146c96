"""What Python and the kernels of an exchange must agree on."""

import re

import pytest

from mok_compile import build
from mok_compile.distributed import peer_memory, transports, windows

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
    made = windows.Windows(shape, 0, 2, 128, 3.0, (16, 16), *fields)
    assert len(made.numbers) == wanted
    assert made.numbers[:6] == [0, 2, 128, 64, 2, 0]
    assert made.numbers[9] == 3_000_000_000


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


@pytest.mark.parametrize("text", ["room=0", "room=nan", "timeout=inf", "max_tokens=-1", "exact=yes", "rom=2", "room"])
def test_wrong_options_are_named(text):
    with pytest.raises(ValueError, match=re.escape(text.partition("=")[0])):
        peer_memory.Options.parse(text)
