"""Blocks whose experts are modules in a list, called one by one in a Python loop, as transformers 4 spells them."""

import torch
from torch import nn
from torch.nn import functional as F

H, I, E, K = 16, 12, 5, 2


class Mlp(nn.Module):
    def __init__(self, bias=False, act=None):
        super().__init__()
        self.gate_proj = nn.Linear(H, I, bias=bias)
        self.up_proj = nn.Linear(H, I, bias=bias)
        self.down_proj = nn.Linear(I, H, bias=bias)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(H, I), nn.Linear(I, H), nn.Dropout(dropout)

    def forward(self, x):
        return self.fc2(self.dropout(F.gelu(self.fc1(x))))


class Hit(nn.Module):
    """A loop over the experts that were hit."""

    def __init__(self, experts=None, top_k=K):
        super().__init__()
        self.experts = nn.ModuleList(experts or [Mlp() for _ in range(E)])
        self.num_experts, self.top_k = len(self.experts), top_k
        self.gate = nn.Linear(H, self.num_experts, bias=False)

    def forward(self, hidden_states):
        batch, length, width = hidden_states.shape
        hidden_states = hidden_states.view(-1, width)
        logits = self.gate(hidden_states)
        weights, ids = torch.topk(
            F.softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float)), self.top_k, dim=-1
        )
        weights = weights.to(hidden_states.dtype)
        final = torch.zeros((batch * length, width), dtype=hidden_states.dtype, device=hidden_states.device)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit:
            expert = self.experts[expert_idx]
            idx, top_x = torch.where(mask[expert_idx].squeeze(0))
            current = hidden_states[None, top_x].reshape(-1, width)
            current = expert(current) * weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        return final.reshape(batch, length, width)


class Ranged(Hit):
    """A loop over all experts, with or without a look at how many tokens they have."""

    def forward(self, hidden_states):
        shape = hidden_states.shape
        hidden_states = hidden_states.view(-1, shape[-1])
        logits = self.gate(hidden_states)
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        weights, ids = scores.topk(self.top_k, dim=-1)
        return self.moe(hidden_states, ids, weights).view(*shape)

    def moe(self, hidden_states, topk_indices, topk_weights):
        final = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        mask = F.one_hot(topk_indices, num_classes=len(self.experts))
        mask = mask.permute(2, 0, 1)
        for e in range(len(self.experts)):
            expert = self.experts[e]
            tokens, slots = torch.where(mask[e])
            if tokens.numel() > 0:
                output = expert(hidden_states[tokens])
                final.index_add_(0, tokens, output * topk_weights[tokens, slots].unsqueeze(-1))
        return final.type(hidden_states.dtype)


class Unasked(Ranged):
    """Experts without tokens are called too."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None].to(x.dtype))
        return y


class Skipping(Ranged):
    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for e in range(self.num_experts):
            k, t = torch.where(mask[e])
            if t.shape[0] == 0:
                continue
            y.index_add_(0, t, (self.experts[e](x[t]) * weights[t, k, None]).to(x.dtype))
        return y


class Zipped(Ranged):
    """Masks and experts side by side, weights from one of two branches, as in LitGPT."""

    normed = True

    def forward(self, x):
        shape = x.shape
        x = x.view(-1, shape[-1])
        if self.normed:
            weights, ids = torch.topk(self.gate(x), self.top_k)
            weights = weights.softmax(dim=1)
        elif self.normed is None:
            weights, ids = torch.topk(self.gate(x).sigmoid(), self.top_k)
        else:
            raise ValueError("weights of another kind")
        masks = ids.unsqueeze(-1) == torch.arange(self.num_experts, device=x.device)
        masks = masks.permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts, strict=True):
            t, k = torch.where(mask)
            y[t] += weights[t, k, None] * expert(x[t])
        return y.view(shape)


class Counted(Ranged):
    """Experts without tokens are skipped by their count, as in the reference code of DeepSeek-V3."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=self.num_experts).tolist()
        for e in range(self.num_experts):
            if counts[e] == 0:
                continue
            t, k = torch.where(ids == e)
            y[t] += self.experts[e](x[t]) * weights[t, k, None]
        return y


class Onto(Ranged):
    """Adds onto something that is not zero, and onto what is returned besides."""

    def moe(self, x, ids, weights):
        y = x * 2
        alias = y.view(-1)
        for e in range(self.num_experts):
            t, k = torch.where(ids == e)
            y.index_add_(0, t, self.experts[e](x[t]) * weights[t, k, None].to(x.dtype))
        return y + alias.view_as(y)


class Named(Ranged):
    """A dictionary of experts, picked by name."""

    def __init__(self, experts=None, top_k=K):
        super().__init__(experts, top_k)
        self.experts = nn.ModuleDict({f"expert_{i}": expert for i, expert in enumerate(self.experts)})

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            k, t = torch.where(mask[e].squeeze(0))
            y.index_add_(0, t, self.experts[f"expert_{e[0]}"](x[t]) * weights[t, k, None].to(x.dtype))
        return y


class Tail(Ranged):
    """Some experts are no experts but hand their tokens through."""

    def __init__(self):
        super().__init__([*(Mlp() for _ in range(E)), nn.Identity(), nn.Identity()])


class Stacked(nn.Module):
    """Weights of all experts in one tensor, a number that means no expert, and scores of every expert."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.limit = E, 0.7
        self.gate = nn.Linear(H, E)
        self.gate_up = nn.Parameter(torch.randn(E, H, 2 * I) * 0.3)
        self.gate_up_bias = nn.Parameter(torch.randn(E, 2 * I) * 0.3)
        self.down = nn.Parameter(torch.randn(E, I, H) * 0.3)
        self.down_bias = nn.Parameter(torch.randn(E, H) * 0.3)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        values, ids = torch.topk(self.gate(x), K, dim=-1)
        scores = torch.zeros_like(self.gate(x)).scatter_(1, ids, values.softmax(-1))
        return self.experts(x, ids, scores).view(shape)

    def experts(self, x, router_indices, routing_weights):
        y = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(router_indices, num_classes=self.num_experts + 1)
            mask = mask.permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in hit[:]:
            expert_idx = expert_idx[0]
            if expert_idx == self.num_experts:
                continue
            with torch.no_grad():
                _, token = torch.where(mask[expert_idx])
            gate_up = x[token] @ self.gate_up[expert_idx] + self.gate_up_bias[expert_idx]
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            gate = gate.clamp(min=None, max=self.limit)
            up = up.clamp(min=-self.limit, max=self.limit)
            out = ((up + 1) * gate * torch.sigmoid(gate * 1.7)) @ self.down[expert_idx] + self.down_bias[expert_idx]
            y.index_add_(0, token, (out * routing_weights[token, expert_idx, None]).to(x.dtype))
        return y


class Flat(Stacked):
    """Weights of all experts as the rows of one matrix, seen apart in the loop."""

    def __init__(self):
        super().__init__()
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(E * I, H) * 0.3) for _ in range(3))

    def experts(self, x, router_indices, routing_weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(router_indices, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        shape = (-1, I, H)
        for e in hit:
            e = e[0]
            _, t = torch.where(mask[e])
            w1, v1, w2 = self.w1.view(shape)[e], self.v1.view(shape)[e], self.w2.view(shape)[e]
            y.index_add_(0, t, ((F.silu(x[t] @ w1.T) * (x[t] @ v1.T)) @ w2) * routing_weights[t, e, None])
        return y


class Chunks(Stacked):
    """Lists of one tensor for each expert, and expert numbers that keep a dimension."""

    def experts(self, x, router_indices, routing_weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(router_indices, num_classes=self.num_experts).permute(2, 1, 0)
        downs = [w.squeeze(0) for w in self.down.chunk(self.num_experts)]
        ups = [w.squeeze(0) for w in self.gate_up.chunk(self.num_experts)]
        for e in range(self.num_experts):
            _, t = torch.where(mask[e])
            if t.shape[0] == 0:
                continue
            gate, up = (x[None, t].reshape(-1, H) @ ups[e]).chunk(2, dim=-1)
            y.index_add_(0, t, (F.gelu(gate) * up) @ downs[e] * routing_weights[t, e, None])
        return y


class Kept(Stacked):
    def experts(self, x, router_indices, routing_weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(router_indices, num_classes=self.num_experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit[:]:
            _, t = torch.where(mask[e[0]])
            gate, up = (x[t] @ self.gate_up[e]).chunk(2, dim=-1)
            out = (up * F.silu(gate)) @ self.down[e]
            y.index_add_(0, t, out[0] * routing_weights[t, e, None])
        return y


class Sorted(Ranged):
    """Rows sorted by expert, each expert's taken out in turn, put together again."""

    def moe(self, x, topk_ids, topk_weight):
        counts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        counts.scatter_(1, topk_ids, 1)
        tokens_per_expert = counts.sum(dim=0)
        indices = topk_ids.view(-1).argsort()
        sorted_tokens = x[indices // topk_ids.shape[1]]
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(self.counted(tokens_per_expert)):
            if num_tokens == 0:
                continue
            end_idx = start_idx + num_tokens
            expert = self.experts[i]
            outputs.append(expert(sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if outputs else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[indices] = outs
        weighted = new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype).mul_(topk_weight.unsqueeze(dim=-1))
        return weighted.sum(dim=1).type(new_x.dtype)

    def counted(self, counts):
        return counts


class Remote(Sorted):
    """The inference of DeepSeek's own model files: no gradients, counts in numpy, and the names of another loop."""

    ranks = 1

    @torch.no_grad()
    def moe(self, x, topk_ids, topk_weight):
        counts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        counts.scatter_(1, topk_ids, 1)
        ranks = 0
        for i in range(topk_ids.shape[1]):
            ranks += i
        tokens_per_expert = counts.sum(dim=0).cpu().numpy()
        indices = topk_ids.view(-1).argsort()
        sorted_tokens = x[indices // topk_ids.shape[1]]
        if self.ranks > 1:
            gathered, s = counts.new_zeros(len(indices)), 0
            for i, k in enumerate(tokens_per_expert):
                gathered[s : s + k] = i % self.ranks
                gathered[i] = s
                s += k
            sorted_tokens = sorted_tokens[gathered.argsort()]
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            end_idx = start_idx + num_tokens
            if num_tokens == 0:
                continue
            outputs.append(self.experts[i](sorted_tokens[start_idx:end_idx]))
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if len(outputs) else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[indices] = outs
        weighted = new_x.view(*topk_ids.shape, -1).type(topk_weight.dtype).mul_(topk_weight.unsqueeze(dim=-1))
        return weighted.sum(dim=1).type(new_x.dtype) + ranks


class Binned(Sorted):
    """Counts as Python numbers, by `bincount`."""

    def moe(self, x, ids, weights):
        order = ids.view(-1).argsort(stable=True)
        counts = torch.bincount(ids.view(-1), minlength=len(self.experts))
        counts = counts.cpu().tolist()
        rows = x[order // ids.shape[1]]
        outputs, start = [], 0
        for e, count in enumerate(counts):
            if count > 0:
                outputs.append(self.experts[e](rows[start : start + count]))
            start = start + count
        y = torch.cat(outputs)[order.argsort()].view(*ids.shape, -1)
        return (y * weights.unsqueeze(-1)).sum(1)


class Asked(Ranged):
    """Asks whether any token goes to the expert, and else adds nothing, so that there are gradients."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = ids == i
            if mask.any():
                rows = mask.any(dim=-1).nonzero().flatten()
                weight = weights[mask].view(-1, 1)
                y.index_add_(0, rows, (expert(x[rows]) * weight).to(y.dtype))
            elif self.training:
                y[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        return y


class Shared(Ranged):
    """The expert's share of each token's weights; the rows are told by a mask."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e in range(self.num_experts):
            mask = ids == e
            mine = mask.any(dim=-1)
            if mine.sum() > 0:
                share = (weights * mask).sum(dim=-1)[mine]
                y[mine] += share.unsqueeze(-1) * self.experts[e](x[mine])
        return y


class Unique(nn.Module):
    """Over the numbers that were chosen; lists of layers instead of experts; weights by the place of the maximum."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.up, self.on, self.down = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(E)) for a, b in ((H, I), (H, I), (I, H))
        )

    def forward(self, x):
        shape = x.shape
        scores, ids = torch.topk(self.gate(x), K, dim=-1)
        weights = torch.softmax(scores, dim=-1)
        flat = x.reshape(-1, H)
        y = torch.zeros(flat.shape[0], H, dtype=x.dtype)
        ids, weights = ids.reshape(-1, K), weights.reshape(-1, K)
        found = torch.unique(ids)
        for number in found:
            e = int(number.item())
            mask = ids == e
            if not mask.any():
                continue
            rows = mask.any(dim=-1).nonzero(as_tuple=False).squeeze(-1)
            if rows.numel() == 0:
                continue
            given = flat.index_select(0, rows)
            out = self.down[e](F.silu(self.on[e](given)) * self.up[e](given))
            slots = mask[rows].int().argmax(dim=-1, keepdim=True)
            share = torch.gather(weights.index_select(0, rows), dim=-1, index=slots).squeeze(-1)
            y.index_add_(0, rows, out * share.unsqueeze(-1))
        return y.reshape(shape)


class Table(nn.Module):
    """Tokens keep their dimensions; weights in a table, a softmax over logits that are infinite elsewhere."""

    def __init__(self, experts=None):
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(experts or [Plain() for _ in range(E)])

    def route(self, x):
        logits = self.gate(x)
        chosen, ids = logits.topk(K, dim=-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, ids, chosen).softmax(-1), ids

    def forward(self, x):
        table, ids = self.route(x)
        y = torch.zeros_like(x)
        flat, shares = x.view(-1, x.size(-1)), table.view(-1, table.size(-1))
        for i, expert in enumerate(self.experts):
            mask = (ids == i).any(dim=-1)
            rows = mask.view(-1)
            if rows.any():
                share = shares[rows, i].unsqueeze(1)
                y[mask] += (expert(flat[rows]) * share).squeeze(1)
        return y


class Ends(Ranged):
    """Slots sorted by expert, and where each expert's end, as in the inference of DeepSeek's first models."""

    def moe(self, x, ids, weights):
        return self.infer(x, ids.view(-1), weights.view(-1, 1))

    def infer(self, x, ids, weights):
        y = torch.zeros_like(x)
        order = ids.argsort()
        ends = ids.bincount().cpu().numpy().cumsum(0)
        tokens = order // self.top_k
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            expert = self.experts[i]
            mine = tokens[start:end]
            out = expert(x[mine]).to(y.dtype)
            out.mul_(weights[order[start:end]])
            y.scatter_add_(0, mine.view(-1, 1).repeat(1, x.shape[-1]), out)
        return y


class Running(Ranged):
    """The same with counts, which are added up on the way."""

    def moe(self, x, ids, weights):
        flat, share = ids.view(-1), weights.view(-1)
        order = torch.argsort(flat)
        counts = torch.bincount(flat[order], minlength=self.num_experts)
        tokens = order // self.top_k
        y = torch.zeros_like(x)
        start = 0
        for i, count in enumerate(counts.cpu().numpy()):
            if count == 0:
                continue
            end = start + count
            mine = tokens[start:end]
            out = self.experts[i](x[mine]) * share[order[start:end]].unsqueeze(-1)
            y.index_add_(0, mine, out.to(x.dtype))
            start = end
        return y


class Lists(Ranged):
    """Rows as lists of numbers, as in the first Mixtral of transformers."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=self.num_experts).permute(2, 1, 0)
        for e in range(self.num_experts):
            slots, rows = torch.where(mask[e])
            if rows.shape[0] == 0:
                continue
            rows_list, slots_list = rows.tolist(), slots.tolist()
            given = x[None, rows_list].reshape(-1, x.shape[-1])
            y.index_add_(0, rows, (self.experts[e](given) * weights[rows_list, slots_list, None]).to(x.dtype))
        return y


class Filled(Ranged):
    """Rows of all slots are filled in; experts without any add zeros, so that there are gradients."""

    def moe(self, x, ids, weights):
        flat, shape = ids.view(-1), (*weights.shape, -1)
        x = x.repeat_interleave(self.top_k, dim=0)
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            out = expert(x[flat == i])
            if out.shape[0] > 0:
                y[flat == i] = out.to(y.dtype)
            else:
                y[flat == i] = out.to(y.dtype) + 0 * sum(p.sum() for p in expert.parameters())
        return (y.view(shape) * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)


class BySlot(Ranged):
    """A loop over each token's slots around the one over the experts: one op for each slot."""

    def moe(self, x, ids, weights):
        y = torch.zeros_like(x)
        for k in range(self.top_k):
            for e in range(self.num_experts):
                mask = ids[:, k] == e
                if mask.any():
                    y[mask] += weights[mask, k].unsqueeze(-1) * self.experts[e](x[mask])
        return y


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)


FORMS = {
    "hit": Hit,
    "ranged": Ranged,
    "unasked": Unasked,
    "skipping": Skipping,
    "zipped": Zipped,
    "counted": Counted,
    "onto": Onto,
    "named": Named,
    "tail": Tail,
    "stacked": Stacked,
    "flat": Flat,
    "chunks": Chunks,
    "kept": Kept,
    "sorted": Sorted,
    "remote": Remote,
    "binned": Binned,
    "asked": Asked,
    "shared": Shared,
    "unique": Unique,
    "table": Table,
    "ends": Ends,
    "running": Running,
    "lists": Lists,
    "filled": Filled,
    "biases": lambda: Hit([Mlp(bias=True) for _ in range(E)]),
    "plain": lambda: Ranged([Plain() for _ in range(E)]),
    "top_1": lambda: Hit(top_k=1),
    "one_expert": lambda: Hit([Mlp()], top_k=1),
    "all_experts": lambda: Ranged(top_k=E),
}
