"""Cases of `ExpertParallel`, run on each rank of a group, against the same model in one process."""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from mok_compile.distributed import Binding, ExpertParallel, find_experts, plan

sys.path.insert(0, str(Path(__file__).parents[1]))


class Experts(nn.Module):
    """An experts module of nobody's: gate and up apart, stored [E, in, out]."""

    binding = Binding("silu(gate) * up", "separate", ("w1", "w3"), "w2", transposed=True)

    def __init__(self, experts=6, hidden=16, inner=24):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}.items():
            value = torch.randn(experts, *shape, generator=generator) * 0.3
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x, ids, weights):
        flat, y = x.reshape(-1, x.shape[-1]), 0
        for k in range(ids.shape[1]):
            w1, w3, w2 = self.w1[ids[:, k]], self.w3[ids[:, k]], self.w2[ids[:, k]]
            rows = torch.nn.functional.silu(torch.einsum("th,thi->ti", flat, w1)) * torch.einsum("th,thi->ti", flat, w3)
            y = y + torch.einsum("ti,tih->th", rows, w2) * weights[:, k, None]
        return y.view(x.shape)


class Layer(nn.Module):
    """A router and experts, as in a model."""

    def __init__(self, experts=6, hidden=16):
        super().__init__()
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden)

    def forward(self, x):
        weights, ids = self.router(x.reshape(-1, x.shape[-1])).softmax(-1).topk(2)
        return x + self.experts(x, ids, weights)


def mesh(*shape, names=("ep",)):
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def layer(experts=6):
    torch.manual_seed(1)
    return Layer(experts)


def spread(model, ep_mesh, engine="portable"):
    style = ExpertParallel(Experts.binding, engine=engine)
    return parallelize_module(model, ep_mesh, {"experts": style})


def tokens(ranks, requires_grad=False):
    """Tokens of every rank: another number on each, none on the second of three and more."""
    generator = torch.Generator().manual_seed(2)
    counts = [3 + r if ranks < 3 or r != 1 else 0 for r in range(ranks)]
    return [torch.randn(2, n, 16, generator=generator).requires_grad_(requires_grad) for n in counts]


def sum_over_ranks(model, group=None):
    """What DDP or FSDP does for the parameters that every rank has."""
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            dist.all_reduce(parameter.grad, group=group)


def same_gradients(model, reference):
    names = [name for name, _ in reference.named_parameters()]
    for name in names:
        found = model.get_parameter(name).grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        close(found, reference.get_parameter(name).grad, name)


def close(found, wanted, what):
    assert found.shape == wanted.shape, what
    scale = max(1e-6, float(wanted.abs().max())) if wanted.numel() else 1.0
    assert wanted.numel() == 0 or float((found - wanted).abs().max()) <= 2e-5 * scale, what


def step(model, reference, run=None, steps=1):
    """Outputs and gradients of `model` on this rank's tokens and of `reference` on those of all ranks."""
    rank, given = dist.get_rank(), tokens(dist.get_world_size(), requires_grad=True)
    for _ in range(steps):
        found = (model if run is None else run)(given[rank])
        found.square().sum().backward()
    own = given[rank].grad.clone()
    given[rank].grad = None
    for _ in range(steps):
        for r, x in enumerate(given):
            wanted = reference(x)
            wanted.square().sum().backward()
            if r == rank:
                close(found.detach(), wanted.detach(), "output")
    close(own, given[rank].grad, "input")
    sum_over_ranks(model)
    same_gradients(model, reference)


def as_one_process(how, steps=1):
    from torch.utils.checkpoint import checkpoint

    model, reference = layer(), layer()
    spread(model, mesh()["ep"])
    run = model
    if how == "checkpoint":
        run = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
    elif how == "reentrant checkpoint":
        run = lambda x: checkpoint(model, x, use_reentrant=True)  # noqa: E731
    elif how == "compiled checkpoint":
        both = lambda x: checkpoint(model, x, use_reentrant=False)  # noqa: E731
        run = torch.compile(both, backend="aot_eager", dynamic=True, fullgraph=True)
    elif how != "eager":
        run = torch.compile(model, backend=how, dynamic=True, fullgraph=True)
    step(model, reference, run, steps)


def sharded():
    """The parameters are DTensors on the mesh, and copies of the module work on their own."""
    model = layer()
    frozen = model.experts.w3.requires_grad_(False)
    spread(model, mesh()["ep"])
    for parameter in model.experts.parameters():
        assert isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
        assert parameter.shape[0] == 6
    assert not model.experts.w3.requires_grad and model.experts.w1.requires_grad
    assert not isinstance(model.router.weight, DTensor)
    assert torch.equal(model.experts.w3.full_tensor(), frozen)
    x = tokens(dist.get_world_size())[dist.get_rank()]
    wanted = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.experts.w2.zero_()
    assert torch.equal(twin(x), wanted)
    assert list(twin.state_dict()) == list(layer().state_dict())


def refused():
    """What ExpertParallel says of what it cannot do."""
    said = []
    whole = mesh()["ep"]
    other = copy.deepcopy(layer().experts)
    other.scale = nn.Parameter(torch.ones(3))
    uneven = copy.deepcopy(layer().experts)
    uneven.w2 = nn.Parameter(uneven.w2[:4].detach().clone())
    twice = ExpertParallel(Experts.binding)._apply(layer().experts, whole)
    for binding, module in (
        (None, layer().experts),
        (Experts.binding, other),
        (Experts.binding, uneven),
        (None, twice),
    ):
        try:
            ExpertParallel(binding)._apply(module, whole)
        except ValueError as error:
            said.append(str(error))
    try:
        plan(layer())
    except ValueError as error:
        said.append(str(error))
    return said


def hugging_face(family, how):
    import hf

    model, _ = hf.make(family, num_hidden_layers=1)
    reference = copy.deepcopy(model)
    assert list(find_experts(model)) == ["model.layers.0.mlp.experts"]
    parallelize_module(model, mesh()["ep"], plan(model, engine="portable"))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(3, 64, (ranks, 7), generator=torch.Generator().manual_seed(4))
    run = model if how == "eager" else torch.compile(model, backend=how)
    found = run(input_ids=ids[rank : rank + 1]).logits
    found.square().sum().backward()
    wanted = reference(input_ids=ids).logits
    wanted.square().sum().backward()
    close(found.detach(), wanted[rank : rank + 1].detach(), "logits")
    sum_over_ranks(model)
    same_gradients(model, reference)


def reported():
    """The report of a compiled expert-parallel layer."""
    import mok_compile

    model = spread(layer(), mesh()["ep"])
    x = tokens(dist.get_world_size())[dist.get_rank()]
    report = mok_compile.explain(model, {"mok.engine": "portable"})(x)
    return [(site.op, str(site.spread), site.status, site.engine) for site in report.sites], str(report)


def saved(folder):
    """Writes a sharded checkpoint."""
    import torch.distributed.checkpoint as dcp

    dcp.save(spread(layer(), mesh()["ep"]).state_dict(), checkpoint_id=folder)


def loaded(folder):
    """Reads a checkpoint that any number of ranks has written; parameters as in one process, to the bit."""
    import torch.distributed.checkpoint as dcp

    model, reference = layer(), layer()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    spread(model, mesh()["ep"])
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, reference.get_parameter(name)), name
    step(model, reference)


def full_state(folder):
    """The full state dict, saved by Hugging Face's own function on the first rank and read by one process."""
    import hf
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model, ids = hf.make("mixtral", num_hidden_layers=1)
    reference = copy.deepcopy(model)
    parallelize_module(model, mesh()["ep"], plan(model))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        reference.save_pretrained(folder)
        model.save_pretrained(folder + "/parallel", state_dict=state)
        again = type(reference).from_pretrained(folder + "/parallel")
        for name, parameter in reference.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name
        assert torch.equal(again.eval()(ids).logits, reference.eval()(ids).logits)
    dist.barrier()


def without_gradients(how):
    """Inference: the op that saves nothing, and the bits of training."""
    model = spread(layer(), mesh()["ep"])
    x = tokens(dist.get_world_size())[dist.get_rank()]
    wanted = model(x).detach()
    called = []

    def count(graph, inputs):
        called.extend(str(node.target) for node in graph.graph.nodes if "mok." in str(node.target))
        return graph.forward

    run = model if how == "eager" else torch.compile(model, backend=count, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(run(x), wanted)
    with torch.inference_mode():
        assert torch.equal(run(x), wanted)
    assert how == "eager" or set(called) == {"mok.experts_parallel_infer"}, called


def saved_nothing():
    """After partitioning the op becomes the one that saves nothing where nobody reads what it saves."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from mok_compile.passes.fusing.infer import drop_saved_outputs

    model = spread(layer(), mesh()["ep"])
    x = tokens(dist.get_world_size())[dist.get_rank()]
    wanted = model(x)
    graph = make_fx(lambda x: model(x).detach())(x)
    assert drop_saved_outputs(graph.graph) == 1
    graph.recompile()
    names = [str(node.target) for node in graph.graph.nodes]
    assert "mok.experts_parallel_infer.default" in names and "mok.experts_parallel.default" not in names
    assert torch.equal(graph(x), wanted)


def with_fsdp(ep, experts=6):
    """Experts over `ep` ranks and FSDP2 over the others; everything else FSDP2 over all ranks."""
    ranks = dist.get_world_size()
    both = mesh(ranks // ep, ep, names=("dp", "ep"))
    fsdp(experts, both["ep"], both["dp"], both._flatten("everybody"))


def with_hsdp():
    """Experts over two ranks and two copies of everything; within a copy FSDP2."""
    whole = mesh(2, 1, 2, names=("copy", "dp", "ep"))
    whole["dp", "ep"]._flatten("dp_ep")
    fsdp(6, whole["ep"], whole["copy", "dp"], whole["copy", "dp_ep"])


def fsdp(experts, ep_mesh, experts_mesh, others_mesh):
    """A step with these meshes against one process."""
    from torch.distributed.fsdp import fully_shard

    ranks = dist.get_world_size()
    model, reference = layer(experts), layer(experts)
    spread(model, ep_mesh)
    fully_shard(model.experts, mesh=experts_mesh)
    fully_shard(model, mesh=others_mesh)
    for part in (model.experts, model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    rank, given = dist.get_rank(), tokens(ranks)
    found = model(given[rank])
    found.square().sum().backward()
    for r, x in enumerate(given):
        wanted = reference(x)
        wanted.square().sum().backward()
        if r == rank:
            close(found.detach(), wanted.detach(), "output")
    same_gradients(model, reference)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference))
    optimizer.step(), other.step()
    for name, parameter in model.named_parameters():
        close(parameter.full_tensor().detach(), reference.get_parameter(name).detach(), name)


def hugging_faces_own(implementation, compiled):
    """Expert parallelism as transformers does it, whose ranks share their tokens. ``all_reduce``: each masks the routes
    to experts that it does not hold, and the outputs are summed. ``all_to_all``: each sends its part of the routes.
    Returns how many blocks were fused and why others were not."""
    import hf
    from harness import Fused
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model, ids = hf.make("mixtral", num_hidden_layers=1)
    reference = copy.deepcopy(model)
    whole = mesh()["ep"]
    experts = "model.layers.0.mlp.experts"
    styles = {f"{experts}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
    apply_expert_parallelism(model, whole, whole, {**styles, experts: "ep_dispatch_experts"}, implementation)
    run = Fused(model, fullgraph=False, verify=False) if compiled else model
    found = run(input_ids=ids).logits
    found.square().sum().backward()
    wanted = reference(input_ids=ids).logits
    wanted.square().sum().backward()
    close(found.detach(), wanted.detach(), "logits")
    same_gradients(model, reference)
    return (run.report.fused, str(run.report)) if compiled else None


def other_dtypes(experts_dtype, x_dtype, autocast):
    """Activations of another dtype than the experts' weights: what the experts alone make of them in one process."""
    model, reference = layer().experts.to(experts_dtype), layer().experts.to(experts_dtype)
    parallelize_module(model, mesh()["ep"], ExpertParallel(Experts.binding, engine="portable"))
    generator = torch.Generator().manual_seed(3 + dist.get_rank())
    x = torch.randn(4, 16, generator=generator).to(x_dtype).requires_grad_()
    ids = torch.rand(4, 6, generator=generator).topk(2).indices
    weights = torch.rand(4, 2, generator=generator)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = model(x, ids, weights)
    wanted = reference(x.to(experts_dtype), ids, weights.to(experts_dtype)).to(x_dtype)
    assert found.dtype == x_dtype and found.shape == x.shape
    grads = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (found, wanted)]
    assert grads[0].dtype == x_dtype
    low = torch.bfloat16 in (experts_dtype, x_dtype)
    for a, b in ((found, wanted), grads):
        assert float((a.float() - b.float()).norm()) <= (2e-2 if low else 1e-5) * float(b.float().norm())


def under_vmap():
    model = spread(layer(), mesh()["ep"]).experts
    x, ids, weights = torch.randn(3, 4, 16), torch.zeros(3, 4, 2, dtype=torch.int64), torch.rand(3, 4, 2)
    try:
        torch.vmap(model)(x, ids, weights)
    except RuntimeError as error:
        return str(error)
