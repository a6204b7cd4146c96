"""The sm90 engine against the meaning of a spec in float64, next to what PyTorch's own kernels make of it."""

import concurrent.futures
import os
import subprocess
import sys

import pytest
import torch

from mok_compile import engines, ops, reference  # noqa: F401  ops registers mok::experts
from mok_compile.engines import get
from mok_compile.engines import sm90 as sm90_module
from mok_compile.grouped import empty_as
from mok_compile.reference import Experts
from mok_compile.spec import ExpertsSpec, dtype_name

pytestmark = pytest.mark.cuda

engine, portable = get("sm90"), get("portable")
if reason := engine.usable():
    pytest.skip(f"the sm90 engine does not run here: {reason}", allow_module_level=True)

SILU = "silu(gate) * up"
OSS = "gate * sigmoid(1.702 * gate) * (clamp(up, -7.0, 7.0) + 1.0)"
NAMES = ("x", "weights", "up", "down", "up_bias", "down_bias")


class Block:
    """Random operands of one ``mok::experts`` call."""

    def __init__(
        self,
        tokens,
        hidden,
        inner,
        experts,
        top_k,
        *,
        layout="concat",
        activation=SILU,
        dtype=torch.bfloat16,
        weights_dtype=torch.float32,
        out_dtype=None,
        routing="random",
        bias=False,
        transposed=False,
        weight_on="output",
        seed=0,
    ):
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape, scale=1.0):
            return (scale * torch.randn(shape, device="cuda", generator=generator)).to(dtype)

        def weight(*shape):
            values = normal(*shape, scale=shape[-1] ** -0.5)
            return values.mT.contiguous().mT if transposed else values

        self.spec = ExpertsSpec(activation, layout, dtype_name(out_dtype or dtype), weight_on)
        self.x, self.dy = normal(tokens, hidden, scale=0.5), normal(tokens, hidden).to(out_dtype or dtype)
        scores = torch.rand(tokens, experts, device="cuda", generator=generator)
        self.ids = scores.topk(top_k, 1).indices
        if routing == "one":
            self.ids = torch.full_like(self.ids, experts // 2)
        elif routing == "idle":
            self.ids %= max(1, experts // 3)
        elif routing == "skewed":
            self.ids = (scores[:, :top_k] ** 6 * experts).long()
        elif routing == "sentinel":
            chance = torch.rand(tokens, top_k, device="cuda", generator=generator)
            self.ids = torch.where(chance < 0.3, experts, torch.where(chance < 0.5, -1, self.ids))
        elif routing == "none":
            self.ids = torch.full_like(self.ids, experts)
        self.weights = torch.rand(tokens, top_k, device="cuda", generator=generator).to(weights_dtype)
        parts, columns = {"separate": (2, inner), "single": (1, inner)}.get(layout, (1, 2 * inner))
        self.up = [weight(experts, columns, hidden) for _ in range(parts)]
        self.down = [weight(experts, hidden, inner)]
        self.up_bias = [normal(experts, columns, scale=0.1) for _ in range(parts)] if bias else []
        self.down_bias = [normal(experts, hidden, scale=0.1)] if bias else []
        self.needs = [True, True, True, True, bias, bias]

    @property
    def operands(self):
        return self.x, self.ids, self.weights, self.up, self.down, self.up_bias, self.down_bias

    def forward(self, engine, save=True):
        return engine.forward(*self.operands, self.spec, save=save)

    def backward(self, engine, saved):
        return engine.backward(self.dy, *self.operands, *saved, self.spec, self.needs)

    def exact(self):
        """y, h, the schedule and the gradients in float64."""
        spec = ExpertsSpec(self.spec.activation, self.spec.layout, "float64", self.spec.weight_on)
        lists = ([t.double() for t in ts] for ts in (self.up, self.down, self.up_bias, self.down_bias))
        experts = Experts.of(*lists, spec)
        x, ids, weights = self.x.double(), self.ids, self.weights.double()
        y, h, plan = reference.forward(x, ids, weights, experts, spec)
        grads = reference.backward(self.dy.double(), x, ids, weights, experts, h, plan, spec, self.needs)
        return y, h, plan, grads

    def names(self):
        lists = ([self.x], [self.weights], self.up, self.down, self.up_bias, self.down_bias)
        return [name for name, ts, need in zip(NAMES, lists, self.needs, strict=True) if need for _ in ts]


def errors(value, exact):
    """Relative errors of all rows and all columns; an all-zero row or column must be exactly zero. Few elements make no
    statistics: short rows and columns only count as zero or not."""
    assert torch.isfinite(value).all()
    value, exact = value.double().reshape(-1, value.shape[-1]), exact.reshape(-1, exact.shape[-1])
    found = []
    for dim in (0, 1):
        size, off = exact.norm(dim=dim), (value - exact).norm(dim=dim)
        assert not off[size == 0].any()
        enough = size > 0 if value.shape[dim] >= 32 else size < 0
        found.append(off[enough] / size[enough])
    return found


def assert_as_good(name, value, other, exact):
    """`value` is no further from `exact` than `other`, PyTorch's own result, up to a tenth (a quarter for the worst row
    and column, which are single draws)."""
    assert value.shape == exact.shape and value.dtype == other.dtype, name
    for mine, theirs in zip(errors(value, exact), errors(other, exact), strict=True):
        if mine.numel() == 0:
            continue
        floor = torch.finfo(value.dtype).eps / 4
        assert mine.mean() <= 1.1 * theirs.mean() + floor, (name, mine.mean(), theirs.mean())
        assert mine.max() <= 1.25 * theirs.max() + 4 * floor, (name, mine.max(), theirs.max())


def poison():
    """Leaves NaN in the memory that the next allocations get, so that an unwritten output cannot look right."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 24, 1 << 22, 1 << 18, 1 << 12)]
    del junk


SMALL = [
    *({"sizes": (tokens, 256, 192, 8, 2)} for tokens in (1, 3, 64, 65, 300)),
    {"sizes": (5, 64, 64, 4, 2)},
    {"sizes": (130, 128, 96, 4, 2)},
    {"sizes": (257, 8, 8, 3, 3)},
    {"sizes": (257, 1000, 328, 16, 3)},
    {"sizes": (100, 136, 1032, 1, 1)},
    {"sizes": (100, 256, 128, 4, 4)},
    {"sizes": (70, 64, 64, 512, 16)},
    *({"sizes": (501, 512, 264, 16, 4), "routing": r} for r in ("one", "idle", "skewed", "sentinel", "none")),
    {"sizes": (400, 520, 200, 8, 2), "layout": "separate"},
    {"sizes": (400, 512, 256, 8, 2), "layout": "separate", "bias": True},
    {"sizes": (400, 512, 256, 8, 2), "layout": "single", "activation": "gelu(up)"},
    {"sizes": (400, 512, 232, 8, 2), "layout": "single", "activation": "square(relu(up))", "bias": True},
    {"sizes": (400, 512, 256, 8, 2), "bias": True, "activation": OSS},
    {"sizes": (400, 512, 256, 8, 2), "dtype": torch.float16},
    *(
        {"sizes": sizes, "layout": "interleaved", "activation": OSS, "bias": True, "transposed": t}
        for t in (False, True)
        for sizes in ((400, 512, 256, 8, 2), (257, 1000, 328, 16, 3), (130, 72, 8, 4, 2))
    ),
    {"sizes": (300, 264, 136, 8, 2), "layout": "interleaved"},
    {"sizes": (300, 264, 136, 8, 2), "layout": "interleaved", "dtype": torch.float16, "transposed": True},
    *(
        {"sizes": sizes, "layout": layout, "transposed": True}
        for layout in ("concat", "separate")
        for sizes in ((400, 512, 256, 8, 2), (257, 1000, 328, 16, 3), (130, 72, 8, 4, 2))
    ),
    {"sizes": (300, 264, 136, 8, 2), "layout": "concat", "dtype": torch.float16, "transposed": True, "bias": True},
    {"sizes": (400, 512, 232, 8, 2), "layout": "single", "activation": "square(relu(up))", "transposed": True},
    *(
        {"sizes": (500, 512, 264, 16, 1), "weight_on": "input", "transposed": t, "routing": r}
        for t in (False, True)
        for r in ("random", "sentinel")
    ),
    *({"sizes": (2100, 128, 64, 2, 1), "routing": r} for r in ("random", "one")),
    # Low tiles, of which some experts have several.
    *(
        {"sizes": (120, 264, 136, 32, 4), "routing": r, "transposed": t}
        for r in ("one", "skewed", "idle", "sentinel")
        for t in (False, True)
    ),
    {"sizes": (120, 264, 136, 32, 4), "layout": "interleaved", "activation": OSS, "bias": True, "routing": "skewed"},
    # Low tiles, as many of one expert as pass under a weight together, and more.
    *({"sizes": (rows, 136, 72, 128, 1), "routing": "one"} for rows in (960, 961, 1024, 1344, 1345, 2048)),
    # Tiles of one, two and three parts of 64 rows, full and not, and one more block.
    *({"sizes": (rows, 264, 136, 1, 1)} for rows in (1, 63, 127, 128, 129, 191, 192, 193, 256, 257, 385)),
    *(
        {"sizes": (rows, 200, 200, 2, 2), "layout": layout, "transposed": transposed, "bias": bias}
        for layout, bias in (("concat", False), ("separate", True), ("interleaved", True))
        for transposed in (False, True)
        for rows in (129, 200)
    ),
    *(
        {"sizes": (rows, 200, 200, 2, 2), "layout": "single", "activation": "gelu(up)", "transposed": transposed}
        for transposed in (False, True)
        for rows in (129, 200)
    ),
    {"sizes": (400, 512, 256, 8, 2), "weights_dtype": torch.bfloat16},
    {"sizes": (400, 512, 256, 8, 2), "out_dtype": torch.float32},
    *(
        {"sizes": (200, 256, 128, 4, 2), "activation": a}
        for a in (
            "gelu(gate) * up",
            "gelu_tanh(gate) * up",
            "relu(gate) * up",
            "sigmoid(gate) * up",
            "gate * silu(up)",
            "silu(clamp(gate, -inf, 1.0)) * clamp(up, -1.0, 1.0)",
        )
    ),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_as_good_as_torch(case):
    case = dict(case)
    block = Block(*case.pop("sizes"), **case)
    y64, h64, plan, grads64 = block.exact()
    poison()
    y, h, order, offsets = block.forward(engine)
    grads = block.backward(engine, (h, order, offsets))
    y_torch, *saved = block.forward(portable)
    grads_torch = block.backward(portable, saved)

    assert torch.equal(order, plan.order) and torch.equal(offsets, plan.offsets)
    rows = int(offsets[-1])
    assert not h[rows:].any()
    assert_as_good("y", y, y_torch, y64)
    assert_as_good("h", h[:rows], saved[0][:rows], h64[:rows])
    for name, mine, theirs, exact in zip(block.names(), grads, grads_torch, grads64, strict=True):
        assert_as_good(f"grad of {name}", mine, theirs, exact)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    for name, grad in zip(block.names(), grads, strict=True):
        if name in ("up", "down"):
            assert not grad[counts == 0].any(), "an idle expert's gradient is exactly zero"


def test_no_tokens():
    block = Block(0, 64, 64, 4, 2)
    y, h, order, offsets = block.forward(engine)
    assert y.shape == (0, 64) and h.shape == (0, 128) and order.numel() == 0 and not offsets.any()
    dx, dweights, dup, ddown = block.backward(engine, (h, order, offsets))
    assert dx.numel() == dweights.numel() == 0 and not dup.any() and not ddown.any()


def test_saved_tensors_serve_every_engine():
    block = Block(300, 256, 192, 8, 2)
    *_, exact = block.exact()
    mine, theirs = block.forward(engine)[1:], block.forward(portable)[1:]
    for name, a, b, e in zip(
        block.names(), block.backward(portable, mine), block.backward(engine, theirs), exact, strict=True
    ):
        assert_as_good(f"grad of {name}", a, block.backward(portable, theirs)[block.names().index(name)], e)
        assert_as_good(f"grad of {name}", b, block.backward(portable, theirs)[block.names().index(name)], e)


def test_same_bits_every_time():
    block = Block(1500, 512, 384, 16, 4, routing="skewed")
    first = block.forward(engine)
    grads = block.backward(engine, first[1:])
    load = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    for i in range(100):
        if i % 2:
            with torch.cuda.stream(side):
                load @ load
        again = block.forward(engine)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(grads, block.backward(engine, again[1:]), strict=True))
    assert torch.equal(block.forward(engine, save=False)[0], first[0])


def test_a_token_does_not_see_its_neighbours():
    block = Block(600, 512, 384, 16, 4)
    y = block.forward(engine)[0]
    x, ids, weights = block.x, block.ids, block.weights
    for tokens in (slice(0, 1), slice(7, 10), slice(100, 227), slice(300, 600)):
        block.x, block.ids, block.weights = x[tokens], ids[tokens], weights[tokens]
        assert torch.equal(block.forward(engine)[0], y[tokens])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"activation": OSS, "bias": True},
        {"layout": "separate", "dtype": torch.float16},
        {"layout": "interleaved", "bias": True},
        {"layout": "single", "activation": "gelu(up)"},
    ],
    ids=lambda c: "-".join(str(v) for v in c.values()),
)
def test_tiles_of_all_shapes_give_the_same_bits(case, transposed):
    """Forward takes low tiles for up to 16 rows an expert, tall ones for 113 to 184, else wide ones."""
    block = Block(600, 328, 200, 4, 2, transposed=transposed, **case)
    x, ids, weights = block.x, block.ids, block.weights

    def run(tokens):
        """y [T, H] and h [T, K, N]."""
        block.x, block.ids, block.weights = x[tokens], ids[tokens], weights[tokens]
        y, h, order, _ = block.forward(engine)
        assert torch.equal(block.forward(engine, save=False)[0], y)
        return y, torch.empty_like(h).index_copy_(0, order.long(), h).view(*block.ids.shape, -1)

    y, h = run(slice(0, 600))
    # 300 rows an expert above; here 150, 100 and 15.
    for tokens in (slice(0, 300), slice(300, 600), slice(50, 250), slice(40, 70)):
        some_y, some_h = run(tokens)
        assert torch.equal(some_y, y[tokens]) and torch.equal(some_h, h[tokens])


def test_another_experts_nan_stays_there():
    block = Block(200, 256, 192, 4, 1)
    clean = block.forward(engine)
    grads = block.backward(engine, clean[1:])
    bad = block.ids[:, 0] == 1
    block.x[bad] = float("nan")
    saved = block.forward(engine)
    dirty = block.backward(engine, saved[1:])
    good = [e for e in range(4) if e != 1]
    assert torch.equal(saved[0][~bad], clean[0][~bad]) and saved[0][bad].isnan().all()
    assert torch.equal(dirty[0][~bad], grads[0][~bad])
    for a, b in zip(dirty[2:], grads[2:], strict=True):
        assert torch.equal(a[good], b[good])


def test_any_view_will_do():
    block = Block(100, 256, 192, 8, 2, bias=True)
    y, *saved = block.forward(engine)
    grads = block.backward(engine, saved)

    def shifted(t):
        """The same values where no row starts at a multiple of 16 bytes."""
        buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
        buffer[1:].copy_(t.reshape(-1))
        return buffer[1:].view(t.shape)

    block.x, block.dy = shifted(block.x), shifted(block.dy)
    block.up_bias, block.down_bias = [shifted(b) for b in block.up_bias], [shifted(b) for b in block.down_bias]
    block.weights, block.ids = block.weights.t().contiguous().t(), block.ids.int().t().contiguous().t()
    again, *saved = block.forward(engine)
    assert torch.equal(y, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, block.backward(engine, saved), strict=True))


def test_weights_keep_their_layout():
    block = Block(100, 256, 192, 8, 2, transposed=True)
    _, *saved = block.forward(engine)
    grads = dict(zip(block.names(), block.backward(engine, saved), strict=True))
    assert grads["up"].stride() == block.up[0].stride() and grads["down"].stride() == block.down[0].stride()


def test_the_storage_of_weights_changes_no_bit():
    plain = Block(600, 264, 200, 8, 2)
    y, *saved = plain.forward(engine)
    grads = plain.backward(engine, saved)
    plain.up, plain.down = ([w.mT.contiguous().mT for w in ws] for ws in (plain.up, plain.down))
    again, *saved = plain.forward(engine)
    assert torch.equal(y, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain.backward(engine, saved), strict=True))


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_weights_with_gaps(tokens, transposed):
    block = Block(tokens, 264, 200, 8, 2, transposed=transposed)
    results = everything(block)

    def with_gaps(w):
        """Matrices and rows that lie further apart."""
        w = w.mT if transposed else w
        room = w.new_full((w.shape[0], w.shape[1] + 3, w.shape[2] + 8), float("nan"))
        room[:, : w.shape[1], : w.shape[2]] = w
        found = room[:, : w.shape[1], : w.shape[2]]
        return found.mT if transposed else found

    block.up, block.down = ([with_gaps(w) for w in ws] for ws in (block.up, block.down))
    assert sm90_module.storage(block.up, block.down[0]).transposed is transposed
    assert_same(everything(block), results)


def test_mixed_storage_runs_on_the_portable_engine():
    block = Block(10, 64, 64, 4, 2)
    block.down = [block.down[0].mT.contiguous().mT]
    y, *saved = block.forward(engine)
    assert torch.equal(y, block.forward(portable)[0])
    block.backward(engine, saved)


def everything(block):
    """What a block gives: y where nothing is saved; y, h, order, offsets; gradients, those of lists stacked."""
    poison()
    y, *saved = block.forward(engine)
    grads = block.backward(engine, saved)
    found = [block.forward(engine, save=False)[0], y, *saved, *grads[:2]]
    at, size = 2, len(block.down)
    for tensors, need in zip((block.up, block.down, block.up_bias, block.down_bias), block.needs[2:], strict=True):
        for i in range(0, len(tensors) if need else 0, size):
            part = grads[at : at + size]
            assert [g.stride() for g in part] == [empty_as(t).stride() for t in tensors[i : i + size]]
            found.append(part[0] if block.down[0].dim() == 3 else torch.stack(part))
            at += size
    assert at == len(grads)
    return found


def assert_same(found, expected):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()), i
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), i


def scattered(matrices):
    """The same matrices in memory of their own, in another order and with gaps."""
    found, gaps = [None] * len(matrices), []
    for e in torch.randperm(len(matrices), generator=torch.Generator().manual_seed(7)).tolist():
        found[e] = matrices[e].clone(memory_format=torch.preserve_format)
        gaps.append(torch.empty(512 * (e % 3 + 1), dtype=torch.uint8, device="cuda"))
    return found


def in_one_buffer(matrices):
    """The same matrices in one buffer, each at some multiple of 16 bytes."""
    order = torch.randperm(len(matrices), generator=torch.Generator().manual_seed(8)).tolist()
    gaps = [8 * (i * i % 5 + 1) for i in range(len(matrices))]
    size = matrices[0].numel()
    buffer = matrices[0].new_full((sum(gaps) + len(gaps) * size,), float("nan"))
    found, at = [None] * len(matrices), 0
    for e, gap in zip(order, gaps, strict=True):
        at += gap
        found[e] = torch.as_strided(buffer, matrices[e].shape, matrices[e].stride(), at)
        found[e].copy_(matrices[e])
        at += size
    return found


def listed(block, place=scattered):
    """The block with a tensor for each expert instead of stacked ones."""
    for name in ("up", "down", "up_bias", "down_bias"):
        stacks = getattr(block, name)
        setattr(block, name, [t for stack in stacks for t in place(list(stack.unbind(0)))])
    return block


LISTED = [
    *({"sizes": (tokens, 256, 192, 8, 2)} for tokens in (1, 3, 64, 300)),
    {"sizes": (257, 8, 8, 3, 3)},
    {"sizes": (257, 1000, 328, 16, 3)},
    {"sizes": (100, 136, 1032, 1, 1)},
    {"sizes": (1, 136, 1032, 1, 1)},
    {"sizes": (70, 64, 64, 512, 16)},
    {"sizes": (1, 64, 64, 1023, 32)},
    {"sizes": (5, 64, 64, 1023, 32)},
    *({"sizes": (tokens, 512, 264, 16, 4), "routing": r} for r in ("one", "idle", "none") for tokens in (5, 501)),
    *(
        {"sizes": (tokens, 520, 200, 8, 2), "layout": layout, "activation": activation, "bias": bias, "transposed": t}
        for tokens in (2, 200)
        for layout, activation in (
            ("concat", SILU),
            ("separate", SILU),
            ("separate", OSS),
            ("interleaved", OSS),
            ("single", "square(relu(up))"),
        )
        for bias in (False, True)
        for t in (False, True)
    ),
    *(
        {"sizes": (tokens, 264, 136, 8, 2), "layout": "separate", "dtype": torch.float16, "transposed": t}
        for tokens in (2, 300)
        for t in (False, True)
    ),
    {"sizes": (300, 264, 136, 8, 1), "layout": "separate", "weight_on": "input", "routing": "sentinel"},
    {"sizes": (40, 2048, 768, 128, 8), "layout": "separate"},
]


@pytest.mark.parametrize("place", [scattered, in_one_buffer, list], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", LISTED, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_a_tensor_per_expert_has_the_bits_of_stacked_weights(case, place):
    case = dict(case)
    block = Block(*case.pop("sizes"), **case)
    expected = everything(block)
    listed(block, place)
    assert sm90_module.storage(*lists_of(block)).transposed is case.get("transposed", False)
    assert_same(everything(block), expected)


def lists_of(block):
    """The banks of up and that of down."""
    experts = Experts.of(block.up, block.down, [], [], block.spec)
    return experts.up, experts.down


def test_one_tensor_for_two_experts():
    block = Block(50, 256, 192, 4, 2, layout="separate")
    for w in (*block.up, *block.down):
        w[2] = w[1]
    expected = everything(block)
    listed(block)
    for first in (0, 4):
        block.up[first + 2] = block.up[first + 1]
    block.down[2] = block.down[1]
    assert_same(everything(block), expected)


def test_lists_that_run_on_the_portable_engine():
    def moved(w):
        """From a multiple of 16 bytes to two bytes further."""
        return torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape)

    for change in (moved, lambda w: w.mT.contiguous().mT):
        block = listed(Block(50, 256, 192, 4, 2))
        block.up[1] = change(block.up[1])
        y, *saved = block.forward(engine)
        assert torch.equal(y, block.forward(portable)[0])
        for a, b in zip(block.backward(engine, saved), block.backward(portable, saved), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [4, 64])
def test_graphs_of_lists(tokens):
    block = listed(Block(tokens, 256, 192, 8, 2, layout="separate"))
    everything(block)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        few = block.forward(engine, save=False)[0]
        y, *saved = block.forward(engine)
        grads = block.backward(engine, saved)
    for seed in (1, 2):
        other = listed(Block(tokens, 256, 192, 8, 2, layout="separate", seed=seed))
        for name in ("x", "ids", "weights", "dy"):
            getattr(block, name).copy_(getattr(other, name))
        for name in ("up", "down"):
            for a, b in zip(getattr(block, name), getattr(other, name), strict=True):
                a.copy_(b)
        graph.replay()
        fresh = block.forward(engine)
        assert torch.equal(y, fresh[0]) and torch.equal(few, fresh[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, block.backward(engine, fresh[1:]), strict=True))


def test_gradients_of_lists_as_autograd_and_optimizers_take_them():

    block = Block(300, 256, 192, 8, 2, layout="separate")
    saved = block.forward(engine)[1:]
    grads = block.backward(engine, saved)[2:]
    stacks = [t.clone().requires_grad_() for t in (*block.up, *block.down)]
    listed(block)
    leaves = [t.requires_grad_() for t in (*block.up, *block.down)]

    def run():
        return torch.ops.mok.experts(*block.operands, block.spec.to_json(), "sm90")[0]

    for times in (1, 2):
        run().backward(block.dy)
        for i, stack in enumerate(grads):
            for grad, leaf in zip((times * stack).unbind(0), leaves[8 * i : 8 * i + 8], strict=True):
                assert torch.equal(leaf.grad, grad)
    leaves[0].grad.zero_()
    assert torch.equal(leaves[1].grad, 2 * grads[0][1])
    for stack, grad in zip(stacks, grads, strict=True):
        stack.grad = grad
    for leaf in leaves:
        leaf.grad = None
    run().backward(block.dy)
    for parameters in (leaves, stacks):
        torch.optim.AdamW(parameters, lr=0.1).step()
    for i, stack in enumerate(stacks):
        assert torch.equal(torch.stack(leaves[8 * i : 8 * i + 8]), stack)


def test_lists_take_no_more_memory():
    def peak(block):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = block.backward(engine, block.forward(engine)[1:])
        del grads
        return torch.cuda.max_memory_allocated() - before

    block = Block(2048, 1024, 512, 32, 4, layout="separate")
    stacked = peak(block)
    assert peak(listed(block)) <= stacked + (1 << 20)


def test_graph_capture():
    block = Block(64, 256, 192, 8, 2)
    block.forward(engine)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, h, order, offsets = block.forward(engine)
        grads = block.backward(engine, (h, order, offsets))
    for seed in (1, 2):
        other = Block(64, 256, 192, 8, 2, seed=seed)
        for name in ("x", "ids", "weights", "dy"):
            getattr(block, name).copy_(getattr(other, name))
        graph.replay()
        fresh = block.forward(engine)
        assert torch.equal(y, fresh[0])
        assert all(torch.equal(a, b) for a, b in zip(grads, block.backward(engine, fresh[1:]), strict=True))


def test_frozen_weights_and_inputs():
    block = Block(100, 256, 192, 8, 2)
    saved = block.forward(engine)[1:]
    everything = block.backward(engine, saved)
    for i in range(4):
        block.needs = [j == i for j in range(4)] + [False, False]
        (only,) = block.backward(engine, saved)
        assert torch.equal(only, everything[i])
    block.needs = [False] * 6
    assert block.backward(engine, saved) == []


DIRECT = [
    {"sizes": (300, 520, 264, 16, 4)},
    {"sizes": (300, 520, 264, 16, 4), "transposed": True, "routing": "sentinel"},
    {"sizes": (70, 136, 72, 1, 1), "dtype": torch.float16, "out_dtype": torch.float32},
    {"sizes": (3, 136, 72, 5, 3), "weights_dtype": torch.bfloat16},
    {"sizes": (40, 136, 72, 5, 3), "layout": "separate"},
    {"sizes": (40, 136, 72, 5, 3), "layout": "interleaved", "activation": OSS, "bias": True},
    {"sizes": (40, 136, 72, 5, 3), "layout": "single", "activation": "gelu(up)", "bias": True, "transposed": True},
]


@pytest.mark.parametrize("case", DIRECT, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_direct_calls_have_the_bits_of_prepared_ones(case):
    case = dict(case)
    block = Block(*case.pop("sizes"), **case)
    y, *saved = block.forward(engine)  # the library is told of the spec
    how, direct = (block.spec.to_json(), "sm90"), torch.ops.mok_sm90
    poison()
    made = direct.experts(*block.operands, *how)
    assert len(made) == 4 and all(map(torch.equal, made, (y, *saved)))
    (inferred,) = direct.experts_infer(*block.operands, *how)
    assert torch.equal(inferred, block.forward(engine, save=False)[0]) and torch.equal(inferred, y)
    dy = block.dy.to(block.x.dtype)
    for weights in (True, False):
        needs = [True, weights, *block.needs[2:]]
        poison()
        made = direct.experts_backward(dy, *block.operands, *saved, *how, needs)
        expected = engine.backward(dy, *block.operands, *saved, block.spec, needs)
        assert len(made) == len(expected)
        for mine, theirs in zip(made, expected, strict=True):
            assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
        of_weights = zip(made[1 + weights :], [*block.up, *block.down], strict=False)
        assert all(grad.stride() == empty_as(w).stride() for grad, w in of_weights)


def test_direct_calls_are_refused_where_something_is_to_be_done():
    block = Block(70, 136, 72, 5, 3)
    saved = block.forward(engine)[1:]
    x, ids, weights, up, down, up_bias, down_bias = block.operands
    spec, direct = block.spec.to_json(), torch.ops.mok_sm90
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    rest = (up, down, up_bias, down_bias, spec, "sm90")
    lists = [list(w[0].unbind()) for w in (up, down)]
    unknown = ExpertsSpec("relu(gate) * up", "concat", "float16").to_json()
    for call in (
        (shifted, ids, weights, *rest),
        (x.T.contiguous().T, ids, weights, *rest),
        (x.float(), ids, weights, *rest),
        (x[:, :128], ids, weights, *rest),
        (x[:69], ids, weights, *rest),
        (x[:0], ids[:0], weights[:0], *rest),
        (x, ids.short(), weights, *rest),
        (x, ids.T.contiguous().T, weights, *rest),
        (x, ids.cpu(), weights, *rest),
        (x, ids, weights[:, :2], *rest),
        (x, ids, weights.double(), *rest),
        (x, ids, weights, *lists, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, [up[0][:4]], down, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, [up[0][:, :136]], down, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, [up[0].mT.contiguous().mT], down, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, [up[0].half()], down, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, up, down, [up[0][:, :, 0]], down_bias, spec, "sm90"),
        (x, ids, weights, up * 2, down, up_bias, down_bias, spec, "sm90"),
        (x, ids, weights, up, down, up_bias, down_bias, spec, "portable"),
        (x, ids, weights, up, down, up_bias, down_bias, unknown, "sm90"),
    ):
        assert direct.experts(*call) == [] and direct.experts_infer(*call) == []
    good = (x, ids, weights, *rest[:-2])
    for dy, h in ((block.dy[:69], saved[0]), (block.dy.float(), saved[0]), (block.dy, saved[0][:, :72])):
        assert direct.experts_backward(dy, *good, h, *saved[1:], spec, "sm90", block.needs) == []
    assert direct.experts(*good, spec, "sm90")


def test_calls_go_direct_from_the_second_on(monkeypatch):
    block = Block(70, 136, 72, 5, 3)
    how = (block.spec.to_json(), "sm90")
    y = torch.ops.mok.experts(*block.operands, *how)[0]
    monkeypatch.setattr(type(engine), "forward", None)  # Python's part is not called any more
    monkeypatch.setattr(type(engine), "backward", None)
    assert torch.equal(torch.ops.mok.experts(*block.operands, *how)[0], y)
    assert torch.equal(torch.ops.mok.experts_infer(*block.operands, *how), y)
    x = block.x.clone().requires_grad_()
    torch.ops.mok.experts(x, *block.operands[1:], *how)[0].backward(block.dy)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("direct", [False, True])
def test_out_of_memory_is_torchs_own_error(direct, monkeypatch):
    block = Block(4000, 1024, 512, 8, 4)
    how = (block.spec.to_json(), "sm90")
    y, *saved = torch.ops.mok.experts(*block.operands, *how)
    if not direct:
        monkeypatch.setattr(engines, "direct", {})
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    try:
        for call in (
            lambda: torch.ops.mok.experts(*block.operands, *how),
            lambda: torch.ops.mok.experts_infer(*block.operands, *how),
            lambda: torch.ops.mok.experts_backward(block.dy, *block.operands, *saved, *how, block.needs),
        ):
            with pytest.raises(torch.OutOfMemoryError):
                call()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(torch.ops.mok.experts(*block.operands, *how)[0], y)


@pytest.fixture
def path(monkeypatch):
    """``path(few)`` sends forward passes that save nothing through the kernel for few tokens, or past it."""
    return lambda few: monkeypatch.setattr(sm90_module, "FEW", few)


FEW = [
    *({"sizes": (tokens, 256, 192, 8, 2)} for tokens in (1, 2, 3, 7, 8, 9, 15, 16, 32)),
    *({"sizes": (tokens, 2048, 768, 128, 8)} for tokens in (1, 2, 7, 16, 31, 32)),
    *({"sizes": (tokens, 4096, 14336, 8, 2)} for tokens in (1, 5, 16)),
    {"sizes": (3, 2880, 2880, 32, 4)},
    {"sizes": (1, 8, 8, 3, 3)},
    {"sizes": (1, 64, 64, 4, 2)},
    {"sizes": (5, 1000, 328, 16, 3)},
    {"sizes": (9, 136, 1032, 1, 1)},
    {"sizes": (8, 64, 64, 1023, 32)},
    {"sizes": (2, 7168, 264, 16, 4)},
    {"sizes": (32, 16384, 64, 64, 8)},
    *(
        {"sizes": (tokens, 520, 264, 16, 4), "routing": r}
        for r in ("one", "idle", "skewed", "sentinel", "none")
        for tokens in (1, 7, 16, 32)
    ),
    *(
        {"sizes": sizes, "layout": layout, "activation": activation, "bias": bias}
        for sizes in ((1, 520, 200, 8, 2), (11, 328, 1000, 16, 3))
        for layout, activation in (
            ("concat", SILU),
            ("separate", SILU),
            ("separate", OSS),
            ("interleaved", OSS),
            ("single", "square(relu(up))"),
            ("single", "gelu(up)"),
        )
        for bias in (False, True)
    ),
    {"sizes": (12, 264, 136, 8, 2), "dtype": torch.float16},
    {"sizes": (12, 2048, 768, 8, 2), "dtype": torch.float16, "bias": True, "layout": "interleaved", "activation": OSS},
    {"sizes": (12, 264, 136, 8, 2), "weights_dtype": torch.bfloat16, "out_dtype": torch.float32},
    *({"sizes": (12, 264, 136, 8, 1), "weight_on": "input", "routing": r} for r in ("random", "sentinel")),
    *(
        {"sizes": (12, 256, 128, 4, 2), "activation": a}
        for a in (
            "gelu(gate) * up",
            "gelu_tanh(gate) * up",
            "relu(gate) * up",
            "sigmoid(gate) * up",
            "gate * silu(up)",
            "silu(clamp(gate, -inf, 1.0)) * clamp(up, -1.0, 1.0)",
        )
    ),
]


@pytest.mark.parametrize("case", FEW, ids=lambda c: "-".join(str(v) for v in c.values()))
def test_few_tokens_have_the_bits_of_many(case, path):
    case = dict(case)
    block = Block(*case.pop("sizes"), **case)
    path(False)
    many = block.forward(engine, save=False)
    path(True)
    for _ in range(2):
        poison()
        few = block.forward(engine, save=False)
        for name, a, b in zip(("y", "h", "order", "offsets"), few, many, strict=True):
            assert a is b is None or torch.equal(a, b), name
    if block.up[0].numel() < 1 << 24:
        y64 = reference.forward(
            block.x.double(),
            block.ids,
            block.weights.double(),
            Experts.of(
                *([t.double() for t in ts] for ts in (block.up, block.down, block.up_bias, block.down_bias)),
                ExpertsSpec(block.spec.activation, block.spec.layout, "float64", block.spec.weight_on),
            ),
            ExpertsSpec(block.spec.activation, block.spec.layout, "float64", block.spec.weight_on),
        )[0]
        assert_as_good("y", few[0], block.forward(portable)[0], y64)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_token_alone_has_the_bits_it_has_among_many(transposed, path):
    path(True)
    block = Block(2000, 512, 384, 16, 4, transposed=transposed)
    y = block.forward(engine)[0]
    x, ids, weights = block.x, block.ids, block.weights
    for tokens in (slice(0, 1), slice(7, 10), slice(100, 108), slice(1999, 2000)):
        block.x, block.ids, block.weights = x[tokens], ids[tokens], weights[tokens]
        assert torch.equal(block.forward(engine, save=False)[0], y[tokens])


def test_few_tokens_in_graphs(path):
    path(True)
    blocks = [Block(4, 512, 256, 16, 4, seed=i) for i in range(3)]
    block = blocks[0]
    block.forward(engine, save=False)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    outputs = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append([block.forward(engine, save=False)[0] for _ in range(5)])
    side = torch.cuda.Stream()
    for i in range(60):
        for name in ("x", "ids", "weights"):
            getattr(block, name).copy_(getattr(blocks[i % 3], name))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graphs[1].replay()
        graphs[0].replay()
        fresh = block.forward(engine, save=False)[0]
        torch.cuda.synchronize()
        assert all(torch.equal(y, fresh) for ys in outputs for y in ys)
    path(False)
    assert torch.equal(fresh, block.forward(engine, save=False)[0])


def test_few_tokens_same_bits_every_time(path):
    path(True)
    block = Block(16, 2048, 768, 64, 8, routing="skewed")
    first = block.forward(engine, save=False)[0]
    load = torch.randn(2048, 2048, device="cuda")
    sides = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i in range(100):
        with torch.cuda.stream(sides[i % 2]):
            if i % 3:
                load @ load
            results.append(block.forward(engine, save=False)[0])
        results.append(block.forward(engine, save=False)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(y, first) for y in results)


@pytest.mark.parametrize("shape", [(2048, 768, 128, 8), (4096, 1024, 32, 8)], ids=str)
def test_real_sizes(shape):
    block = Block(4096, *shape)
    y64, _, _, grads64 = block.exact()
    y, *saved = block.forward(engine)
    y_torch, *saved_torch = block.forward(portable)
    assert_as_good("y", y, y_torch, y64)
    grads, grads_torch = block.backward(engine, saved), block.backward(portable, saved_torch)
    for name, mine, theirs, exact in zip(block.names(), grads, grads_torch, grads64, strict=True):
        assert_as_good(f"grad of {name}", mine, theirs, exact)


def test_through_compile():

    block = Block(64, 256, 192, 8, 2)
    x, weights, up, down = (t.requires_grad_() for t in (block.x, block.weights, block.up[0], block.down[0]))
    ids, spec = block.ids, block.spec.to_json()

    def run(x, weights, up, down):
        return torch.ops.mok.experts(x, ids, weights, [up], [down], [], [], spec, "sm90")[0]

    eager = run(x, weights, up, down)
    expected = torch.autograd.grad(eager, (x, weights, up, down), block.dy)
    compiled = torch.compile(run, fullgraph=True)(x, weights, up, down)
    found = torch.autograd.grad(compiled, (x, weights, up, down), block.dy)
    assert torch.equal(eager, compiled)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_expandable_segments():
    """Their memory lies at low addresses, and tensor maps may begin before what they describe."""
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", __file__, "-k", "test_as_good_as_torch or bits_of_many"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("tokens", [4, 100])
def test_first_call_of_a_thread(tokens):
    """It has no context yet, and gets its memory without a call of CUDA."""
    block = Block(tokens, 256, 192, 8, 2)
    want = block.forward(engine, save=False)[0]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        got = pool.submit(block.forward, engine, save=False).result()[0]
    assert torch.equal(got, want)


def test_part_of_the_device():
    """A green context has some of the multiprocessors, and launches that need all CTAs at once must fit there."""
    few, many = Block(4, 256, 192, 8, 2), Block(40000, 64, 64, 8, 2)
    wanted = few.forward(engine, save=False), many.forward(engine)
    torch.cuda.synchronize()
    context = torch.cuda.green_contexts.GreenContext.create(num_sms=16, device_id=0)
    context.set_context()
    try:
        results = few.forward(engine, save=False), many.forward(engine)
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    assert torch.equal(results[0][0], wanted[0][0]) and all(map(torch.equal, results[1], wanted[1]))
