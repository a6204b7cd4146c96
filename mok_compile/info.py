"""What there is on this machine: versions, devices, engines and why one is not usable, compilers, caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from mok_compile import build
from mok_compile._version import __version__
from mok_compile.engines import ENGINES, get


def collect() -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        "versions": _versions(),
        "devices": _devices(),
        "engines": {name: get(name).usable() or "usable" for name in ENGINES},
        "kernels": {name: _kernel(name) for name in build.TARGETS},
        "folders": {
            "kernels": str(build.cache_dir()),
            "inductor": _inductor_cache(),
        },
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("MOK_", "TORCH_", "CUDA_HOME"))},
    }


def text() -> str:
    """The same for a terminal."""
    lines = []
    for title, values in collect().items():
        lines.append(title)
        lines += [f"  {key:14}{value}" for key, value in values.items()] or ["  (none)"]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    found = {"mok_compile": __version__, "torch": torch.__version__, "python": platform.python_version()}
    for name in ("transformers", "accelerate", "peft", "triton", "ninja"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _devices() -> dict[str, str]:
    found = {"cpu": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    found["instructions"] = torch.backends.cpu.get_cpu_capability()
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        found[f"cuda:{i}"] = f"{p.name}, compute {p.major}.{p.minor}, {p.total_memory / 2**30:.0f} GiB"
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _kernel(name: str) -> str:
    """Whether a library is there, or what building it would take."""
    compiler = build.target(name).compiler
    reason = build.unavailable(name)
    if reason is not None:
        return reason
    path = build._found(name)
    made = f"built: {path}" if path else "not built yet: python -m mok_compile build"
    return f"{made} (compiler {_version(compiler)})" if compiler else made


def _version(compiler: str) -> str:
    path = shutil.which(compiler) or compiler
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout.splitlines()
    except OSError:
        return path
    line = next((line for line in reversed(said) if "release" in line), said[0] if said else "")
    return f"{path}: {line}"


def _inductor_cache() -> str:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()
