"""MoE blocks on one H100 or H200: ours, Hugging Face + Inductor, SonicMoE where it is installed, and the ceilings.

    python benchmarks/h200.py                                  # everything; half an hour
    python benchmarks/h200.py --shapes qwen3-30b-a3b --tokens 2048,16384 --candidates bound,op

Candidates: `op` is the fused op alone (routing given), `op-lists` the same with a tensor for each expert, `mok` the
Hugging Face block under backend="mok", `hf` the same block under Inductor, `mok-graphs` and `hf-graphs` these with
mode="reduce-overhead", `sonic` SonicMoE with the default tiles of QuACK's matrix products, `sonic-tuned` with the tiles
that QuACK's tuner finds (the first call compiles them, a minute or more), `bound` the block's matrix products alone,
perfectly balanced and gathered, through cuBLAS' batched product. FLOPs: 6 T K H I forward, three times that with
backward. Milliseconds are a call's, `device` those of its kernels alone, whatever the host takes to launch them. Writes
a line of JSON per measurement and a table. A warm card is slower than a cold one: compare only figures of one run, and
better of several turns (`--turns 2`: all candidates again, in opposite order).
"""

import argparse
import functools
import itertools
import json
import os
import time

import torch
from shapes import ONE_CARD, SHAPES
from torch.profiler import ProfilerActivity, profile
from triton.testing import do_bench

ACTIVATION = "silu(gate) * up"
GRAPH_TOKENS = 512  # up to here inference is measured as a CUDA graph too,
CALLS = 8  # of so many calls


def median(run, rep=120):
    return do_bench(run, warmup=40, rep=rep, return_mode="median")


def matmul_rate():
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / median(lambda: a @ b, 80) / 1e9


def copy_rate():
    a = torch.empty(2**30, device="cuda", dtype=torch.bfloat16).normal_()
    b = torch.empty_like(a)
    return 2 * a.nbytes / median(lambda: b.copy_(a)) / 1e9


def graph_time(run):
    """Milliseconds a call takes inside a CUDA graph of several calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return median(graph.replay) / CALLS


def device_time(run, calls=3):
    """Milliseconds that a call's kernels and copies take."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    launches = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.device_time for e in launches) / calls / 1e3


def random_ids(tokens, experts, top_k, routing):
    scores = torch.rand(tokens, experts, device="cuda")
    if routing == "zipf":  # Gumbel top-k of probabilities 1 / rank
        scores = -torch.log(-torch.log(scores)) - torch.log(torch.arange(1, experts + 1, device="cuda"))
    return scores.topk(top_k, 1).indices


class Weights:
    def __init__(self, hidden, inner, experts, top_k):
        def normal(*shape):
            return (torch.randn(shape, device="cuda") * 0.02).bfloat16()

        self.sizes = hidden, inner, experts, top_k
        self.router, self.up = normal(experts, hidden), normal(experts, 2 * inner, hidden)
        self.down = normal(experts, hidden, inner)

    def block(self):
        """The Hugging Face block, on these weights."""
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        hidden, inner, experts, top_k = self.sizes
        config = Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=inner,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = "grouped_mm"
        with torch.device("meta"):
            block = Qwen3MoeSparseMoeBlock(config)
        block.gate.weight = torch.nn.Parameter(self.router)
        block.experts.gate_up_proj = torch.nn.Parameter(self.up)
        block.experts.down_proj = torch.nn.Parameter(self.down)
        return block


def lists(stacked, order):
    """A tensor for each expert, allocated in that order."""
    found = [None] * len(stacked)
    for expert in order:
        found[expert] = stacked[expert].clone()
    return found


def candidate(name, weights, tokens, routing):
    """(inference, training step or None) of a candidate: functions to be timed. The step ends with all gradients. Calls
    take turns at several inputs, so that few tokens do not find their experts in the L2."""
    hidden, inner, experts, top_k = weights.sizes
    x = (0.5 * torch.randn(tokens, hidden, device="cuda")).bfloat16()
    dy = torch.randn_like(x)
    if name in ("op", "op-lists"):
        from mok_compile import ops  # noqa: F401  registers the ops
        from mok_compile.spec import ExpertsSpec

        how = (ExpertsSpec(ACTIVATION, "concat", "bfloat16").to_json(), "sm90")
        routes = itertools.cycle([random_ids(tokens, experts, top_k, routing) for _ in range(CALLS)])
        scale = torch.rand(tokens, top_k, device="cuda")
        # In random order, each allocated for itself: no two experts at a distance that all have.
        alone = [torch.randperm(experts).tolist() if name == "op-lists" else None for _ in range(2)]
        ups, downs = (
            [w] if order is None else lists(w, order)
            for w, order in zip((weights.up, weights.down), alone, strict=True)
        )
        leaves = [t.detach().requires_grad_() for t in (x, scale, *ups, *downs)]

        def infer():
            with torch.no_grad():
                return torch.ops.mok.experts_infer(x, next(routes), scale, ups, downs, [], [], *how)

        def train():
            a, s, *banks = leaves
            up, down = banks[: len(ups)], banks[len(ups) :]
            y = torch.ops.mok.experts(a, next(routes), s, up, down, [], [], *how)[0]
            torch.autograd.grad(y, leaves, dy)

        return infer, train
    if name == "bound":
        rows = max(1, tokens * top_k // experts)

        def normal(columns):
            return (torch.randn(experts, rows, columns, device="cuda") * 0.05).bfloat16()

        xs, h, a = normal(hidden), normal(2 * inner), normal(inner)
        up, down = weights.up, weights.down

        def forward():
            torch.bmm(xs, up.transpose(1, 2))
            torch.bmm(a, down.transpose(1, 2))

        def both():
            forward()
            torch.bmm(xs, down)
            torch.bmm(h, up)
            torch.bmm(h.transpose(1, 2), xs)
            torch.bmm(xs.transpose(1, 2), a)

        return forward, both
    if routing != "balanced":
        return None, None  # the others route themselves
    block = weights.block()
    if name in ("sonic", "sonic-tuned"):
        run = sonic(block, top_k, tuned=name == "sonic-tuned")
    else:
        torch._dynamo.reset()
        run = torch.compile(block, fullgraph=True, dynamic=False, **compiler(name))
    leaf = x[None].detach().requires_grad_()
    rotating = CALLS if tokens <= GRAPH_TOKENS else 1
    inputs = itertools.cycle([torch.randn_like(leaf) for _ in range(rotating)])

    def infer():
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return run(next(inputs))

    def train():
        torch.compiler.cudagraph_mark_step_begin()
        out = run(leaf)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(dy[None])
        leaf.grad = None
        block.zero_grad(set_to_none=True)

    return infer, train


def compiler(name):
    """The options of torch.compile for a candidate."""
    mode = {"mode": "reduce-overhead"} if name.endswith("-graphs") else {}
    if name.startswith("mok"):
        from mok_compile.backend import mok  # the object: its name is known only where the package is installed

        return {"backend": mok, **mode}
    return mode


def sonic(block, top_k, tuned):
    """SonicMoE on the weights of a block (written for sonic-moe 0.1.2): a function of its input."""
    from quack import gemm_interface
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import backward, forward, moe_TC_softmax_topk_layer

    products = {
        (module, name): functools.partial(getattr(gemm_interface, name), tuned=tuned)
        for module, names in ((forward, ("gemm", "gemm_gated")), (backward, ("gemm", "gemm_dgated")))
        for name in names
    }

    def run(x):
        for (module, name), product in products.items():  # at each call: the layer has no argument that says it
            setattr(module, name, product)
        up, down = block.experts.gate_up_proj.permute(1, 2, 0), block.experts.down_proj.permute(1, 2, 0)
        stream = torch.cuda.current_stream().cuda_stream
        how = {
            "activation_type": ActivationType.SWIGLU,
            "is_inference_mode_enabled": not torch.is_grad_enabled(),
            "is_softmax_over_topk": False,
            "norm_topk_probs": True,
            "concat_layout": True,
        }
        flat = x.view(-1, x.shape[-1])
        y = moe_TC_softmax_topk_layer(flat, block.gate.weight, up, None, down, None, top_k, stream, **how)[0]
        return y.view(x.shape)

    return run


def measure(name, weights, tokens, routing):
    hidden, inner, _, top_k = weights.sizes
    flops = 6 * tokens * top_k * hidden * inner
    start = time.time()
    infer, train = candidate(name, weights, tokens, routing)
    if infer is None:
        return None
    infer()
    torch.cuda.synchronize()
    row = {"first_s": round(time.time() - start, 1)}
    row["fwd_ms"] = median(infer)
    if name in ("op", "op-lists", "mok") and tokens <= GRAPH_TOKENS:
        row["graph_ms"] = graph_time(infer)
    if tokens > GRAPH_TOKENS:
        row["fwd_device_ms"] = device_time(infer)
    row["fwd_tflops"] = flops / min(row["fwd_ms"], row.get("graph_ms", 1e9)) / 1e9
    if train and tokens >= 128:
        train()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train()
        row["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        row["both_ms"] = median(train)
        row["both_device_ms"] = device_time(train)
        row["both_tflops"] = 3 * flops / row["both_ms"] / 1e9
    return row


def training_step(name, layers=4, batch=4, length=4096):
    """A whole model of the Qwen3-30B-A3B shape: milliseconds of a training step without optimiser, and its memory."""
    from step_model import VOCABULARY, build

    model = build(layers)
    ids = torch.randint(0, VOCABULARY, (batch, length), device="cuda")
    torch._dynamo.reset()
    run = torch.compile(model, **compiler(name))

    def step():
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.item()

    start = time.time()
    row = {"loss": step(), "first_s": round(time.time() - start, 1)}
    torch.cuda.reset_peak_memory_stats()
    step()
    row["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    row["step_ms"] = median(step, 800)
    if name == "mok":
        row["counters"] = dict(torch._dynamo.utils.counters["mok"])
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(ONE_CARD))
    parser.add_argument("--tokens", default="1,16,128,512,2048,16384")
    parser.add_argument("--candidates", default="bound,op,mok,mok-graphs,hf,hf-graphs,sonic,sonic-tuned")
    parser.add_argument("--turns", type=int, default=1, help="every second one in opposite order")
    parser.add_argument("--routing", default="balanced,zipf", help="zipf concerns `op` alone")
    parser.add_argument("--end-to-end", default="hf,mok", help="training step of a four-layer model; empty: none")
    parser.add_argument("--out", default=os.environ.get("OUT", "benchmarks/results"))
    options = parser.parse_args()
    torch.manual_seed(0)
    import transformers

    rows = []

    def emit(**row):
        rows.append(row)
        short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(short), flush=True)
        with open(os.path.join(options.out, "h200.jsonl"), "a") as file:
            file.write(json.dumps(short) + "\n")

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    emit(what="conditions", gpu=torch.cuda.get_device_name(), **versions, dtype="bfloat16")
    emit(what="copy", tb_per_s=copy_rate())
    for name in filter(None, options.end_to_end.split(",")):
        try:
            row = training_step(name)
        except Exception as error:
            row = {"error": repr(error)[:300]}
        emit(what="training step, 4 layers, 4 x 4096 tokens", candidate=name, **row)
        torch.cuda.empty_cache()
    for shape in filter(None, options.shapes.split(",")):
        weights = Weights(*SHAPES[shape])
        for tokens in map(int, options.tokens.split(",")):
            emit(what="matmul 8192^3", tflops=matmul_rate())
            runs = [(r, c) for r in options.routing.split(",") for c in options.candidates.split(",")]
            runs = [(routing, name) for routing, name in runs if name == "op" or routing == "balanced"]
            for turn in range(options.turns):
                for routing, name in runs[:: -1 if turn % 2 else 1]:
                    try:
                        row = measure(name, weights, tokens, routing)
                    except Exception as error:  # a candidate that is missing or fails must not end the run
                        row = {"error": repr(error)[:300]}
                    if row:
                        emit(shape=shape, tokens=tokens, routing=routing, candidate=name, turn=turn, **row)
        del weights
        torch.cuda.empty_cache()
    table(rows)


COLUMNS = {  # heading: key, digits, whether to set it against the bound
    "fwd ms": ("fwd_ms", 3, False),
    "graph ms": ("graph_ms", 4, False),
    "device": ("fwd_device_ms", 3, False),
    "TFLOP/s": ("fwd_tflops", 0, False),
    "of bound": ("fwd_tflops", 3, True),
    "fwd+bwd": ("both_ms", 3, False),
    "device ": ("both_device_ms", 3, False),
    "TFLOP/s ": ("both_tflops", 0, False),
    "of bound ": ("both_tflops", 3, True),
    "peak GB": ("peak_gb", 2, False),
}


def table(rows):
    bounds = {(r["shape"], r["tokens"], r["turn"]): r for r in rows if r.get("candidate") == "bound" and "fwd_ms" in r}
    print(f"\n{'shape':14} {'tokens':>6} {'routing':9} {'candidate':12}" + "".join(f"{h:>9}" for h in COLUMNS))
    for r in rows:
        if "fwd_ms" not in r:
            continue
        bound, cells = bounds.get((r["shape"], r["tokens"], r["turn"]), {}), ""
        for key, digits, against in COLUMNS.values():
            known = key in r and (not against or key in bound)
            cells += f"{r[key] / (bound[key] if against else 1):9.{digits}f}" if known else " " * 9
        print(f"{r['shape']:14} {r['tokens']:6} {r['routing']:9} {r['candidate']:12}{cells}")


if __name__ == "__main__":
    main()
