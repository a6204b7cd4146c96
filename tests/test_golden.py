"""The graphs of a few blocks before and after. To accept a change: EXPECTTEST_ACCEPT=1 pytest tests/test_golden.py"""

import textwrap

import torch
from blocks import GptOss, Moe, Separate, tokens
from expecttest import assert_expected_inline

from mok_compile.options import Options
from mok_compile.passes.fusing.fuse import fuse


def text(graph):
    """One line a node: name, what it calls, arguments."""
    lines = []
    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        args = ", ".join([*map(str, node.args), *(f"{k}={v}" for k, v in node.kwargs.items())])
        line = f"{node.name} = {target}({args})" if node.op.startswith("call") else f"{node.op} {node.name}"
        line = f"return {args}" if node.op == "output" else line
        lines += textwrap.wrap(line.replace("l_self_parameters_", ""), 110, subsequent_indent="    ")
    return "\n".join(lines)


def graphs(model, x):
    found = []

    def backend(gm, inputs):
        found.append(text(gm.graph))
        sites = fuse(gm, inputs, Options(engine="portable"))
        assert [s.status for s in sites] == ["fused"]
        found.append(text(gm.graph))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(x)
    assert len(found) == 2
    return found


def test_swiglu():
    before, after = graphs(Moe(), tokens(grad=False))
    assert_expected_inline(
        before,
        """\
placeholder l_x_
placeholder gate_
placeholder up_
placeholder down_
flat = reshape(l_x_, -1, 16)
t = t(gate_)
matmul = matmul(flat, t)
scores = softmax(matmul, -1)
topk = topk(scores, 3, -1)
weights = getitem(topk, 0)
ids = getitem(topk, 1)
sum_1 = sum(weights, -1, keepdim=True)
weights_1 = truediv(weights, sum_1)
reshape_1 = reshape(ids, -1)
sort = sort(reshape_1)
sorted_ids = getitem(sort, 0)
perm = getitem(sort, 1)
float_1 = float(sorted_ids)
counts = histc(float_1, bins=5, min=0, max=4)
offsets = cumsum(counts, 0, dtype=torch.int32)
floordiv = floordiv(perm, 3)
rows = getitem(flat, floordiv)
transpose = transpose(up_, 1, 2)
rows_1 = grouped_mm_fallback(rows, transpose, offs=offsets)
chunk = chunk(rows_1, 2, -1)
gate = getitem(chunk, 0)
up = getitem(chunk, 1)
silu = silu(gate)
rows_2 = mul(silu, up)
transpose_1 = transpose(down_, 1, 2)
rows_3 = grouped_mm_fallback(rows_2, transpose_1, offs=offsets)
reshape_2 = reshape(weights_1, -1)
getitem_7 = getitem(reshape_2, perm)
unsqueeze = unsqueeze(getitem_7, -1)
rows_4 = mul(rows_3, unsqueeze)
inverse = empty_like(perm)
arange = arange(42, device=cpu)
setitem = setitem(inverse, perm, arange)
getitem_8 = getitem(rows_4, inverse)
view = view(getitem_8, -1, 3, 16)
sum_2 = sum(view, 1)
to = to(sum_2, torch.float32)
view_1 = view(to, (14, 16))
return (view_1,)""",
    )
    assert_expected_inline(
        after,
        """\
placeholder l_x_
placeholder gate_
placeholder up_
placeholder down_
flat = reshape(l_x_, -1, 16)
moe_default = moe.default(flat, flat, gate_, None, None, None, [up_], [down_], [], [], {'top_k': 3, 'scores':
    [{'op': 'softmax', 'args': []}], 'weights': [{'op': 'normalise', 'args': []}], 'groups': null,
    'corrected': false, 'masked': false, 'ordered': true}, {'activation': 'silu(gate) * up', 'layout':
    'concat', 'out_dtype': 'float32'}, portable)
getitem_9 = getitem(moe_default, 0)
return (getitem_9,)""",
    )


def test_gpt_oss():
    _, after = graphs(GptOss(), tokens(grad=False))
    assert_expected_inline(
        after,
        """\
placeholder l_x_
placeholder gate_
placeholder up_
placeholder up_bias_
placeholder down_
placeholder down_bias_
flat = reshape(l_x_, -1, 16)
transpose = transpose(down_, -2, -1)
transpose_1 = transpose(up_, -2, -1)
moe_default = moe.default(flat, flat, gate_, None, None, None, [transpose_1], [transpose], [up_bias_],
    [down_bias_], {'top_k': 3, 'scores': [{'op': 'softmax', 'args': []}], 'weights': [{'op': 'normalise',
    'args': []}], 'groups': null, 'corrected': false, 'masked': false, 'ordered': true}, {'activation':
    'clamp(gate, -inf, 1.5) * sigmoid(clamp(gate, -inf, 1.5) * 1.702) * (clamp(up, -1.5, 1.5) + 1.0)',
    'layout': 'interleaved', 'out_dtype': 'float32'}, portable)
getitem_11 = getitem(moe_default, 0)
return (getitem_11,)""",
    )


def test_gate_and_up_apart():
    _, after = graphs(Separate(), tokens(grad=False))
    assert_expected_inline(
        after,
        """\
placeholder l_x_
placeholder gate_
placeholder gate_proj_
placeholder up_proj_
placeholder down_
flat = reshape(l_x_, -1, 16)
moe_default = moe.default(flat, flat, gate_, None, None, None, [gate_proj_, up_proj_], [down_], [], [],
    {'top_k': 3, 'scores': [{'op': 'softmax', 'args': []}], 'weights': [{'op': 'normalise', 'args': []}],
    'groups': null, 'corrected': false, 'masked': false, 'ordered': true}, {'activation': 'silu(gate) * up',
    'layout': 'separate', 'out_dtype': 'float32'}, portable)
getitem_7 = getitem(moe_default, 0)
return (getitem_7,)""",
    )
