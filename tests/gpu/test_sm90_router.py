"""The sm90 engine's routers against float64 and against what torch makes of the same logits."""

from dataclasses import dataclass, replace

import pytest
import torch
from routers import CASES
from torch.profiler import ProfilerActivity, profile

from mok_compile import build, engines, moe, ops, routing  # noqa: F401  moe and ops register the ops
from mok_compile.backend import mok
from mok_compile.bench import ON_GPU, Block
from mok_compile.engines import get, sm90_router
from mok_compile.engines.sm90 import stream_of
from mok_compile.router import Groups, RouterSpec, Step

pytestmark = pytest.mark.cuda

if reason := get("sm90").usable():
    pytest.skip(f"the sm90 engine does not run here: {reason}", allow_module_level=True)
build.load("sm90")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# T, R, E, K. Few experts make small clusters; the last two are more tokens than clusters of 16 CTAs serve at once.
SHAPES = [
    *[(0, 64, 8, 2), (1, 2048, 128, 8), (3, 520, 64, 6), (17, 2880, 32, 4), (17, 4096, 8, 2), (33, 264, 16, 2)],
    *[
        (5, 8, 64, 4),
        (128, 1024, 512, 10),
        (3, 7168, 256, 8),
        (17, 136, 1024, 16),
        (256, 2048, 128, 8),
        (1000, 72, 60, 4),
    ],
]


def low(*steps):
    """Scores in float32 of 16-bit logits, weights back in 16 bits, as most models in 16 bits have it."""
    return RouterSpec(2, (Step("softmax", ("float32",)),), (*steps, Step("cast", ("bfloat16",))))


SPECS = {
    **{name: case.spec for name, case in CASES.items()},
    "qwen3": low(Step("normalise")),
    "qwen2": low(),
    "granite": RouterSpec(2, (Step("cast", ("float32",)),), (Step("softmax"), Step("cast", ("bfloat16",)))),
    "llama4 rounded": RouterSpec(1, (), (Step("cast", ("float32",)), Step("sigmoid"), Step("cast", ("bfloat16",)))),
    "glm": RouterSpec(
        *(2, (Step("cast", ("float32",)), Step("sigmoid")), (Step("normalise", ("add", 1e-20)), Step("mul", (1.5,)))),
        *(Groups(4, 2, 2, 0.0), True, False, False),
    ),
}


def in_order(choice, count):
    """The largest, of equals the lower number first."""
    return choice.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def within(choice, groups):
    """As `routing._within`, but of equal groups the lower ones, where torch.topk takes any."""
    grouped = choice.unflatten(-1, (groups.count, -1))
    best = grouped.amax(-1) if groups.best == 1 else grouped.topk(groups.best, -1)[0].sum(-1)
    others = torch.ones_like(best, dtype=torch.bool).scatter(-1, in_order(best, groups.chosen), False)
    return grouped.masked_fill(others.unsqueeze(-1), groups.fill).flatten(-2)


@dataclass
class Router:
    """Random operands of a router, the same for the same arguments."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: torch.dtype = BF16
    extra: torch.dtype = FP32  # of correction and expert scale
    seed: int = 0

    def __post_init__(self):
        tokens, depth, experts, top_k = self.shape
        generator = torch.Generator("cuda").manual_seed(self.seed)

        def normal(*shape, scale=1.0):
            return scale * torch.randn(shape, generator=generator, device="cuda")

        spec = SPECS[self.name]
        if spec.groups is not None:
            spec = replace(spec, groups=replace(spec.groups, chosen=2))
        self.spec = replace(spec, top_k=1 if spec.top_k == 1 else top_k)
        self.x, self.weight = (
            normal(tokens, depth).to(self.dtype),
            normal(experts, depth, scale=depth**-0.5).to(self.dtype),
        )
        biased, scaled = self.name in CASES and CASES[self.name].bias, Step("expert_scale") in spec.weights
        self.bias = normal(experts, scale=0.3).to(self.dtype) if biased else None
        self.correction = normal(experts, scale=0.1).to(self.extra) if spec.corrected else None
        self.scale = (1 + normal(experts, scale=0.1)).to(self.extra) if scaled else None

    @property
    def operands(self):
        return self.x, self.weight, self.bias, self.correction, self.scale

    def run(self):
        """(logits, values, weights, ids) of the kernel itself, without a way out."""
        x, weight, bias, correction, scale = self.operands
        assert sm90_router.unsupported(x.dtype, len(weight), self.spec) is None
        dtypes = [None if t is None else t.dtype for t in (correction, scale)]
        program = sm90_router.program(self.spec, x.dtype, *dtypes)
        return sm90_router.launch(x, weight, bias, correction, scale, self.spec, program, stream_of(x))

    def chosen(self):
        """(logits, values, ids) of `mok::route`."""
        return torch.ops.mok.route(*self.operands[:4], self.spec.to_json(), "sm90")

    def of_logits(self, logits):
        """The numbers that torch chooses by, values, weights and ids; of equals the lower experts come first."""
        scores = routing._chain(self.spec.scores, logits)[-1]
        choice = scores if self.correction is None else scores + self.correction
        if self.spec.groups is not None:
            choice = within(choice, self.spec.groups)
        ids = in_order(choice, self.spec.top_k)
        values = (choice if self.spec.masked else scores).gather(-1, ids)
        return choice, values, routing.weigh(values, ids, self.scale, self.spec), ids


def poison():
    """Leaves NaN in the memory that the next allocations get, so that an unwritten output cannot look right."""
    junk = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 20, 1 << 16, 1 << 12)]
    del junk


def same(found, wanted):
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True))


def check_logits(router, logits):
    exact = router.x.double() @ router.weight.double().T
    if router.bias is not None:
        exact += router.bias.double()
    terms = router.x.double().abs() @ router.weight.double().abs().T
    bound = 0.51 * torch.finfo(router.dtype).eps * exact.abs() + 2e-6 * terms + 1e-7
    finite = exact.isfinite()
    assert ((logits.double() - exact).abs() <= bound)[finite].all()
    assert torch.equal(logits.isnan(), exact.isnan())


def check_choice(router, logits, values, weights, ids):
    """Sums may be rounded otherwise than torch's, after which numbers may be equal that were not, or the other way."""
    choice, torch_values, torch_weights, torch_ids = router.of_logits(logits)
    assert (values.dtype, weights.dtype, ids.dtype) == (torch_values.dtype, torch_weights.dtype, torch.int64)
    ordered = ids.sort(-1)[0]
    assert ((ids >= 0) & (ids < choice.shape[-1])).all() and (ordered[:, 1:] != ordered[:, :-1]).all()
    eps = torch.finfo(choice.dtype).eps
    by, torch_by = (choice.gather(-1, i).sort(-1)[0] for i in (ids, torch_ids))
    equal = (ids == torch_ids).all(-1)
    assert equal.float().mean() >= 0.9 or len(ids) < 10
    if router.spec.groups is None:  # else groups that differ in rounding alone have experts that differ in more
        torch.testing.assert_close(by, torch_by, rtol=2 * eps, atol=2 * eps, equal_nan=True)
    for mine, theirs in ((values[equal], torch_values[equal]), (weights[equal], torch_weights[equal])):
        rtol = max(2 * torch.finfo(values.dtype).eps, 2 * torch.finfo(mine.dtype).eps, 4e-6)
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_router(name, dtype):
    for seed, shape in enumerate(SHAPES):
        router = Router(name, shape, dtype, extra=dtype if seed % 2 else FP32, seed=seed)
        poison()
        made = router.run()
        check_logits(router, made[0])
        check_choice(router, *made)


# For the kernel that gets logits: each of its widths, full and not, and numbers of tokens on both sides of MAX_TOKENS.
MANY = [
    *[(0, 64, 8, 2), (1, 64, 128, 8), (3, 40, 8, 2), (257, 264, 32, 4), (2048, 64, 64, 6), (16384, 64, 128, 8)],
    *[(2048, 264, 128, 8), (2049, 72, 60, 4), (513, 36, 160, 6), (2048, 64, 256, 8), (700, 64, 512, 10)],
    (300, 136, 1024, 32),
]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_router_of_many_tokens(name, dtype):
    """Logits are eager's to the bit; the choice and the weights as torch makes them of these logits."""
    for seed, shape in enumerate(MANY):
        router = Router(name, shape, dtype, extra=dtype if seed % 2 else FP32, seed=seed)
        poison()
        logits, values, ids = router.chosen()
        assert torch.equal(logits, torch.nn.functional.linear(router.x, router.weight, router.bias))
        weights = routing.weigh(values, ids, router.scale, router.spec)
        check_choice(router, logits, values, weights, ids)
        made = get("sm90").route_few(*router.operands, router.spec)
        if shape[0] > sm90_router.MAX_TOKENS or dtype == FP32:
            assert torch.equal(made.logits, logits) and torch.equal(made.ids, ids)
            check_choice(router, logits, values, made.weights, ids)


@pytest.mark.parametrize("equals", ["no", "neighbours", "halves", "tokens"])
@pytest.mark.parametrize("name", SPECS)
def test_float32_has_the_experts_that_torch_chooses(name, equals):
    """Also of equals, where those in the same order are not meant: experts alike, groups alike, tokens of zeros."""
    for seed, shape in enumerate([(1, 64, 128, 8), (300, 64, 8, 2), (2048, 264, 64, 6), (2048, 64, 256, 8)]):
        router = Router(name, shape, FP32, seed=seed)
        for t in (router.weight, router.bias, router.correction):
            if t is not None and equals == "neighbours":
                t[1::2] = t[::2]
            elif t is not None and equals == "halves":
                t[len(t) // 2 :] = t[: len(t) // 2].clone()
        if equals == "tokens":
            router.x[::2] = 0
        logits, values, ids = router.chosen()
        wanted = routing.route(*router.operands[:4], router.spec)
        assert torch.equal(logits, wanted.logits)
        mine, theirs = (torch.sort(i, dim=-1) for i in (ids, wanted.ids))
        assert torch.equal(mine.values, theirs.values)
        by_expert = (v.gather(-1, order) for v, order in ((values, mine.indices), (wanted.values, theirs.indices)))
        torch.testing.assert_close(*by_expert, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", SPECS)
def test_both_kernels_choose_alike(name):
    """Of the same logits they make the same bits: a row in registers and one in shared memory."""
    for experts, top_k in ((16, 2), (32, 4), (64, 6), (100, 4), (128, 8), (256, 8), (512, 10)):
        router = Router(name, (100, 128, experts, top_k), seed=experts)
        logits, values, weights, ids = router.run()
        dtypes = [None if t is None else t.dtype for t in (router.correction, router.scale)]
        how = sm90_router.program(router.spec, BF16, dtypes[0], weighs=False)
        chosen = sm90_router.choose(logits, router.correction, router.spec, how, stream_of(logits))
        assert same(chosen, (values, ids))
        how = sm90_router.program(router.spec, BF16, *dtypes)
        rest = (router.correction, router.scale, router.spec, how, stream_of(logits))
        assert same(sm90_router.choose_and_weigh(logits, *rest), (weights, ids))


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt_oss", "deepseek_v2", "kolibri"])
@pytest.mark.parametrize("experts", [8, 32, 60, 128, 256, 1024])
def test_equals_of_many_tokens_go_to_the_lower_expert(name, experts):
    """Logits from a handful of values: most experts, and groups, are equal to others. So are zeros of both signs."""
    router = Router(name, (300, 64, experts, 4))
    generator = torch.Generator("cuda").manual_seed(0)
    kinds = torch.tensor([0.0, -0.0, 1.0, float("nan")], device="cuda", dtype=BF16)
    logits = kinds[torch.randint(0, 3, (300, experts), generator=generator, device="cuda")]
    if name in ("gpt_oss", "kolibri"):  # a softmax of all is nothing but NaN then
        logits[::3] = kinds[torch.randint(0, 4, (100, experts), generator=generator, device="cuda")]
    if router.correction is not None:
        router.correction = router.correction.sign()
    _, torch_values, _, torch_ids = router.of_logits(logits)
    dtype = None if router.correction is None else router.correction.dtype
    how = sm90_router.program(router.spec, BF16, dtype, weighs=False)
    values, ids = sm90_router.choose(logits, router.correction, router.spec, how, stream_of(logits))
    assert torch.equal(ids, torch_ids)
    torch.testing.assert_close(values, torch_values, rtol=1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize(("tokens", "dtype"), [(16, BF16), (300, BF16), (300, FP32)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gradients_of_the_choice(name, tokens, dtype):
    """Through `mok::route` and through torch's own choice of the same experts."""
    router = Router(name, (tokens, 72, 64, 6), dtype)
    leaves = [t.requires_grad_() for t in (router.x, router.weight, router.bias) if t is not None]
    generator = torch.Generator("cuda").manual_seed(1)
    logits, values, ids = router.chosen()
    seeds = [torch.randn(t.shape, generator=generator, device="cuda").to(t.dtype) for t in (values, logits)]
    found = torch.autograd.grad((values, logits), leaves, seeds)
    logits = torch.nn.functional.linear(router.x, router.weight, router.bias)
    scores = routing._chain(router.spec.scores, logits)[-1]
    theirs = scores.gather(-1, ids)
    if router.spec.masked:
        theirs = theirs.masked_fill(values == router.spec.groups.fill, router.spec.groups.fill)
    wanted = torch.autograd.grad((theirs, logits), leaves, seeds)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize("tokens", [16, 2048])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_block_against_eager(tokens, grad):
    """For tokens whose last expert is not nearly as good as the next one: eager may take the other of equals."""
    shape = replace(ON_GPU, hidden=256, inner=128)
    block, x = Block(shape, "cuda"), torch.randn(4 * tokens, shape.hidden, device="cuda", dtype=shape.dtype)
    best = (x @ block.gate.t()).float().topk(shape.k + 1)[0].detach()
    x = x[best[:, -2] - best[:, -1] > 2**-5][:tokens]
    assert len(x) == tokens
    compiled = torch.compile(block, backend=mok, dynamic=False)
    results = []
    with torch.set_grad_enabled(grad):
        for run in (block, compiled):
            block.zero_grad()
            y = run(x)
            if grad:
                y.float().square().sum().backward()
            made = [y.detach(), *(p.grad for p in block.parameters() if grad)]
            results.append([t.double().clone() for t in made])
    for eager, found in zip(*results, strict=True):
        assert (eager - found).norm() <= 0.03 * eager.norm()


@pytest.mark.parametrize("name", SPECS)
def test_tokens_that_are_no_numbers(name):
    router = Router(name, (17, 136, 64, 6))
    clean = router.run()
    router.x[3, 5], router.x[4, 2], router.weight[32, 2] = float("nan"), float("inf"), 0
    found = router.run()
    check_logits(router, found[0])
    assert ((found[3] >= 0) & (found[3] < 64)).all()
    assert all(len(set(row)) == router.spec.top_k for row in found[3].tolist())
    others = [t for t in range(17) if t not in (3, 4)]
    router.x[3:5] = 0
    assert same([t[others] for t in found], [t[others] for t in router.run()])
    assert not same(found, clean)


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "gpt_oss", "deepseek_v2"])
def test_equals_go_to_the_lower_expert(name):
    router = Router(name, (18, 64, 32, 4))
    router.x.zero_()
    if router.bias is not None:
        router.bias.zero_()
    assert torch.equal(router.run()[3], torch.arange(4, device="cuda").expand(18, 4))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", (2048, 128, 8)),
        ("deepseek_v3", (4096, 256, 8)),
        ("gpt_oss", (2880, 32, 4)),
        ("kolibri", (1032, 512, 10)),
        ("mixtral", (4096, 8, 2)),
    ],
)
def test_a_token_alone_has_the_bits_it_has_among_others(name, sizes):
    router = Router(name, (300, *sizes))
    x, whole = router.x, router.run()
    parts = [slice(t, t + 1) for t in range(0, 300, 7)]
    for part in (*parts, slice(3, 20), slice(100, 228), slice(0, 64)):
        router.x = x[part].clone()
        assert same(router.run(), [t[part] for t in whole])


def test_in_a_graph():
    router = Router("qwen3", (16, 2048, 128, 8))
    wanted = router.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [router.run() for _ in range(8)]
    for _ in range(20):
        for made in results:
            for t in made:
                t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(made, wanted) for made in results)


def test_on_two_streams():
    routers = [Router("qwen3", (16, 2048, 128, 8), seed=seed) for seed in (1, 2)]
    wanted, made = [router.run() for router in routers], []
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in routers]
    for _ in range(200):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made.append((routers[i].run(), wanted[i]))
    torch.cuda.synchronize()
    assert all(same(*pair) for pair in made)


def unaligned(t):
    """The same numbers, from one element after a multiple of 16 bytes on."""
    return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)


REFUSED = {
    "E": ("qwen3", (4, 128, 2048, 4)),
    "K": ("qwen3", (4, 128, 64, 40)),
    "float64": ("olmoe", (4, 128, 64, 4), torch.float64),
    "correction": ("kolibri", (4, 128, 64, 4), BF16, torch.float64),
}


@pytest.mark.parametrize("op", ["route", "route_infer"])
@pytest.mark.parametrize("what", REFUSED)
def test_torch_routes_what_the_kernels_do_not_take(what, op):
    router = Router(*REFUSED[what])
    if op == "route":
        found, wanted = router.chosen(), routing.route(*router.operands[:4], router.spec)
        wanted = wanted.logits, wanted.values, wanted.ids
    else:
        found = torch.ops.mok.route_infer(*router.operands, router.spec.to_json(), "sm90")
        wanted = routing.route_and_weigh(*router.operands, router.spec)
        wanted = wanted.logits, wanted.weights, wanted.ids
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("what", ["R", "tokens", "place", "strides"])
def test_torch_multiplies_what_the_kernel_for_few_tokens_does_not_take(what):
    shapes = {"R": (4, 132, 64, 4), "tokens": (sm90_router.MAX_TOKENS + 1, 128, 64, 4)}
    router = Router("gemma4", shapes.get(what, (4, 128, 64, 4)))
    if what == "place":
        router.weight = unaligned(router.weight)
    elif what == "strides":
        router.weight = router.weight.t().contiguous().t()
    poison()
    logits, weights, ids = torch.ops.mok.route_infer(*router.operands, router.spec.to_json(), "sm90")
    assert torch.equal(logits, torch.nn.functional.linear(router.x, router.weight, router.bias))
    check_choice(router, logits, router.chosen()[1], weights, ids)


@pytest.mark.parametrize("change", [unaligned, lambda x: x.t().contiguous().t()], ids=["place", "strides"])
def test_tokens_anywhere_in_memory(change):
    router = Router("kolibri", (16, 128, 64, 4))
    logits, _, weights, ids = router.run()
    router.x, router.correction = change(router.x), torch.stack([router.correction, router.correction], 1)[:, 0]
    found = torch.ops.mok.route_infer(*router.operands, router.spec.to_json(), "sm90")
    assert all(map(torch.equal, found, (logits, weights, ids)))


@pytest.mark.parametrize("tokens", [1, 16])
def test_router_and_experts_are_all_that_a_block_launches(tokens):
    block = Block(ON_GPU, "cuda")
    x = torch.randn(tokens, ON_GPU.hidden, device="cuda", dtype=ON_GPU.dtype)
    compiled = torch.compile(block, backend=mok, dynamic=False)
    with torch.no_grad():
        wanted, found = block(x).double(), compiled(x).double()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            compiled(x)
            torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("route_kernel" in name for name in names) == 1 and all("mok::" in name for name in names), names
    assert len(names) == 2 or tokens > 8, names
    # A near tie may go the other way for a few tokens.
    off = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert off.median() < 0.02


class RoutedInFloat32(Block):
    """As DeepSeek-V3 and GLM have it."""

    def logits(self, x):
        return torch.nn.functional.linear(x.float(), self.gate.float())


@pytest.mark.parametrize("kind", [Block, RoutedInFloat32])
@pytest.mark.parametrize("tokens", [16, 2048])
def test_a_training_step_chooses_with_one_kernel(tokens, kind):
    block = kind(ON_GPU, "cuda")
    x = torch.randn(tokens, ON_GPU.hidden, device="cuda", dtype=ON_GPU.dtype)
    compiled = torch.compile(block, backend=mok, dynamic=False)
    compiled(x).float().sum().backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        compiled(x).float().sum().backward()
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("choose_kernel" in name for name in names) == 1
    others = [name.lower() for name in names if "mok::" not in name]
    assert not any("topk" in name or "sort" in name for name in others), names
    assert not any("route_kernel" in name for name in names), names
    assert block.gate.grad.isfinite().all() and block.gate.grad.any()


@pytest.mark.parametrize("name", SPECS)
def test_direct_calls_have_the_bits_of_prepared_ones(name):
    for seed, dtypes in enumerate([(BF16, FP32), (FP16, FP32), (BF16, BF16), (BF16, FP32)]):
        router = Router(name, (17, 136, 64, 6), *dtypes, seed=seed)
        logits, _, weights, ids = router.run()
        how = router.spec.to_json(), "sm90"
        first = torch.ops.mok.route_infer(*router.operands, *how)  # the library is told of the router
        poison()
        made = torch.ops.mok_sm90.route_infer(*router.operands, *how)
        assert len(made) == 3 and same(made, (logits, weights, ids)) and same(first, made)
        assert [t.dtype for t in made] == [t.dtype for t in first]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("tokens", [17, 300])
def test_direct_calls_with_the_library_s_product_have_the_bits_of_prepared_ones(name, tokens, monkeypatch):
    """For gradients, and in inference of many tokens or with a weight that the kernel for few cannot read."""
    for dtype in (BF16, FP16, FP32):
        router = Router(name, (tokens, 136, 64, 6), dtype, FP32)
        x, weight, *vectors, scale = router.operands
        how = router.spec.to_json(), "sm90"
        for op, direct, operands in (
            ("route", "route_train", (x, weight, *vectors)),
            ("route", "route_train", (x.t().contiguous().t(), unaligned(weight), *vectors)),
            ("route_infer", "route_infer", (x, unaligned(weight), *vectors, scale)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(engines, "direct", {})
                prepared = getattr(torch.ops.mok, op)(*operands, *how)  # the library is told of the router
            poison()
            made = getattr(torch.ops.mok_sm90, direct)(*operands, *how)
            assert len(made) == 3 and same(made, prepared) and same(getattr(torch.ops.mok, op)(*operands, *how), made)
            assert [t.dtype for t in made] == [t.dtype for t in prepared]


def test_direct_calls_are_refused_where_something_is_to_be_done():
    router = Router("kolibri", (16, 128, 64, 11))  # of a number of experts that no other test chooses
    how = router.spec.to_json(), "sm90"
    torch.ops.mok.route_infer(*router.operands, *how)
    x, weight, bias, correction, scale = router.operands
    for operands in (
        (unaligned(x), weight, bias, correction, scale),
        (x.t().contiguous().t(), weight, bias, correction, scale),
        (x[:0], weight, bias, correction, scale),
        (x.half(), weight.half(), bias, correction, scale),
        (x[:, :64], weight, bias, correction, scale),
        (x, weight, weight[:, 0], correction, scale),
        (x, weight, bias, None, scale),
        (x, weight, bias, correction.double(), scale),
        (x, weight, bias, correction.bfloat16(), scale),
        (x, weight, bias, correction[:63], scale),
        (x, weight, bias, correction.cpu(), scale),
        (x, weight, bias, correction, correction),
    ):
        assert torch.ops.mok_sm90.route_infer(*operands, *how) == []
    torch.ops.mok.route(*router.operands[:4], *how)
    for operands in (
        (x[:0], weight, bias, correction),
        (x, weight[:, :64], bias, correction),
        (x, weight, weight[:, 0].float(), correction),
        (x, weight, weight[:, :1], correction),
        (x, weight, bias, None),
        (x, weight, bias, correction.bfloat16()),
    ):
        assert torch.ops.mok_sm90.route_train(*operands, *how) == []
    assert torch.ops.mok_sm90.route_infer(*router.operands, how[0], "portable") == []
    other = replace(router.spec, top_k=5).to_json()
    assert torch.ops.mok_sm90.route_infer(*router.operands, other, "sm90") == []
    assert torch.ops.mok_sm90.route_infer(*router.operands, *how)


@pytest.mark.parametrize("kind", [Block, RoutedInFloat32])
def test_inference_of_many_tokens_chooses_with_one_kernel(kind):
    block = kind(ON_GPU, "cuda")
    compiled = torch.compile(block, backend=mok, dynamic=True)
    with torch.no_grad():
        for tokens in (2048, 300, 16):  # one graph for all
            x = torch.randn(tokens, ON_GPU.hidden, device="cuda", dtype=ON_GPU.dtype)
            compiled(x)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                compiled(x)
                torch.cuda.synchronize()
            names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            few = tokens <= sm90_router.MAX_TOKENS and kind is Block
            assert sum(("route_kernel" if few else "choose_kernel") in name for name in names) == 1
            assert kind is not Block or not any("triton" in name for name in names), names
            assert not any("topk" in name.lower() or "sort" in name.lower() for name in names if "mok::" not in name)


def test_many_tokens_in_a_graph_and_on_two_streams():
    routers = [Router("deepseek_v3", (700, 256, 256, 8), seed=seed) for seed in (1, 2)]
    wanted = [router.chosen() for router in routers]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [router.chosen() for router in routers]
    for made in results:
        for t in made:
            t.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(same, results, wanted))
    streams, made = [torch.cuda.Stream() for _ in routers], []
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                made.append((routers[i].chosen(), wanted[i]))
    torch.cuda.synchronize()
    assert all(same(*pair) for pair in made)
