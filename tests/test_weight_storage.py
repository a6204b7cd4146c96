"""What the sm90 engine says of how weights lie in memory, which decides whether its kernels can read them."""

import pytest
import torch

from mok_compile.engines.sm90 import Storage, _parts, storage

OUT, IN, EXPERTS = 24, 16, 3
STACK = torch.empty(EXPERTS, OUT, IN, dtype=torch.bfloat16)


def down(transposed=False):
    return torch.empty(EXPERTS, OUT, IN, dtype=torch.bfloat16).mT if transposed else STACK.mT.contiguous()


def matrices(transposed=False):
    made = [torch.empty(IN, OUT) if transposed else torch.empty(OUT, IN) for _ in range(EXPERTS)]
    return [m.bfloat16().t() if transposed else m.bfloat16() for m in made]


@pytest.mark.parametrize("transposed", [False, True])
def test_stacks_lists_and_gaps(transposed):
    order = (lambda w: w.mT.contiguous().mT) if transposed else torch.Tensor.contiguous
    wide = order(torch.empty(EXPERTS, OUT, IN, dtype=torch.bfloat16))
    room = torch.empty(EXPERTS, OUT + 8, IN + 8, dtype=torch.bfloat16)
    gaps = (order(room)[:, :OUT, :IN],)
    views = list(wide.unbind(0))
    for up in (wide, matrices(transposed), *gaps, views, views[:1]):
        lists = up if isinstance(up, list) else []
        assert storage([up], down(transposed)) == Storage(transposed, [w.data_ptr() for w in lists])
        matrix = matrices(transposed)
        expected = Storage(transposed, [w.data_ptr() for w in (*lists, *matrix)])
        assert storage([up, wide], matrix) == expected


@pytest.mark.parametrize(
    ("up", "why"),
    [
        (STACK.mT.contiguous().mT, "rows of 16 bytes"),
        ([*matrices()[:2], matrices(transposed=True)[0]], "rows of 16 bytes"),
        (torch.empty(EXPERTS, OUT, IN + 4, dtype=torch.bfloat16)[:, :, :IN], "rows of 16 bytes"),
        ([*matrices()[:2], torch.empty(OUT, IN + 8, dtype=torch.bfloat16)[:, :IN]], "rows of 16 bytes"),
        (torch.empty(OUT, EXPERTS, IN, dtype=torch.bfloat16).transpose(0, 1), "rows of 16 bytes"),
        (STACK[:1].expand(EXPERTS, -1, -1), "rows of 16 bytes"),
        (torch.empty(EXPERTS, OUT, 2 * IN, dtype=torch.bfloat16)[:, :, ::2], "rows of 16 bytes"),
        (torch.empty(EXPERTS * OUT * IN + 4, dtype=torch.bfloat16)[4:].view(EXPERTS, OUT, IN), "multiple of 16 bytes"),
        ([*matrices()[:2], torch.empty(OUT * IN + 1, dtype=torch.bfloat16)[1:].view(OUT, IN)], "multiple of 16 bytes"),
    ],
    ids=("turned", "one turned", "gaps", "one with gaps", "mixed", "expanded", "every second", "moved", "one moved"),
)
def test_what_cannot_be_read(up, why):
    assert why in storage([up], down())


@pytest.mark.parametrize(
    ("distance", "readable"),
    [
        ((16 << 31) - 16, True),
        ((16 << 31) + 16, False),
        (16 << 31, True),  # a multiple of itself
        ((512 << 31) - 512, True),
        (512 << 31, False),
    ],
)
def test_far_apart(monkeypatch, distance, readable):
    first, second, third = matrices()
    start = 0x7F0000000000
    at = {id(first): start + 512, id(second): start + 512 + distance, id(third): start + 512 + distance % (1 << 20)}
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda t: at.get(id(t), start))
    found = storage([[first, second, third]], [*map(torch.clone, (first, second, third))])
    if readable:
        assert found.addresses[:EXPERTS] == [at[id(w)] for w in (first, second, third)]
    else:
        assert "closer together" in found


@pytest.mark.parametrize("transposed", [False, True])
def test_the_parts_of_a_gradient(transposed):
    stack = torch.randn(EXPERTS, OUT, IN)
    stack = stack.mT.contiguous().mT if transposed else stack
    parts = _parts(stack)
    for part, expert in zip(parts, stack, strict=True):
        assert torch.equal(part, expert) and part.stride() == expert.stride()
    parts[0].zero_()
    assert not stack[0].any() and parts[1]._version == 0
    assert [torch.equal(a, b) for a, b in zip(_parts(stack[:, :, 0].contiguous()), stack[:, :, 0], strict=True)]
