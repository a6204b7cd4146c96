"""A rank of tests/gpu/test_ranks.py: expert parallelism over peer memory against one GPU that has everything.

torchrun --nproc-per-node N tests/gpu/ep_ranks.py CASE ...

With fewer GPUs than ranks, ranks share them (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 must be set): their kernels
then run in turns, and waits take milliseconds.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

from mok_compile import functional
from mok_compile.distributed import windows
from mok_compile.distributed.sharding import Sharding
from mok_compile.spec import ExpertsSpec, dtype_name

NAMES = functional.OPERANDS


def block(
    tokens, hidden, inner, experts, top_k, *,
    bias=False, layout="concat", skew=False, seed=0, holes=False, dtype=torch.bfloat16, transposed=False,
):  # fmt: skip
    """Operands of all ranks' tokens and all experts, the same on every rank; `tokens` by rank."""
    g = torch.Generator().manual_seed(seed)
    total = sum(tokens)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(dtype).cuda()

    def weight(*shape):
        values = normal(*shape, scale=shape[-1] ** -0.5)
        return values.mT.contiguous().mT if transposed else values

    x, dy = normal(total, hidden), normal(total, hidden)
    scores = torch.rand(total, experts, generator=g)
    if skew:
        scores[:, : max(top_k, experts // 4)] += 1
    ids = scores.topk(top_k, 1).indices.cuda()
    if holes:
        ids[torch.rand(ids.shape, generator=g).cuda() < 0.2] = -1
    weights = torch.rand(total, top_k, generator=g).cuda()
    parts = 2 if layout == "separate" else 1
    up = tuple(weight(experts, 2 * inner // parts, hidden) for _ in range(parts))
    down = (weight(experts, hidden, inner),)
    up_bias = tuple(normal(experts, 2 * inner // parts) for _ in range(parts)) if bias else ()
    down_bias = (normal(experts, hidden),) if bias else ()
    return x, ids, weights, functional.Weights(up, down, up_bias, down_bias), dy


def mine(operands, tokens, experts):
    """This rank's part."""
    x, ids, weights, bank, dy = operands
    rank, sharding = dist.get_rank(), Sharding(experts, dist.get_world_size())
    rows = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    own = slice(sharding.first(rank), sharding.first(rank + 1))
    lists = (tuple(t[own].clone() for t in part) for part in bank.lists)
    return (
        (x[rows].clone(), ids[rows].clone(), weights[rows].clone(), functional.Weights(*lists), dy[rows].clone()),
        rows,
        own,
    )


def exactly(operands):
    """The same in float32, whose products are exact here up to its rounding."""
    x, ids, weights, bank, dy = operands
    lists = (tuple(t.float() for t in part) for part in bank.lists)
    return x.float(), ids, weights, functional.Weights(*lists), dy.float()


def both(operands, spec, **how):
    x, ids, weights, bank, dy = operands
    y, context = functional.forward(x, ids, weights, bank, spec, **how)
    return y, functional.backward(dy, context)


def parallel(experts, transport):
    return {"group": dist.group.WORLD, "num_experts": experts, "engine": "sm90", "transport": transport}


def grads_of(found):
    """name -> tensors, all of them."""
    lists = {name: getattr(found, name) for name in NAMES}
    return {n: [v] if isinstance(v, torch.Tensor) else list(v or ()) for n, v in lists.items()}


def error(found, wanted):
    """Relative; infinite where there are NaNs, which comparisons would let pass."""
    wanted = wanted.double()
    value = ((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-9)).item() if wanted.numel() else 0.0
    return value if value == value else float("inf")


def check(name, tokens, hidden, inner, experts, top_k, transport="peer_memory", exact=False, like=None, **how):
    """Outputs and gradients of every rank against float32 with all tokens and experts, with an error at most twice that
    of one GPU in 16 bits; and twice, to the same bits. Prints `=` where they are those of one GPU. `like`: a transport
    that gives the same bits, but for gradients of weights and biases."""
    tokens = [*tokens, *[tokens[-1]] * (dist.get_world_size() - len(tokens))][: dist.get_world_size()]
    operands = block(tokens, hidden, inner, experts, top_k, **how)
    layout = how.get("layout", "concat")
    spec = ExpertsSpec("silu(gate) * up", layout, dtype_name(operands[0].dtype))
    alone_y, alone = both(operands, spec, engine="sm90")
    wanted_y, wanted = both(exactly(operands), ExpertsSpec(spec.activation, layout, "float32"), engine="portable")
    own, rows, held = mine(operands, tokens, experts)
    found_y, found = both(own, spec, **parallel(experts, transport))
    again_y, again = both(own, spec, **parallel(experts, transport))
    bits = torch.equal(found_y, again_y)
    if like is not None:
        like_y, like_found = both(own, spec, **parallel(experts, like))
        same_bits = [(found_y, like_y), (found.x, like_found.x), (found.weights, like_found.weights)]
        bits = bits and all(torch.equal(a, b) for a, b in same_bits)
    worst = {"y": error(found_y, wanted_y[rows])}
    same, theirs = {"y": torch.equal(found_y, alone_y[rows])}, {"y": error(alone_y, wanted_y)}
    first, second, reference, one = grads_of(found), grads_of(again), grads_of(wanted), grads_of(alone)
    for key in NAMES:
        part = rows if key in ("x", "weights") else held
        for f, s, w, o in zip(first[key], second[key], reference[key], one[key], strict=True):
            bits = bits and torch.equal(f, s)
            assert f.shape == o[part].shape and f.dtype == o.dtype, (key, f.shape, o.shape)
            worst[key] = max(worst.get(key, 0.0), error(f, w[part]))
            theirs[key] = max(theirs.get(key, 0.0), error(o, w))
            same[key] = same.get(key, True) and torch.equal(f, o[part])
    # A part of the rows may be rounded less luckily than all of them; idle experts and no tokens have no error at all.
    near = all(same[k] or v <= 2 * theirs[k] + 2e-3 for k, v in worst.items())
    well = bits and near and (not exact or (same["y"] and same["x"]))
    said = " ".join(f"{k}={v:.1e}{'=' if same[k] else f' ({theirs[k]:.1e})'}" for k, v in worst.items())
    print(f"{'ok  ' if well else 'BAD '} {name} rank {dist.get_rank()}: bits {bits} {said}", flush=True)
    return well


def values():
    all_rows = f"peer_memory room={dist.get_world_size()}"
    results = [
        check("even", [64, 64], 256, 128, 8, 2),
        check("uneven", [100, 37, 64], 256, 128, 8, 2),
        check("odd experts", [200, 129, 3], 264, 136, 5, 3),
        check("no tokens on rank 0", [0, 50], 256, 128, 8, 2),
        check("one token", [1, 0], 256, 128, 8, 8),
        check("fewer experts than ranks", [40, 30], 256, 128, 1, 1),
        check("all to one rank", [300, 300], 512, 192, 16, 4, skew=True, transport=all_rows),
        check("few tokens beside many", [6000, 5], 136, 72, 8, 2, transport=all_rows),
        check("slots without expert", [150, 70], 256, 128, 8, 4, holes=True),
        check("biases", [90, 120], 256, 128, 8, 2, bias=True),
        check("separate", [90, 120], 256, 128, 8, 2, layout="separate"),
        check("large", [3000, 2500], 1024, 512, 32, 8),
        check("exact", [3000, 2500], 1024, 512, 32, 8, transport="peer_memory exact=1", exact=True),
        check("exact, small", [5, 2], 256, 128, 8, 2, transport="peer_memory exact=1", exact=True),
    ]
    return all(results)


def ring_for(tokens, hidden):
    """A ring for so many tokens of each other rank."""
    return -(-2 * hidden * tokens * (dist.get_world_size() - 1) // 1_000_000)


def rings():
    """Passes cut into turns, with ranks whose tokens end before the last one."""
    ring = f"peer_memory ring={ring_for(512, 1024)}"
    all_rows = f"peer_memory room={dist.get_world_size()}"
    wide = f"{all_rows} ring={ring_for(512, 1024)}"
    results = [
        check("ring", [3000, 2500], 1024, 512, 32, 8, ring, like="peer_memory"),
        check("ring, uneven", [1700, 0, 130], 1024, 136, 5, 3, ring, like="peer_memory", bias=True),
        check("ring, separate", [100, 2000], 1024, 128, 8, 2, ring, like="peer_memory", layout="separate", holes=True),
        check("ring, one expert", [1500, 900], 1024, 128, 1, 1, wide, like=all_rows),
        check("ring, skewed", [1300, 900], 1024, 192, 16, 4, wide, like=all_rows, skew=True),
        check("ring, [E, in, out]", [900, 1500], 1024, 128, 8, 2, ring, like="peer_memory", transposed=True),
        check("ring, float16", [900, 1500], 1024, 128, 8, 2, ring, like="peer_memory", dtype=torch.float16),
        check("ring, interleaved", [900, 1500], 1024, 128, 8, 2, ring, like="peer_memory", layout="interleaved"),
        check("ring, exact, biases", [900, 1500], 1024, 128, 8, 2, f"{ring} exact=1", exact=True, bias=True),
        check("ring, exact", [3000, 2500], 1024, 512, 32, 8, f"{ring} exact=1", exact=True, like="peer_memory exact=1"),
    ]
    windows.release()
    tokens = [3000] * dist.get_world_size()
    own, _, _ = mine(block(tokens, 1024, 128, 8, 2), tokens, 8)
    _, context = functional.forward(*own[:4], ExpertsSpec("silu(gate) * up", "concat", "bfloat16"), **parallel(8, ring))
    rows = context.saved[0]
    limit = ring_for(512, 1024) * 1_000_000
    results.append(0 < rows.numel() * rows.element_size() <= limit)
    print(f"{'ok  ' if results[-1] else 'BAD '} kept rows {tuple(rows.shape)}, ring of {limit} bytes", flush=True)
    once, twice = (grads_of(functional.backward(own[4], context)) for _ in range(2))
    results.append(all(torch.equal(a, b) for n in NAMES for a, b in zip(once[n], twice[n], strict=True)))
    print(f"{'ok  ' if results[-1] else 'BAD '} two backward passes of one forward", flush=True)
    return all(results)


def small():
    """For compute-sanitizer, under which everything takes long."""
    return all(
        [
            check("uneven", [5, 2], 72, 40, 5, 2, bias=True, transport="peer_memory timeout=100"),
            check("exact", [5, 0], 72, 40, 5, 2, transport="peer_memory exact=1 timeout=100"),
            check("ring", [130, 2], 3904, 40, 5, 2, transport=f"peer_memory ring={ring_for(128, 3904)} timeout=100"),
        ]
    )


def repeats():
    """The same bits a hundred times, with ranks that are late by random times."""
    tokens = [700] * dist.get_world_size()
    operands, _, _ = mine(block(tokens, 512, 256, 16, 4), tokens, 16)
    windows.release()
    spec, well, first = ExpertsSpec("silu(gate) * up", "concat", "bfloat16"), True, None
    delays = torch.Generator().manual_seed(dist.get_rank())
    for i in range(100):
        torch.cuda._sleep(int(torch.randint(0, 400_000, (), generator=delays)))
        y, grads = both(operands, spec, **parallel(16, "peer_memory"))
        flat = [y, *(t for v in grads_of(grads).values() for t in v)]
        if first is None:
            first = flat
        elif not all(torch.equal(a, b) for a, b in zip(first, flat, strict=True)):
            print(f"BAD  run {i} differs", flush=True)
            well = False
    return well


def streams():
    """Two blocks on two streams, in the same order on all ranks."""
    windows.release()
    tokens = [500] * dist.get_world_size()
    spec = ExpertsSpec("silu(gate) * up", "concat", "bfloat16")
    cases = [mine(block(tokens, 512, 256, 16, 4, seed=s), tokens, 16)[0] for s in (1, 2)]
    plain = [both(case, spec, **parallel(16, "peer_memory"))[0] for case in cases]
    torch.cuda.synchronize()
    side = [torch.cuda.Stream(), torch.cuda.Stream()]
    well = True
    for _ in range(20):
        found = []
        for stream, case in zip(side, cases, strict=True):
            with torch.cuda.stream(stream):
                found.append(both(case, spec, **parallel(16, "peer_memory"))[0])
        torch.cuda.synchronize()
        well = well and all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    return well


def graphs():
    """Forward and backward in a CUDA graph, replayed with other tokens."""
    return graph(256, 512, "peer_memory") and graph(1100, 1024, f"peer_memory ring={ring_for(512, 1024)}")


def graph(tokens, hidden, transport):
    windows.release()
    tokens = [tokens] * dist.get_world_size()
    spec = ExpertsSpec("silu(gate) * up", "concat", "bfloat16")
    (x, ids, weights, bank, dy), _, _ = mine(block(tokens, hidden, 256, 16, 4, seed=3), tokens, 16)
    how = parallel(16, transport)
    for _ in range(2):
        both((x, ids, weights, bank, dy), spec, **how)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y, grads = both((x, ids, weights, bank, dy), spec, **how)
    well = True
    for seed in (3, 4, 5):
        fresh, _, _ = mine(block(tokens, hidden, 256, 16, 4, seed=seed), tokens, 16)
        for to, value in zip((x, ids, weights, dy), (fresh[0], fresh[1], fresh[2], fresh[4]), strict=True):
            to.copy_(value)
        captured.replay()
        torch.cuda.synchronize()
        wanted_y, wanted = both((x, ids, weights, bank, dy), spec, **how)
        well = (
            well
            and torch.equal(y, wanted_y)
            and torch.equal(grads.up[0], wanted.up[0])
            and torch.equal(grads.x, wanted.x)
        )
    return well


def raised(call):
    """The text of the error that a call, or the calls after it, end with."""
    for _ in range(3):
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as problem:
            return str(problem)
    return None


def faults():
    """Every rank raises the same kind of error, and goes on working afterwards."""
    windows.release()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    spec, tokens = ExpertsSpec("silu(gate) * up", "concat", "bfloat16"), [128] * ranks
    operands, _, _ = mine(block(tokens, 256, 128, 8, 2), tokens, 8)
    wanted = both(operands, spec, **parallel(8, "peer_memory timeout=3"))[0]
    well = True

    def expect(name, text, said):
        nonlocal well
        good = said is not None and text in said
        well = well and good
        print(f"{'ok  ' if good else 'BAD '} {name} rank {rank}: {said}", flush=True)

    def again(name):
        nonlocal well
        windows.release()
        dist.barrier()
        good = torch.equal(both(operands, spec, **parallel(8, "peer_memory timeout=3"))[0], wanted)
        well = well and good
        print(f"{'ok  ' if good else 'BAD '} {name} rank {rank}: works again", flush=True)

    more = [128] * (ranks - 1) + [400]
    bigger, _, _ = mine(block(more, 256, 128, 8, 2), more, 8)
    expect("more tokens than before", "tokens, and there is room for", raised(
        lambda: functional.forward(*bigger[:4], spec, **parallel(8, "peer_memory timeout=3"))))  # fmt: skip
    dist.barrier()
    again("more tokens than before")
    windows.release()
    # Later turns have no room; ranks but the first have tokens in the first turn alone.
    long = [3000] + [100] * (ranks - 1)
    (x, ids, *rest), _, _ = mine(block(long, 1024, 128, 8, 2), long, 8)
    ids[1000:] = 0
    how = parallel(8, f"peer_memory timeout=3 room=0.7 ring={ring_for(512, 1024)}")
    y, _ = functional.forward(x, ids, *rest[:2], spec, **how)
    marked = bool(y.flatten()[0].isnan())
    well = well and marked
    print(f"{'ok  ' if marked else 'BAD '} outputs after a fault in a later turn rank {rank}: {marked}", flush=True)
    expect("no room in a later turn", "there is room for", raised(
        lambda: functional.forward(x, ids, *rest[:2], spec, **how)))  # fmt: skip
    dist.barrier()
    again("no room in a later turn")
    windows.release()
    crowded, _, _ = mine(block(tokens, 256, 128, 8, 2, skew=True), tokens, 8)
    expect("no room for the rows", "there is room for", raised(
        lambda: functional.forward(*crowded[:4], spec, **parallel(8, "peer_memory timeout=3 room=0.5"))))  # fmt: skip
    dist.barrier()
    again("no room for the rows")
    if rank == 0:
        time.sleep(1.5)  # late, but not too late
    good = torch.equal(both(operands, spec, **parallel(8, "peer_memory timeout=3"))[0], wanted)
    well = well and good
    print(f"{'ok  ' if good else 'BAD '} a late rank is waited for", flush=True)
    if rank > 0:
        expect("rank 0 does not call", "rank 0 did not publish", raised(
            lambda: functional.forward(*operands[:4], spec, **parallel(8, "peer_memory timeout=3"))))  # fmt: skip
    dist.barrier()
    again("rank 0 does not call")
    y, context = functional.forward(*operands[:4], spec, **parallel(8, "peer_memory timeout=3"))
    if rank > 0:
        grads = functional.backward(y, context)
        torch.cuda.synchronize()
        marked = [bool(t.flatten()[0].isnan()) for v in grads_of(grads).values() for t in v]
        well = well and all(marked)
        print(f"{'ok  ' if all(marked) else 'BAD '} gradients after a fault rank {rank}: {marked}", flush=True)
        expect("rank 0 runs no backward", "rank 0 did not publish", raised(
            lambda: functional.forward(*operands[:4], spec, **parallel(8, "peer_memory timeout=3"))))  # fmt: skip
    dist.barrier()
    again("rank 0 runs no backward")
    return well


def main():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > torch.cuda.device_count():
        dist.init_process_group("gloo")  # NCCL takes one rank a GPU
    else:
        dist.init_process_group("nccl", device_id=device)
    bad = []
    for name in sys.argv[1:]:
        start = time.time()
        well = torch.tensor([int(globals()[name]())], device="cuda")
        dist.all_reduce(well, dist.ReduceOp.MIN)
        if dist.get_rank() == 0:
            print(f"{'ok  ' if well.item() else 'BAD '} {name} ({time.time() - start:.1f} s)", flush=True)
        if not well.item():
            bad.append(name)
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
