"""The forms that Hugging Face blocks take on a GPU, rebuilt without one.

On CUDA the counts come from `histc` over integers, ids without expert are masked always and in place, and a query of
the device's capability stands in the graph. The graphs are written down on fake tensors of the meta device, which takes
integers too; once fused, they hold nothing that the CPU cannot run, so that their numbers can be compared with the same
block in its CPU form.
"""

import pytest
import torch
from blocks import EXPERTS, HIDDEN, TOKENS, Fixed, GptOss, K, Ungated, routing, tokens
from harness import assert_close
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mok_compile.options import Options
from mok_compile.passes.fusing.fuse import fuse


class Tracer(fx.Interpreter):
    """Gives every node the example value that Dynamo would."""

    def run_node(self, node):
        if node.target is torch.cuda.get_device_capability:
            node.meta["example_value"] = (9, 0)
            return 9, 0
        node.meta["example_value"] = super().run_node(node)
        return node.meta["example_value"]


def capture(function, *examples, dynamic=False):
    """The graph of `function` on fake tensors of the meta device like `examples`; with `dynamic` the number of tokens
    is a symbol."""
    gm = fx.symbolic_trace(function)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        Tracer(gm).run(*(fake(mode, t, dynamic) for t in examples))
    return gm


def fake(mode, like, dynamic):
    t = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    first = DimDynamic.DYNAMIC if dynamic and like.shape[0] == TOKENS else DimDynamic.STATIC
    sizes = StatelessSymbolicContext([first, *[DimDynamic.STATIC] * (like.dim() - 1)])
    return mode.from_tensor(t, symbolic_context=sizes).requires_grad_(like.requires_grad)


def ask_the_device(like):
    """A node that nobody reads."""
    if isinstance(like, fx.Proxy):
        like.tracer.create_proxy("call_function", torch.cuda.get_device_capability, ("cuda:0",), {})


def arange(like, count):
    if isinstance(like, fx.Proxy):
        return like.tracer.create_proxy("call_function", torch.arange, (count,), {"device": "meta"})
    return torch.arange(count)


def swiglu(x, ids, weights, up, down, counted_in):
    """Qwen3-MoE as recorded on an H200 (transformers 5.17)."""
    flat_weights, flat = weights.reshape(-1), ids.reshape(-1)
    ordered = torch.sort(flat)
    sorted_ids, perm = ordered[0], ordered[1]
    rows = x[perm // K]
    scale = flat_weights[perm]
    counts = torch.histc(sorted_ids.to(counted_in), bins=EXPERTS, min=0, max=EXPERTS - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    mask = (sorted_ids >= EXPERTS).unsqueeze(-1)
    sorted_ids.clamp_(max=EXPERTS - 1)
    rows.masked_fill_(mask, 0.0)
    transposed = up.transpose(-2, -1)
    ask_the_device(x)
    h = torch._grouped_mm(rows.to(torch.bfloat16), transposed, offs=offsets, bias=None, out_dtype=None).masked_fill(
        mask, 0.0
    )
    gate, value = h.chunk(2, dim=-1)
    a = torch.nn.functional.silu(gate) * value
    ask_the_device(x)
    out = torch._grouped_mm(a.to(torch.bfloat16), down.transpose(-2, -1), offs=offsets, bias=None, out_dtype=None)
    weighted = out.masked_fill(mask, 0.0) * scale.unsqueeze(-1)
    return restore(weighted, perm)


def restore(rows, perm, dtype=torch.bfloat16):
    inverse = torch.empty_like(perm)
    torch.ops.aten.index_put_(inverse, [perm], arange(perm, perm.size(0)))
    return rows[inverse].view(-1, K, HIDDEN).sum(dim=1).to(dtype)


def gpt_oss(x, ids, weights, up, down, up_bias, down_bias, counted_in):
    ordered = torch.sort(ids.reshape(-1))
    sorted_ids, perm = ordered[0], ordered[1]
    rows, scale = x[perm // K], weights.reshape(-1)[perm]
    counts = torch.histc(sorted_ids.to(counted_in), bins=EXPERTS, min=0, max=EXPERTS - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    mask = (sorted_ids >= EXPERTS).unsqueeze(-1)
    sorted_ids.clamp_(max=EXPERTS - 1)
    first = up_bias[sorted_ids]
    rows.masked_fill_(mask, 0.0)
    ask_the_device(x)
    h = torch._grouped_mm(rows.to(torch.bfloat16), up, offs=offsets, bias=None, out_dtype=None)
    h.add_(first)
    h = h.masked_fill(mask, 0.0)
    gate, value = h[..., ::2], h[..., 1::2]
    gate, value = gate.clamp(min=None, max=1.5), value.clamp(min=-1.5, max=1.5)
    a = (value + 1) * (gate * torch.sigmoid(gate * 1.702))
    second = down_bias[sorted_ids]
    out = torch._grouped_mm(a.to(torch.bfloat16), down, offs=offsets, bias=None, out_dtype=None)
    out.add_(second)
    return restore(out.masked_fill(mask, 0.0) * scale.unsqueeze(-1), perm)


def operands(model, *names):
    ids, weights = routing(dtype=torch.bfloat16)
    ids[2, 1] = ids[9] = EXPERTS
    return [tokens(dtype=torch.bfloat16), ids, weights, *(getattr(model, n) for n in names)]


def test_swiglu():
    model = Fixed(dtype=torch.bfloat16)
    args = operands(model, "up", "down")

    gm = capture(lambda x, ids, w, up, down: swiglu(x, ids, w, up, down, torch.int32), *args)
    sites = fuse(gm, None, Options(engine="portable"))
    assert [s.status for s in sites] == ["fused"], sites
    assert [str(s.spec) for s in sites] == ["silu(gate) * up (concat) -> bfloat16"]
    targets = [str(n.target) for n in gm.graph.nodes]
    assert not any("histc" in t or "grouped_mm" in t or "masked_fill" in t for t in targets)
    found = run_without_device_queries(gm, *args)
    wanted = swiglu(*[a.detach() for a in args], counted_in=torch.float32)
    assert_close(found, wanted, 2e-2)
    assert not found[9].any()


def run_without_device_queries(gm, *args):
    for node in list(gm.graph.nodes):
        if node.target is torch.cuda.get_device_capability:
            assert not node.users
            gm.graph.erase_node(node)
    gm.recompile()
    with torch.no_grad():
        return gm(*args)


def test_gpt_oss():
    model = GptOss(dtype=torch.bfloat16)
    args = operands(model, "up", "down", "up_bias", "down_bias")

    gm = capture(lambda x, ids, w, a, b, c, d: gpt_oss(x, ids, w, a, b, c, d, torch.int32), *args)
    sites = fuse(gm, None, Options(engine="portable"))
    assert [s.status for s in sites] == ["fused"], sites
    assert [s.spec.layout for s in sites] == ["interleaved"]
    found = run_without_device_queries(gm, *args)
    wanted = gpt_oss(*[a.detach() for a in args], counted_in=torch.float32)
    assert_close(found, wanted, 2e-2)
    assert not found[9].any()


def relu_squared(x, ids, weights, up, down, counted_in):
    """Nemotron-H in float32, which takes the fallback on a GPU too."""
    ordered = torch.sort(ids.reshape(-1))
    sorted_ids, perm = ordered[0], ordered[1]
    rows, scale = x[perm // K], weights.reshape(-1)[perm]
    counts = torch.histc(sorted_ids.to(counted_in), bins=EXPERTS, min=0, max=EXPERTS - 1)
    offsets = torch.cumsum(counts, dim=0, dtype=torch.int32)
    mask = (sorted_ids >= EXPERTS).unsqueeze(-1)
    sorted_ids.clamp_(max=EXPERTS - 1)
    rows.masked_fill_(mask, 0.0)
    ask_the_device(x)
    h = torch.ops.transformers.grouped_mm_fallback(rows.to(torch.float32), up.transpose(-2, -1), offs=offsets)
    a = torch.square(torch.nn.functional.relu(h.masked_fill(mask, 0.0)))
    out = torch.ops.transformers.grouped_mm_fallback(a.to(torch.float32), down.transpose(-2, -1), offs=offsets)
    return restore(out.masked_fill(mask, 0.0) * scale.unsqueeze(-1), perm, torch.float32)


def gathered(x, ids, weights, up, down, k):
    """Qwen3-MoE with batched_mm, which decoding on a GPU takes."""
    rows = x.repeat_interleave(k, dim=0)
    flat = ids.reshape(-1).clamp(0, EXPERTS - 1)
    h = torch.bmm(up[flat], rows.unsqueeze(-1)).squeeze(-1)
    gate, value = h.chunk(2, dim=-1)
    a = torch.nn.functional.silu(gate) * value
    out = torch.bmm(down[flat], a.unsqueeze(-1)).squeeze(-1)
    weighted = out * weights.reshape(-1).unsqueeze(-1)
    return weighted.view(-1, k, HIDDEN).sum(dim=1).to(torch.bfloat16)


def gathered_gpt_oss(x, ids, weights, up, down, up_bias, down_bias):
    rows = x.repeat_interleave(K, dim=0)
    flat = ids.reshape(-1).clamp(0, EXPERTS - 1)
    h = torch.bmm(rows.unsqueeze(1), up[flat]).squeeze(1)
    h.add_(up_bias[flat])
    gate, value = h[..., ::2], h[..., 1::2]
    gate, value = gate.clamp(min=None, max=1.5), value.clamp(min=-1.5, max=1.5)
    a = (value + 1) * (gate * torch.sigmoid(gate * 1.702))
    out = torch.bmm(a.unsqueeze(1), down[flat]).squeeze(1)
    out.add_(down_bias[flat])
    return (out * weights.reshape(-1).unsqueeze(-1)).view(-1, K, HIDDEN).sum(dim=1).to(torch.bfloat16)


def check(function, args, wanted, dynamic=False, tolerance=2e-2):
    """`function` is fused, and computes `wanted` then; the gradients too where there are any."""
    gm = capture(function, *args, dynamic=dynamic)
    sites = fuse(gm, None, Options(engine="portable"))
    assert [s.status for s in sites] == ["fused"], sites
    targets = [str(n.target) for n in gm.graph.nodes]
    assert not any(word in t for t in targets for word in ("histc", "grouped_mm", "masked_fill", "bmm"))
    for node in list(gm.graph.nodes):
        if node.target is torch.cuda.get_device_capability:
            gm.graph.erase_node(node)
    gm.recompile()
    found, expected = gm(*args), wanted(*args)
    assert_close(found, expected, tolerance)
    leaves = [a for a in args if a.requires_grad]
    if leaves:
        seed = torch.randn_like(expected)
        pairs = zip(torch.autograd.grad(found, leaves, seed), torch.autograd.grad(expected, leaves, seed), strict=True)
        for a, b in pairs:
            assert_close(a, b, tolerance)


def problem(model, *names, dtype=torch.bfloat16, k=K, grad=False):
    ids, weights = routing(dtype=dtype, k=k)
    weights = [getattr(model, n).detach() for n in names], weights.detach()
    x = tokens(dtype=dtype, grad=False)
    return [t.requires_grad_(grad and t.is_floating_point()) for t in (x, ids, weights[1], *weights[0])]


def test_ungated_in_float32():
    args = problem(Ungated(), "up", "down", dtype=torch.float32, grad=True)
    args[1][2, 1] = args[1][9] = EXPERTS
    check(
        lambda x, ids, w, up, down: relu_squared(x, ids, w, up, down, torch.int32),
        args,
        lambda *args: relu_squared(*args, counted_in=torch.float32),
        tolerance=1e-5,
    )


def test_dynamic_sizes():
    args = problem(Fixed(dtype=torch.bfloat16), "up", "down")
    check(
        lambda x, ids, w, up, down: swiglu(x, ids, w, up, down, torch.int32),
        args,
        lambda *args: swiglu(*args, counted_in=torch.float32),
        dynamic=True,
    )


@pytest.mark.parametrize("k", [K, 1])
def test_gathered(k):
    def block(x, ids, w, up, down):
        return gathered(x, ids, w, up, down, k)

    check(block, problem(Fixed(dtype=torch.bfloat16), "up", "down", k=k), block)


def test_gathered_biases():
    args = problem(GptOss(dtype=torch.bfloat16), "up", "down", "up_bias", "down_bias")
    check(lambda x, ids, w, a, b, c, d: gathered_gpt_oss(x, ids, w, a, b, c, d), args, gathered_gpt_oss)


def llama4(x, router, up, down, shared, dtype):
    """Llama 4: every expert on tokens times their scores, added onto what a shared expert makes of them."""
    logits = torch._C._nn.linear(x, router, None)
    best = torch.topk(logits, K, dim=1)
    scores = torch.full_like(logits, float("-inf")).scatter_(1, best[1], best[0])
    scores = torch.nn.functional.sigmoid(scores.float()).to(dtype)
    rows = x.repeat(EXPERTS, 1) * scores.transpose(0, 1).reshape(-1, 1)
    gate, value = torch.bmm(rows.view(EXPERTS, -1, HIDDEN), up).chunk(2, dim=-1)
    rows = torch.bmm(value * torch.nn.functional.silu(gate), down).view(-1, HIDDEN)
    out = torch._C._nn.linear(x, shared, None)
    out.add_(rows.reshape(EXPERTS, -1, HIDDEN).sum(dim=0))
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_llama4(dtype, tolerance, training, dynamic):
    torch.manual_seed(0)
    inner = HIDDEN // 2
    shapes = (TOKENS, HIDDEN), (EXPERTS, HIDDEN), (EXPERTS, HIDDEN, 2 * inner), (EXPERTS, inner, HIDDEN)
    args = [(torch.randn(shape) * 0.5).to(dtype).requires_grad_(training) for shape in (*shapes, (HIDDEN, HIDDEN))]

    def block(x, router, up, down, shared):
        return llama4(x, router, up, down, shared, dtype)

    check(block, args, block, dynamic=dynamic, tolerance=tolerance)
