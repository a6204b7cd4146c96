"""Loops over experts as third-party model files spell them: what else than experts they could be stays a loop."""

import pytest
import torch
from harness import compare
from loops import Asked, BySlot, E, H, K, Lists, Mlp, Plain, Ranged, Running, Shared, Table, Unique
from test_module_lists import LOOP, Traced, check, fresh, tokens  # noqa: F401  `fresh` is a fixture
from torch import nn
from torch.nn import functional as F


def stays(block, x=None):
    """`block` is left alone, or what is fused of it is no loop, and computes what it does in eager mode."""
    traced = Traced(block)
    compare(block, traced, tokens(2, 9) if x is None else x)
    assert not any(site.detail == LOOP for site in traced.report.sites if site.status == "fused"), traced.report
    return traced


@pytest.mark.parametrize("training", [True, False])
def test_experts_without_tokens(training):
    """They get gradients of zeros, whatever the loop does to have them."""
    block = Asked().train(training)
    with torch.no_grad():
        block.gate.weight.zero_()
    check(block)


def test_dropout_behind_experts():
    block = Table([nn.Sequential(Plain(), nn.Dropout(0.5)) for _ in range(E)])
    traced = Traced(block, fullgraph=True)
    traced(tokens(2, 9)).sum().backward()
    assert traced.report.fused == 1, traced.report
    check(block.eval())


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_op_for_each_slot(dynamic):
    traced = check(BySlot(), fused=K, dynamic=dynamic)
    assert len(traced.graphs) == 1


def test_weights_of_parameters_that_are_stacked():
    class Stacks(Unique):
        def __init__(self):
            super().__init__()
            self.up = self.on = self.down = None
            self.w1, self.w2 = (nn.Parameter(torch.randn(E, H, H) * 0.3) for _ in range(2))

        def forward(self, x):
            weights, ids = torch.topk(self.gate(x), K)
            y = torch.zeros_like(x)
            for e in torch.unique(ids):
                t, k = torch.where(ids == e)
                y.index_add_(0, t, (F.relu(x[t] @ self.w1[e]) @ self.w2[e]) * weights[t, k, None])
            return y

    check(Stacks(), tokens(9))


class OtherQuestion(Asked):
    """Asks for something else than whether the expert has tokens."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            if (x[:, i] > 0).any():
                rows = mask.any(dim=-1).nonzero().flatten()
                y.index_add_(0, rows, expert(x[rows]) * weights[mask].view(-1, 1))
        return y


class OtherQuestionWithout(Asked):
    """Asks for something else where the expert has none."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(ids == i)
            if rows.numel() > 0:
                y.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
            elif (x[:, i] > 0).any():
                y[0, 0] += 1
        return y


class OtherPlaces(Asked):
    """The same with places of something else."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(ids == i)
            if rows.numel() > 0:
                y.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
            elif (x[:, i] > 0).nonzero().shape[0] > 0:
                y[0, 0] += 1
        return y


class Turned(Asked):
    """The answer is changed before it is asked for."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            hit = mask.any()
            hit.logical_not_()
            if hit:
                continue
            rows, slots = torch.where(mask)
            y.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
            if hit:
                y += 1
        return y


class Penalty(Asked):
    """Experts without tokens add more than zero."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            if mask.any():
                rows = mask.any(dim=-1).nonzero().flatten()
                y.index_add_(0, rows, expert(x[rows]) * weights[mask].view(-1, 1))
            else:
                y[0, 0] += 1e-3 * sum(p.sum() for p in expert.parameters())
        return y


class Twice(Shared):
    """A token may go to one expert twice, and would be counted once."""

    def forward(self, x):
        scores = self.gate(x[0]).softmax(-1)
        return self.moe(x[0], (scores * 7).long()[:, :K] % E, scores[:, :K])


class TwiceFirst(Twice):
    """The weight of the first of the two for both."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            mask = ids == e
            t, _ = torch.where(mask)
            slots = mask[t].int().argmax(dim=-1, keepdim=True)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t].gather(-1, slots))
        return y


class OtherWeights(Asked):
    """Those of the other slot."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            if mask.any():
                rows = mask.any(dim=-1).nonzero().flatten()
                y.index_add_(0, rows, expert(x[rows]) * weights.flip(-1)[~mask.flip(-1)][: len(rows)].view(-1, 1))
        return y


class AllWeights(Shared):
    """All of a token's weights instead of the expert's share."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            mine = (ids == e).any(dim=-1)
            if mine.sum() > 0:
                y[mine] += weights.sum(dim=-1)[mine].unsqueeze(-1) * self.experts[e](x[mine])
        return y


class Two(Shared):
    """Experts with one token are skipped."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            mask = ids == e
            mine = mask.any(dim=-1)
            if mine.sum() > 1:
                y[mine] += (weights * mask).sum(dim=-1)[mine].unsqueeze(-1) * self.experts[e](x[mine])
        return y


class Assigned(Shared):
    """Each expert's outputs overwrite those of others."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            mask = ids == e
            mine = mask.any(dim=-1)
            if mine.any():
                y[mine] += 0
                y[mine] = (weights * mask).sum(dim=-1)[mine].unsqueeze(-1) * self.experts[e](x[mine])
        return y


class SomeUnique(Unique):
    """Experts that are no token's first choice are left out."""

    def forward(self, x):
        x = x.view(-1, H)
        weights, ids = torch.topk(self.gate(x), K, dim=-1)
        y = torch.zeros_like(x)
        found = torch.unique(ids[:, :1])
        for number in found:
            e = int(number.item())
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.down[e](F.silu(self.on[e](x[t])) * self.up[e](x[t])) * weights[t, k, None])
        return y


class Backwards(Unique):
    """Numbers that may be negative: Python counts from the end then."""

    def forward(self, x):
        x = x.view(-1, H)
        weights, ids = torch.topk(self.gate(x), K, dim=-1)
        ids = ids - 2
        y = torch.zeros_like(x)
        for number in torch.unique(ids):
            e = int(number.item())
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.down[e](F.silu(self.on[e](x[t])) * self.up[e](x[t])) * weights[t, k, None])
        return y


class OtherSlot(Unique):
    """The weight of the slot that is not the expert's."""

    def forward(self, x):
        x = x.view(-1, H)
        weights, ids = torch.topk(self.gate(x), K, dim=-1)
        y = torch.zeros_like(x)
        for number in torch.unique(ids):
            e = int(number.item())
            mask = ids == e
            t = mask.any(dim=-1).nonzero().squeeze(-1)
            slots = self.slots(mask[t])
            out = self.down[e](F.silu(self.on[e](x[t])) * self.up[e](x[t]))
            y.index_add_(0, t, out * weights[t].gather(-1, slots))
        return y

    def slots(self, mask):
        return (~mask).int().argmax(dim=-1, keepdim=True)


class LeastSlot(OtherSlot):
    def slots(self, mask):
        return mask.int().argmin(dim=-1, keepdim=True)


class OtherColumn(Table):
    def forward(self, x):
        table, ids = self.route(x)
        y = torch.zeros_like(x)
        flat, shares = x.view(-1, x.size(-1)), table.view(-1, table.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            rows = mask.view(-1)
            if rows.any():
                y[mask] += expert(flat[rows]) * shares[rows, 0].unsqueeze(1)
        return y


class OtherTokens(Table):
    """Batch and length are swapped between what is read and what is added onto."""

    def forward(self, x):
        table, ids = self.route(x)
        y = torch.zeros_like(x)
        flat, shares = x.transpose(0, 1).reshape(-1, H), table.view(-1, table.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            rows = mask.view(-1)
            if rows.any():
                y[mask.t().contiguous().view_as(mask)] += expert(flat[rows]) * shares[rows, i].unsqueeze(1)
        return y


class Sideways(Table):
    """A mask of batch and length becomes one of length and batch."""

    def forward(self, x):
        table, ids = self.route(x)
        y = torch.zeros_like(x).transpose(0, 1).contiguous()
        flat, shares = x.view(-1, x.size(-1)), table.view(-1, table.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1).t()
            rows = mask.reshape(-1)
            if rows.any():
                y[mask] += expert(flat[rows]) * shares[rows, i].unsqueeze(1)
        return y.transpose(0, 1)


class Tails(Ranged):
    """Experts that hand their tokens through, unless something else is asked for."""

    def __init__(self):
        super().__init__([*(Mlp() for _ in range(E - 1)), nn.Identity()])

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            if e == self.num_experts - 1 and (x[:, 0] > 9).any():
                continue
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class TailsByPlaces(Tails):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            if e == self.num_experts - 1 and (x[:, 0] > 9).nonzero().shape[0] > 0:
                continue
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None])
        return y


class WrittenBetween(Table):
    def forward(self, x):
        table, ids = self.route(x)
        y = torch.zeros_like(x)
        flat, shares = x.view(-1, x.size(-1)) * 1, table.view(-1, table.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            rows = mask.view(-1)
            if rows.any():
                y[mask] += expert(flat[rows]) * shares[rows, i].unsqueeze(1)
                flat.mul_(1.1)
        return y


ENDS = """
class Changed(Ends):
    def infer(self, x, ids, weights):
        y = torch.zeros_like(x)
        order = ids.argsort({sort})
        ends = {ends}
        tokens = order // {k}
        for i, end in enumerate(ends):
            start = {start}
            {stop}
            if start == end:
                continue
            mine = tokens[start:end]
            out = self.experts[i](x[mine])
            out = out * weights[{weight}]
            y.{add}
        return y
"""
PLAIN = {
    "sort": "",
    "ends": "ids.bincount().cpu().numpy().cumsum(0)",
    "k": "self.top_k",
    "start": "0 if i == 0 else ends[i - 1]",
    "stop": "",
    "weight": "order[start:end]",
    "add": "scatter_reduce_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), out, reduce='sum')",
}


def changed(tmp_path, monkeypatch, **parts):
    """`Ends` with other `parts`, from a file, since the loop is read from its source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"ends_{abs(hash(tuple(parts.items())))}"
    source = "import torch\nfrom torch.nn import functional as F\nfrom loops import Ends, E\n"
    (tmp_path / f"{name}.py").write_text(source + ENDS.format(**PLAIN | parts))
    return __import__(name).Changed()


def run(block):
    with torch.no_grad():  # what is added in place may have no gradients in eager mode either
        x = tokens(2, 9)
        traced = Traced(block)
        assert torch.allclose(traced(x), block(x), atol=1e-5)
    return [site for site in traced.report.sites if site.status == "fused" and site.detail == LOOP]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"start": "ends[i - 1] if i > 0 else 0"},
        {"start": "ends[i - 1] if i != 0 else 0"},
        {"ends": "torch.bincount(ids, minlength=E).cumsum(0).tolist()"},
        {"ends": "torch.cumsum(torch.bincount(ids), 0).cpu().numpy()"},
        {"add": "index_add_(0, mine, out)"},
        {"add": "scatter_add_(0, mine.unsqueeze(-1).expand(-1, x.shape[-1]), out)"},
    ],
)
def test_ends(tmp_path, monkeypatch, parts):
    assert run(changed(tmp_path, monkeypatch, **parts))


@pytest.mark.parametrize(
    "parts",
    [
        {"sort": "descending=True"},
        {"ends": "ids.flip(0).clamp(max=E - 2).bincount(minlength=E).cpu().numpy().cumsum(0)"},
        {"ends": "ids.bincount(minlength=E).clamp(max=3).cpu().numpy().cumsum(0)"},
        {"ends": "ids.bincount(minlength=E).cumsum(0).clamp(max=7).cpu().numpy()"},
        {"ends": "ids[::2].bincount(minlength=E).cpu().numpy().cumsum(0)"},
        {"ends": "(ids.bincount(minlength=E) + 0 * ids[:E]).cpu().numpy().cumsum(0)"},
        {"ends": "ids.bincount(weights=weights.view(-1) * 0 + 1).long().cpu().numpy().cumsum(0)"},
        {"ends": "ids.bincount(minlength=E).cpu().numpy()"},
        {"k": "(self.top_k + 1)"},
        {"k": "1 % x.shape[0]"},
        {"start": "0"},
        {"start": "0 if i == 1 else ends[i - 1]"},
        {"start": "1 if i == 0 else ends[i - 1]"},
        {"start": "0 if i == 0 else ends[i - 2]"},
        {"start": "0 if i <= 1 else ends[i - 1]"},
        {"stop": "end = min(end, start + 3)"},
        {"stop": "end = end - 1"},
        {"weight": "tokens[start:end]"},
        {"weight": "mine"},
        {"weight": "order[:end][-(end - start):].flip(0)"},
        {"add": "scatter_reduce_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), out, reduce='mean')"},
        {"add": "scatter_reduce_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), out, reduce='sum', include_self=False)"},
        {"add": "scatter_reduce_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), out, reduce='amax')"},
        {"add": "scatter_add_(1, mine.view(-1, 1).repeat(1, x.shape[-1]) % 16, out)"},
        {"add": "scatter_add_(0, mine.view(-1, 1), out)"},
        {"add": "scatter_add_(0, order[start:end].view(-1, 1).repeat(1, x.shape[-1]) % x.shape[0], out)"},
    ],
)
def test_ends_of_something_else(tmp_path, monkeypatch, parts):
    try:
        block = changed(tmp_path, monkeypatch, **parts)
        with torch.no_grad():
            block(tokens(2, 9))
    except (IndexError, TypeError, RuntimeError):
        pass  # no program at all: it must not become one
    else:
        assert not run(block)
        return
    with torch.no_grad(), pytest.raises(Exception):  # noqa: B017  whatever eager raises
        Traced(block)(tokens(2, 9))


class Skipped(Running):
    """The rows of a skipped expert are not gone past."""

    def moe(self, x, ids, weights):
        flat, share = ids.view(-1), weights.view(-1)
        order = torch.argsort(flat)
        counts = torch.bincount(flat, minlength=self.num_experts)
        tokens = order // self.top_k
        y = torch.zeros_like(x)
        start = 0
        for i, count in enumerate(counts.cpu().numpy()):
            end = start + count
            mine = tokens[start:end]
            y.index_add_(0, mine, self.experts[i](x[mine]) * share[order[start:end]].unsqueeze(-1))
            start = start
        return y


class OtherCounts(Running):
    """Counts of other numbers, which are many enough."""

    def moe(self, x, ids, weights):
        flat, share = ids.view(-1), weights.view(-1)
        order = torch.argsort(flat)
        counts = torch.bincount((flat + 1) % self.num_experts, minlength=self.num_experts)
        tokens = order // self.top_k
        y = torch.zeros_like(x)
        start = 0
        for i, count in enumerate(counts.cpu().numpy()):
            end = start + count
            mine = tokens[start:end]
            y.index_add_(0, mine, self.experts[i](x[mine]) * share[order[start:end]].unsqueeze(-1))
            start = end
        return y


class OtherList(Lists):
    """Rows in another order than their outputs are added in."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            rows, slots = torch.where(ids == e)
            if rows.shape[0] == 0:
                continue
            rows_list, slots_list = rows.flip(0).tolist(), slots.tolist()
            y.index_add_(0, rows, self.experts[e](x[rows_list]) * weights[rows_list, slots_list, None])
        return y


class FirstSlot(BySlot):
    """The weights of the first slot for all."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for k in range(self.top_k):
            for e in range(self.num_experts):
                mask = ids[:, k] == e
                if mask.any():
                    y[mask] += weights[mask][:, 0].unsqueeze(-1) * self.experts[e](x[mask])
        return y


class Carried(BySlot):
    """What one round over the experts leaves behind is read in the next."""

    def moe(self, x, ids, weights):
        y, out = torch.zeros_like(x), 0
        for k in range(self.top_k):
            x = x + 0 * (out if k == 0 else out.mean())
            for e in range(self.num_experts):
                mask = ids[:, k] == e
                if mask.any():
                    out = self.experts[e](x[mask])
                    y[mask] += weights[mask, k].unsqueeze(-1) * out
        return y


@pytest.mark.parametrize(
    "make",
    [
        *(OtherQuestion, OtherQuestionWithout, OtherPlaces, Turned, Penalty, Twice, TwiceFirst, OtherWeights),
        *(AllWeights, Two, Assigned, SomeUnique, Backwards, OtherSlot, LeastSlot, OtherColumn, OtherTokens),
        *(WrittenBetween, OtherList, Carried, Skipped, OtherCounts, Sideways, Tails, TailsByPlaces),
    ],
)
def test_loops_that_are_something_else(make):
    torch.manual_seed(1)
    stays(make())


def test_weights_of_the_first_slot():
    """Are weights all the same."""
    model = FirstSlot()
    compare(model, Traced(model), tokens(2, 9))


class Filling(Ranged):
    """`Filled` in parts that can be changed."""

    def moe(self, x, ids, weights):
        flat = ids.view(-1)
        x = x.repeat_interleave(self.top_k, dim=0)
        y = self.start(x)
        for i, expert in enumerate(self.experts):
            mask = flat == i
            if mask.any():
                y[self.rows(mask)] = expert(x[mask]).to(y.dtype)
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def start(self, x):
        return torch.zeros_like(x)

    def rows(self, mask):
        return mask


class FilledOver(Filling):
    def start(self, x):
        return torch.ones_like(x)

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, H)
        ids = torch.topk(self.gate(x), K, dim=-1)[1] - 1  # some slots go to no expert
        return self.moe(x, ids, torch.ones_like(ids, dtype=x.dtype)).view(shape)


class FilledAndRead(Filling):
    def start(self, x):
        y = torch.zeros_like(x)
        y[0] = 1
        self.kept = y.view(-1)
        return y


class FilledNarrowly(Filling):
    def start(self, x):
        return torch.zeros_like(x, dtype=torch.bfloat16)


class FilledElsewhere(Filling):
    def rows(self, mask):
        return mask.flip(0)


class FilledInReverse(Filling):
    def rows(self, mask):
        return mask.nonzero().squeeze(-1).flip(0)


class FilledByToken(Ranged):
    """The slots of a token overwrite each other."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = (ids == i).any(dim=-1)
            if mine.any():
                y[mine] = expert(x[mine])
        return y


class WithoutBranch(FilledNarrowly):
    """The graph has masks, but what is narrowed in it cannot be fused with the sum."""

    def moe(self, x, ids, weights):
        flat = ids.view(-1)
        x = x.repeat_interleave(self.top_k, dim=0)
        y = torch.empty_like(x, dtype=torch.bfloat16)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(x[flat == i]).to(y.dtype)
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


@pytest.mark.parametrize("make", [Filling, FilledNarrowly])
def test_rows_that_are_filled(make):
    check(make())


def test_rows_that_are_filled_without_a_branch():
    """As masks of a graph where that holds the whole block, else as a loop."""
    model = WithoutBranch()
    traced = Traced(model)
    compare(model, traced, tokens(2, 9))
    assert traced.counts() == (1, 0) and traced.report.sites[0].detail == LOOP


def test_numbers_that_were_chosen_as_a_list():
    class Flat(Unique):
        def forward(self, x):
            weights, ids = torch.topk(self.gate(x), K)
            y = torch.zeros_like(x)
            for e in torch.unique(ids.view(-1)).tolist():
                t, k = torch.where(ids == e)
                y.index_add_(0, t, self.down[e](F.relu(self.up[e](x[t]))) * weights[t, k, None])
            return y

    check(Flat(), tokens(9))


def test_slots_without_expert_hold_zeros():
    class Fewer(FilledOver):
        def start(self, x):
            return torch.zeros_like(x)

    check(Fewer())


@pytest.mark.parametrize("make", [FilledOver, FilledAndRead, FilledElsewhere, FilledInReverse, FilledByToken])
def test_rows_that_are_filled_otherwise(make):
    stays(make())


class Scaled(Ranged):
    """A sum over a generator that is more than zero times something."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            size = sum(p.numel() for p in self.experts[e].parameters())
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None] / size)
        return y


def test_a_sum_over_an_experts_parameters():
    """Is a constant, of which the weights are made in the loop."""
    model = Scaled()
    compare(model, Traced(model), tokens(2, 9))


class Masks(nn.Module):
    """Boolean masks as indices, and no name that says what this is."""

    def __init__(self, top_k=K):
        super().__init__()
        self.gate, self.top_k = nn.Linear(H, E, bias=False), top_k
        self.w1, self.w2 = (nn.Parameter(torch.randn(E, H, H) * 0.3) for _ in range(2))

    def layer(self, x, e):
        return F.silu(x @ self.w1[e]) @ self.w2[e]

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), self.top_k)
        y = torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(-1)
            y[mask] += self.layer(x[mask], e) * (weights * (ids == e)).sum(-1)[mask][:, None]
        return y


class MasksAndAsks(Masks):
    """Two lists of layers, and a look at the mask."""

    def __init__(self):
        super().__init__()
        self.w1 = self.w2 = None
        self.up, self.down = (nn.ModuleList(nn.Linear(H, H) for _ in range(E)) for _ in range(2))

    def forward(self, x):
        weights, ids = torch.topk(self.gate(x).softmax(-1), self.top_k)
        y = torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(-1)
            if mask.any():
                y[mask] += self.down[e](F.gelu(self.up[e](x[mask]))) * (weights * (ids == e)).sum(-1)[mask][:, None]
        return y


class MasksOfOne(Masks):
    """The best expert alone."""

    def choose(self, x):
        return self.gate(x).softmax(-1).max(-1)

    def forward(self, x):
        weights, ids = self.choose(x)
        y = torch.zeros_like(x)
        for e in range(E):
            mask = ids == e
            y[mask] = self.layer(x[mask], e) * weights[mask][:, None]
        return y


class MasksOfLargest(MasksOfOne):
    def choose(self, x):
        scores = self.gate(x).sigmoid()
        ids = scores.argmax(-1)
        return scores.gather(-1, ids[:, None])[:, 0], ids


@pytest.mark.parametrize("make", [Masks, MasksAndAsks, MasksOfOne, MasksOfLargest])
def test_masks_in_code_that_speaks_of_no_experts(make):
    """Need neither `fullgraph` nor a flag to stay in one graph."""
    model = make()
    traced = Traced(model)
    compare(model, traced, tokens(9))
    assert traced.counts() == (1, 0) and len(traced.graphs) == 1, traced.report


class MasksOfOthers(Masks):
    """The rows of one expert get the weights of the next."""

    def layer(self, x, e):
        return super().layer(x, (e + 1) % E)


class MasksOfSome(MasksOfOne):
    """Tokens of the first expert stay zero."""

    def forward(self, x):
        weights, ids = self.choose(x)
        y = torch.zeros_like(x)
        for e in range(1, E):
            mask = ids == e
            y[mask] = self.layer(x[mask], e) * weights[mask][:, None]
        return y


class TypesOfTokens(nn.Module):
    """A layer for each type of token: no choice is made."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

    def forward(self, x):
        types = torch.arange(x.shape[0]) % E
        y = torch.zeros_like(x)
        for e in range(E):
            mask = types == e
            y[mask] = self.layers[e](x[mask])
        return y


@pytest.mark.parametrize("make", [MasksOfOthers, MasksOfSome, TypesOfTokens])
def test_masks_that_are_something_else(make):
    stays(make(), tokens(9))


class MasksAndCuts(Masks):
    """A gradient is cut on the way from the stacked parameters."""

    def __init__(self, cut):
        super().__init__()
        self.b, self.cut = nn.Parameter(torch.randn(E, H)), cut

    def layer(self, x, e):
        return CUTS[self.cut](self, x, self.w1[e], self.w2[e], self.b[e])


def without_gradients(function, *args):
    with torch.no_grad():
        return function(*args)


CUTS = {
    "matrix": lambda block, x, w1, w2, b: F.silu(x @ w1.detach()) @ w2,
    "data": lambda block, x, w1, w2, b: F.silu(x @ w1.data) @ w2,
    "last matrix": lambda block, x, w1, w2, b: F.silu(x @ w1) @ w2.t().detach().t(),
    "copied": lambda block, x, w1, w2, b: F.silu(x @ without_gradients(torch.clone, w1)) @ w2,
    "turned": lambda block, x, w1, w2, b: F.silu(F.linear(x, without_gradients(torch.t, w1))) @ w2,
    "bias": lambda block, x, w1, w2, b: F.silu(x @ w1 + b.detach()) @ w2,
    "staged": lambda block, x, w1, w2, b: torch.bmm(F.silu(torch.bmm(x[None], w1[None].detach())), w2[None])[0],
    "dropped": lambda block, x, w1, w2, b: F.dropout(F.silu(x @ w1) @ w2, 0.0).detach(),
}


@pytest.mark.parametrize("cut", CUTS)
def test_gradients_that_are_cut(cut):
    """Fused there would be one."""
    model = MasksAndCuts(cut)
    traced = Traced(model, fullgraph=False, verify=False)
    compare(model, traced, tokens(9))
    assert traced.report.fused == 0, traced.report
    with torch.no_grad():
        check(MasksAndCuts(cut), tokens(9).detach())


class MasksAndSeeds(Masks):
    def layer(self, x, e):
        torch.manual_seed(3)
        return super().layer(x, e)


def test_seeds_of_torch():
    """Are there after the block, and not after the proof."""
    model, x = MasksAndSeeds(), tokens(9)
    torch.manual_seed(5)
    model(x)
    wanted = torch.get_rng_state()
    traced = Traced(model, fullgraph=False)
    torch.manual_seed(5)
    traced(x)
    assert torch.equal(torch.get_rng_state(), wanted) and traced.report.fused == 0, traced.report
