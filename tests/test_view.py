"""The functional view: equal computations are one value, in-place ops change cells, and nothing is claimed that is not
known."""

import operator

import pytest
import torch

from mok_compile.passes.graph.view import Cell, View

aten = torch.ops.aten


def view_of(function, *args, dynamic=False, grad=False):
    """(view, node by name) of the one graph of `function`."""
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    with torch.set_grad_enabled(grad):
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
        (gm,) = graphs
        view = View(gm.graph)
    view.keep = gm
    return view, {node.name: node for node in gm.graph.nodes}


def result(view):
    """The values that the graph returns."""
    output = next(iter(reversed(view.keep.graph.nodes)))
    return [view.cells[n].value for n in output.args[0] if isinstance(n, torch.fx.Node)]


def test_spellings_give_one_value():
    def f(x):
        return x.add(1), x + 1, torch.add(x, 1), operator.add(x, 1)

    view, _ = view_of(f, torch.randn(3))
    values = result(view)
    assert len(set(values)) == 1
    assert values[0].op is aten.add.Tensor


def test_different_constants_are_different_values():
    def f(x):
        return x * 1, x * 1.0, x * True, x * 2

    view, _ = view_of(f, torch.randn(3))
    assert len(set(result(view))) == 4


def test_in_place_is_functional():
    def f(x):
        y = x * 2
        before = y + 0.5
        y.add_(1)
        return before, y, (x * 2).add(1), y + 0.5

    view, _ = view_of(f, torch.randn(3))
    before, y, same, after = result(view)
    assert y is same
    assert before is not after


def test_setitem_is_index_put():
    def f(p):
        inverse = torch.empty_like(p)
        inverse[p] = torch.arange(5)
        return inverse

    view, _ = view_of(f, torch.randperm(5))
    (inverse,) = result(view)
    assert inverse.op is aten.index_put.default


def test_writing_a_view_changes_its_base():
    def f(x):
        y = x * 2
        part = y[:2]
        kept = y.sum()
        part.zero_()
        return kept, y.sum(), y

    view, _ = view_of(f, torch.randn(4))
    kept, after, y = result(view)
    assert kept is not after
    assert y.op == "written"


def test_writing_all_of_it_in_another_shape():
    def f(x):
        y = x * 2
        y.view(3, 2).add_(1)
        return y + 0.5, ((x * 2).view(3, 2) + 1).view(2, 3) + 0.5

    view, _ = view_of(f, torch.randn(2, 3))
    assert len(set(result(view))) == 1


@pytest.mark.parametrize("part", [lambda y: y.t(), lambda y: y.view(3, 2)[:2], lambda y: y.view(3, 2)[:, :1]])
def test_writing_less_or_in_another_order(part):
    def f(x):
        y = x * 2
        part(y).add_(1)
        return y + 0.5

    view, _ = view_of(f, torch.randn(2, 3))
    assert result(view)[0].args[0].op == "written"


def test_writing_a_slice_of_new_memory_is_slice_scatter():
    def f(x):
        y = torch.zeros(6)
        y[1:3] = x[:2]
        y[4:] = x[2:]
        return y, y[1:3] + 0

    view, _ = view_of(f, torch.randn(4))
    y, part = result(view)
    assert (y.op, y.args[0].op) == (aten.slice_scatter.default,) * 2
    assert [v.args[2:] for v in (y.args[0], y)] == [(0, 1, 3), (0, 4, 9223372036854775807)]
    assert part.args[0].op is aten.slice.Tensor and part.args[0].args[0] is y


@pytest.mark.parametrize("base", [torch.zeros(3), torch.zeros(1).expand(3)], ids=["input", "overlapping"])
def test_writing_a_slice_of_other_memory_says_nothing_of_its_base(base):
    def f(y, x):
        y[:1] = x[:1]
        return y + 0

    view, _ = view_of(f, base, torch.randn(3))
    assert result(view)[0].args[0].op == "written"


def test_writing_the_base_changes_its_views():
    def f(x):
        y = x * 2
        part = y[:2]
        y.zero_()
        return part + 0, y

    view, _nodes = view_of(f, torch.randn(4))
    assert result(view)[0].args[0].op == "written"


def test_writing_what_overlaps_itself():
    """Of the elements that share a place the last one written stays, which no functional op says."""

    def f(x):
        wide = torch.zeros(1).expand(4)
        wide[torch.arange(3)] = x[:3]
        rows = torch.zeros(6).unfold(0, 3, 1)
        rows.add_(x[:3])
        apart = torch.zeros(4, 6)[:, ::2]
        apart.add_(x[:3])
        return wide, rows, apart

    view, _ = view_of(f, torch.randn(4))
    assert [value.op for value in result(view)] == ["written", "written", aten.add.Tensor]


def test_inputs_that_share_memory_know_each_other():
    base = torch.randn(6)

    def f(a, b):
        kept = a + 0
        b.zero_()
        return kept, a + 0

    view, _ = view_of(f, base[1:], base)
    kept, after = result(view)
    assert kept is not after


def test_random_numbers_equal_nothing():
    def f(x):
        return torch.rand_like(x), torch.rand_like(x), torch.nn.functional.dropout(x), torch.nn.functional.dropout(x)

    view, _ = view_of(f, torch.randn(8))
    assert len(set(result(view))) == 4


@pytest.mark.parametrize("grad", [False, True])
def test_nothing_is_cut_where_there_are_no_gradients(grad):
    def f(x):
        return (x * 2).detach() + 1

    view, _ = view_of(f, torch.randn(3), grad=grad)
    assert result(view)[0].args[0].op is (aten.detach.default if grad else aten.alias.default)


def test_transposed_back():
    def f(x):
        return x.t().transpose(0, 1), x.transpose(0, 1).transpose(1, 0), x.transpose(0, -1).transpose(-2, 1), x.t().t()

    view, _ = view_of(f, torch.randn(2, 3))
    once, *values = result(view)
    assert once.op is aten.transpose.int  # two spellings are not one
    assert len(set(values)) == 1 and values[0].op is aten.alias.default

    def g(x):
        return x.transpose(0, 1).transpose(1, 2), x.transpose(0, 1).transpose(0, 2)

    view, _ = view_of(g, torch.randn(2, 3, 4))
    assert all(value.op is aten.transpose.int for value in result(view))


def test_a_transposition_without_gradients_is_none_to_turn_back():
    def f(x):
        with torch.no_grad():
            turned = x.t()
        return turned.t()

    view, _ = view_of(f, torch.randn(2, 3), grad=True)
    assert result(view)[0].op is aten.t.default


def test_no_grad_regions_are_marked():
    def f(x):
        with torch.no_grad():
            y = x * 2
            n = (x > 0).long() + 1
        return y, x * 2, n

    view, _ = view_of(f, torch.randn(3, requires_grad=True), grad=True)
    inside, outside, integer = result(view)
    assert inside is not outside
    assert (inside.detached, outside.detached, integer.detached) == (True, False, False)


def test_nothing_is_marked_where_nothing_has_gradients():
    def f(x):
        with torch.no_grad():
            return x * 2

    view, _ = view_of(f, torch.randn(3))
    assert not any(v.detached for v in view.values)


@torch.library.custom_op("mok_test::double_in_place", mutates_args=("x",))
def double_in_place(x: torch.Tensor) -> None:
    x.mul_(2)


def test_a_custom_op_that_writes():
    def f(x):
        y = x + 1
        before = y * 3
        torch.ops.mok_test.double_in_place(y)
        return before, y * 3

    view, _ = view_of(f, torch.randn(3))
    before, after = result(view)
    assert before is not after


class _Kernel(torch._ops.HigherOrderOperator):
    def __init__(self):
        super().__init__("mok_test_kernel")

    def __call__(self, counts):
        return super().__call__(counts)


@pytest.mark.parametrize("as_a_list", [False, True])
def test_what_writes_without_a_body_or_a_trace(as_a_list):
    """As a kernel of Triton does, of which Dynamo's own fake tensors tell nothing."""

    def f(x):
        y = x + 1
        return y, y.sum()

    view, nodes = view_of(f, torch.randn(3))
    graph = view.keep.graph
    with graph.inserting_before(nodes["sum_1"]):
        node = graph.call_function(_Kernel(), ([nodes["y"]],) if as_a_list else (nodes["y"],))
    node.meta["example_value"] = None
    view = View(graph)
    assert view.value(nodes["y"]).op is aten.add.Tensor
    assert view.cells[nodes["y"]].value.op == "written"
    assert view.value(nodes["sum_1"]).args[0].op == "written"


def test_autocast_is_not_looked_into():
    """The recording runs without autocast; where its dtypes differ from Dynamo's, the node is opaque."""

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    view, _ = view_of(f, torch.randn(3, 3))
    (product,) = result(view)
    assert product.meta.dtype == torch.bfloat16
    assert product.op == "opaque"


def test_holder_is_the_latest_name_that_still_holds():
    def f(x):
        y = x * 2
        z = y.view(-1)
        y.add_(1)
        return z + 0, y + 1

    view, nodes = view_of(f, torch.randn(2, 2))
    start = view.value(nodes["x"] if "x" in nodes else nodes["l_x_"])
    doubled = view.value(nodes["y"])
    last = next(n for n in reversed(view.keep.graph.nodes))
    assert view.holder(start, last) is not None
    assert view.holder(doubled, last) is None
    add = next(n for n in view.keep.graph.nodes if "add_" in str(n.target))
    assert view.holder(doubled, add) is nodes["y"]


def test_layers_that_look_alike_are_recorded_once():
    def f(x):
        for _ in range(6):
            x = torch.nn.functional.silu(x * 2)
        return x

    view, _ = view_of(f, torch.randn(5))
    assert len(view._recordings) == 2
    assert len(view.values) == 1 + 12


@pytest.mark.parametrize("dynamic", [False, True])
def test_shapes_stay_symbolic_and_unguarded(dynamic):
    def f(x):
        return x.reshape(-1, 4).t() @ torch.ones(x.numel() // 4, 2)

    view, _ = view_of(f, torch.randn(6, 8), dynamic=dynamic)
    value = result(view)[0]
    assert tuple(value.meta.shape) == (4, 2)
    symbolic = any(isinstance(n, torch.SymInt) for v in view.values for n in v.meta.shape)
    assert symbolic is dynamic


def test_every_tensor_node_has_a_cell():
    def f(x):
        a, b = x.chunk(2)
        values, places = torch.topk(a * b, 2)
        return values, places, torch.sort(b)[0]

    view, _ = view_of(f, torch.randn(8))
    for node, cell in view.cells.items():
        if isinstance(cell, Cell):
            assert view.value(node).meta.shape == node.meta["example_value"].shape, node
    assert len(set(result(view))) == 3
