"""Cases of ``mok::experts_parallel``, run on each rank of a group, against one process that has all tokens."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mok_compile import ops  # noqa: F401  registers the oracle
from mok_compile.distributed import ops as parallel_ops  # noqa: F401
from mok_compile.distributed.sharding import Sharding
from mok_compile.spec import ExpertsSpec, dtype_name


@dataclass(frozen=True)
class Block:
    """A block and its tokens: `tokens` how many each rank has, `route` the name of a function below."""

    tokens: tuple[int, ...]
    experts: int = 6
    k: int = 2
    hidden: int = 16
    inner: int = 24
    layout: str = "concat"
    bias: bool = False
    weight_on: str = "output"
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None
    ids_dtype: torch.dtype = torch.int64
    route: str = "spread"
    engine: str = "portable"
    frozen: tuple[str, ...] = ()
    steps: int = 1
    exact: bool = field(default=True, kw_only=True)


def spread(block, tokens, generator):
    return torch.rand(tokens, block.experts, generator=generator).topk(block.k).indices


def to_last(block, tokens, generator):
    """Everything to the last expert, several slots of a token included."""
    return torch.full((tokens, block.k), block.experts - 1)


def sentinels(block, tokens, generator):
    """Half of the slots have no expert, and some tokens none at all."""
    ids = spread(block, tokens, generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.5] = block.experts
    ids[::3] = -1
    return ids


def nowhere(block, tokens, generator):
    return torch.full((tokens, block.k), -1)


def data(block):
    """Tokens of each rank, [(x, ids, weights, dy)], and the lists of all experts' weights."""
    generator = torch.Generator().manual_seed(1)

    def new(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(block.dtype)

    E, H, I = block.experts, block.hidden, block.inner
    parts, columns = {"separate": (2, I), "single": (1, I)}.get(block.layout, (1, 2 * I))
    up = [new(E, columns, H, scale=0.3) for _ in range(parts)]
    down = [new(E, H, I, scale=0.3)]
    up_bias = [new(E, columns) for _ in range(parts)] if block.bias else []
    down_bias = [new(E, H)] if block.bias else []
    out_dtype = block.out_dtype or block.dtype
    ranks = []
    for tokens in block.tokens:
        ids = globals()[block.route](block, tokens, generator).to(block.ids_dtype)
        weights = torch.rand(tokens, block.k, generator=generator)
        ranks.append((new(tokens, H), ids, weights.to(torch.float32), new(tokens, H).to(out_dtype)))
    return ranks, (up, down, up_bias, down_bias)


def spec(block):
    activation = "relu(up)" if block.layout == "single" else "silu(gate) * up"
    return ExpertsSpec(activation, block.layout, dtype_name(block.out_dtype or block.dtype), block.weight_on).to_json()


def leaves(block, x, weights, lists):
    """Fresh leaves that require a gradient, unless frozen."""
    names = ("x", "weights", "up", "down", "up_bias", "down_bias")
    groups = [[x], [weights], *lists]
    made = [[t.clone().requires_grad_(n not in block.frozen) for t in g] for n, g in zip(names, groups, strict=True)]
    return made[0][0], made[1][0], made[2:]


def own_experts(lists, sharding, rank):
    first = sharding.first(rank)
    return [[t[first : first + sharding.size(rank)] for t in tensors] for tensors in lists]


def parallel(block, x, ids, weights, lists, group=None):
    group = group or dist.group.WORLD
    how = ("collectives", group.group_name, group.size(), block.experts, spec(block), block.engine)
    return torch.ops.mok.experts_parallel(x, ids, weights, *lists, *how)[0]


def against_one_process(block):
    """The outputs of this rank, bit for bit, and all its gradients, these unless `exact` closely only, are those of one
    process."""
    rank, sharding = dist.get_rank(), Sharding(block.experts, dist.get_world_size())
    ranks, lists = data(block)
    all_x, all_ids, all_weights, all_dy = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    x0, weights0, lists0 = leaves(block, all_x, all_weights, lists)
    wanted = torch.ops.mok.experts(x0, all_ids, weights0, *lists0, spec(block), block.engine)[0]
    x, ids, weights, dy = ranks[rank]
    x1, weights1, lists1 = leaves(block, x, weights, own_experts(lists, sharding, rank))
    for _ in range(block.steps):
        found = parallel(block, x1, ids, weights1, lists1)
        if found.requires_grad:
            found.backward(dy)
            torch.ops.mok.experts(x0, all_ids, weights0, *lists0, spec(block), block.engine)[0].backward(all_dy)
    start = sum(block.tokens[:rank])
    mine = slice(start, start + block.tokens[rank])
    pairs = [("y", found.detach(), wanted.detach()[mine])]
    if found.requires_grad:
        pairs += [("x", x1.grad, None if x0.grad is None else x0.grad[mine])]
        pairs += [("weights", weights1.grad, None if weights0.grad is None else weights0.grad[mine])]
        first, size = sharding.first(rank), sharding.size(rank)
        for name, own, whole in zip(("up", "down", "up_bias", "down_bias"), lists1, lists0, strict=True):
            for a, b in zip(own, whole, strict=True):
                pairs.append((name, a.grad, None if b.grad is None else b.grad[first : first + size]))
    for name, a, b in pairs:
        if a is None or b is None:
            assert a is b is None, f"only one side has a gradient of {name}"
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, (name, a.shape, b.shape, a.dtype, b.dtype)
        if block.exact or name == "y":
            assert torch.equal(a, b), f"{name}: bits differ by up to {(a - b).abs().max()}"
        else:
            tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(block.dtype, 1e-5)
            scale = max(1e-6, float(b.abs().max())) if b.numel() else 1.0
            assert b.numel() == 0 or (a - b).abs().max() <= tolerance * scale, name
    return tuple(found.shape)


def by_hand(block):
    """`mok_compile.functional` over a group gives what autograd gives; the schedule counts all routes."""
    from mok_compile import functional

    rank, group = dist.get_rank(), dist.group.WORLD
    ranks, lists = data(block)
    x, ids, weights, dy = ranks[rank]
    own = own_experts(lists, Sharding(block.experts, group.size()), rank)
    x, weights, own = leaves(block, x, weights, own)
    wanted = parallel(block, x, ids, weights, own)
    wanted.backward(dy)
    how = {"engine": "portable", "group": group, "num_experts": block.experts}
    given = (x, ids, weights, functional.Weights(*own), ExpertsSpec.from_json(spec(block)))
    y, context = functional.forward(*given, **how)
    grads = functional.backward(dy, context)
    assert torch.equal(y, wanted) and torch.equal(functional.experts(*given, **how), wanted)
    for name, found in (("x", grads.x), ("weights", grads.weights), ("up", grads.up[0]), ("down", grads.down[0])):
        leaf = {"x": x, "weights": weights, "up": own[0][0], "down": own[1][0]}[name]
        assert torch.equal(found, leaf.grad), name
    routes = functional.schedule(ids, block.experts, group)
    assert routes.counts.sum(1).tolist() == [tokens * block.k for tokens in block.tokens]
    assert sum(routes.sent) == block.tokens[rank] * block.k
    return sum(routes.received)
