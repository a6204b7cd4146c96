"""``repro.py``: a script that rebuilds one site with random inputs, without the user's model."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx
from torch.fx.graph_module import _format_import_block
from torch.package import sys_importer

from mok_compile._version import __version__
from mok_compile.report import Site

_DELETES = re.compile(r";  (\w+ = )+None\b")  # fx frees what is not read again

_SCRIPT = '''"""{title}

Rebuilds this part of the graph with random inputs: `python {name}` prints whether it is fused and why not, and for a
fused block the largest difference from eager. Nothing of the model is needed.
{detail}"""

import torch
from torch import device, inf, nan  # noqa: F401

import mok_compile
{imports}


class Block(torch.nn.Module):
{code}

def make_inputs():
    torch.manual_seed(0)
    return (
{inputs}
    )


def tensor(shape, stride, dtype, device, requires_grad):
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
    numbers = torch.randn(size, device=device).mul_({scale}).to(dtype)
    return numbers.as_strided(shape, stride).requires_grad_(requires_grad)


def expert_ids(shape, experts, dtype, device):
    if len(shape) == 2 and shape[1] <= experts:  # each expert at most once a token, as top-k gives them
        return torch.rand(shape[0], experts, device=device).topk(shape[1], dim=1).indices.to(dtype)
    return torch.randint(0, experts, shape, dtype=dtype, device=device)


def relative(found, wanted):
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))


if __name__ == "__main__":
    block, inputs = Block(), make_inputs()
    report = mok_compile.explain(block, {{"mok.verify": {verify}, "mok.engine": "{engine}"}})(*inputs)
    print(report)
    if report.fused:
        wanted = block(*inputs)
        found = torch.compile(block, backend="mok", options={{"mok.engine": "{engine}"}})(*inputs)
        for i, (a, b) in enumerate(zip(found, wanted)):
            print(f"output {{i}}: relative difference from eager {{relative(a, b):.1e}}")
'''


def script(site: Site, engine: str, name: str) -> str:
    """The text of the script for a site that was watched."""
    module = site.slice.module
    python = module.graph.python_code("self")
    code = [_DELETES.sub("", line).rstrip() for line in python.src.splitlines() if line.strip()]
    imports = {k: v for k, v in python.globals.items() if k not in ("torch", "device", "inf", "nan")}
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    inputs = [f"        {_input(node, site.slice.experts)},  # {node.name}" for node in nodes]
    return _SCRIPT.format(
        title=f"{site.status}: {site.location}" + (f" ({site.reason})" if site.reason else ""),
        name=name,
        detail=f"\n{site.detail}\nmok-compile {__version__}, torch {torch.__version__}\n",
        imports="\n".join([_format_import_block(imports, sys_importer).strip(), *_libraries(module.graph)]).strip(),
        code="\n".join("    " + line for line in code) + "\n",
        inputs="\n".join(inputs),
        scale=0.1,
        verify=all(_device(n) != "meta" for n in nodes),
        engine=engine,
    )


def _libraries(graph: fx.Graph) -> list[str]:
    """Imports that register the ops of other libraries."""
    ops = {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    packets = {node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverloadPacket)}
    names = {op._schema.name for op in ops} | {packet._qualified_op_name for packet in packets}
    found = (torch._library.custom_ops.OPDEFS.get(name) for name in names)
    return sorted(f"import {d._init_fn.__module__}  # registers {d._qualname}" for d in found if d is not None)


def _input(node: fx.Node, experts: int) -> str:
    example = node.meta.get("example_value")
    if not isinstance(example, torch.Tensor):
        return repr(_number(example))
    shape, stride = tuple(map(_number, example.shape)), tuple(map(_number, example.stride()))
    where = f'"{example.device}"'
    if example.dtype.is_floating_point:
        return f"tensor({shape}, {stride}, {example.dtype}, {where}, {example.requires_grad})"
    if example.dtype == torch.bool:
        return f"torch.ones({shape}, dtype=torch.bool, device={where})"
    return f"expert_ids({shape}, {experts}, {example.dtype}, {where})"


def _device(node: fx.Node) -> str:
    example = node.meta.get("example_value")
    return example.device.type if isinstance(example, torch.Tensor) else ""


def _number(n: Any) -> Any:
    """A size without symbols: the one that the graph was compiled with."""
    return n.node.hint if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) else n
