"""Compiles the libraries in `csrc/` with ninja: at first use into a per-user cache, or ahead of time into a wheel.

A library is looked for in `mok_compile/lib` (a wheel with prebuilt kernels), then in the cache, then built. A cache
entry is a folder that appears complete or not at all, named by everything that decides its content: sources, flags,
compiler and torch. A library needs only torch's stable ABI, so a prebuilt one is named by its sources alone and serves
every torch from 2.10 on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mok_compile._layout import folder

log = logging.getLogger("mok_compile")

# The ABI version that libraries ask of torch: 2.10, whichever torch they are built with.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"
# A file beside a built library: what the compiler said of kernels that will be slow.
SLOW = "slow.txt"
SPILLED_BYTES = 16  # a thread may spill without being called slow


class BuildError(RuntimeError):
    """A library cannot be had; the message says why, in one line where possible."""


@dataclass(frozen=True)
class Source:
    """A file below `csrc/` and the flags that it alone is compiled with."""

    path: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A library ``libmok_<name>.so``: what it is made of and which compiler makes it."""

    name: str
    folders: tuple[str, ...]  # below csrc/: everything in them counts as source
    sources: tuple[Source, ...]
    compiler: str | None  # the path, None if there is none
    wants: str  # what to say when there is none
    flags: tuple[str, ...]
    link_flags: tuple[str, ...]
    takes: str  # how long a build takes, for the message

    def source_hash(self) -> str:
        """Over every file in the target's folders."""
        digest = hashlib.sha256()
        for path in sorted(p for f in self.folders for p in (csrc() / f).rglob("*") if p.is_file()):
            digest.update(path.relative_to(csrc()).as_posix().encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def key(self) -> str:
        """Over everything that decides what a build produces."""
        compiler = self.compiler and subprocess.run([self.compiler, "--version"], capture_output=True, text=True).stdout
        facts = (self.source_hash(), self.sources, self.flags, self.link_flags, compiler, torch.__version__)
        return hashlib.sha256(repr((facts, platform.machine())).encode()).hexdigest()[:16]


def csrc() -> Path:
    return Path(folder("csrc"))


def _torch_path(*parts: str) -> str:
    return os.path.join(os.path.dirname(torch.__file__), *parts)


def _cpu() -> Target:
    extra = shlex.split(os.environ.get("MOK_CXXFLAGS", ""))
    avx2 = ("-mavx2", "-mfma", "-mf16c")
    avx512 = (*avx2, *(f"-mavx512{f}" for f in ("f", "bw", "vl", "dq")), "-mprefer-vector-width=512")
    bf16 = (*avx512, "-mavx512bf16")
    amx = (*bf16, "-mamx-tile", "-mamx-bf16")
    levels = {"scalar": ()}
    if platform.machine() in ("x86_64", "AMD64"):
        levels |= {"avx2": avx2, "avx512": avx512, "avx512bf16": bf16, "amx": amx}
    return Target(
        name="cpu",
        folders=("cpu",),
        sources=(
            Source("cpu/ops.cpp"),
            Source("cpu/dispatch.cpp"),
            *(Source(f"cpu/level_{level}.cpp", flags) for level, flags in levels.items()),
        ),
        compiler=shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++"),
        wants="a C++ compiler (g++ 11 or clang++ 12 or newer; the variable CXX names one)",
        flags=(
            *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", STABLE_ABI),
            # errno and floating-point traps would keep loops from becoming vector code; -ffp-contract makes the use of
            # fused multiply-add the same for every compiler.
            *(
                "-fno-math-errno",
                "-fno-trapping-math",
                "-fno-strict-aliasing",
                "-ffp-contract=fast",
                "-Wno-address-of-packed-member",
            ),
            *extra,
            *("-isystem", _torch_path("include"), "-isystem", _torch_path("include/torch/csrc/api/include")),
        ),
        link_flags=("-shared", f"-L{_torch_path('lib')}", "-ltorch_cpu", *extra),
        takes="half a minute",
    )


def _sm90() -> Target:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    in_home = os.path.join(home, "bin", "nvcc")
    return Target(
        name="sm90",
        folders=("cuda",),
        sources=(
            Source("cuda/ops.cpp"),
            Source("cuda/direct.cpp"),
            Source("cuda/exchange_ops.cpp"),
            *(
                Source(f"cuda/sm90/{n}.cu")
                for n in (
                    *("forward", "decode", "input_grad", "weight_grad", "bias_grad", "schedule", "combine", "route"),
                    *("choose", "exchange"),
                )
            ),
        ),
        compiler=in_home if os.path.exists(in_home) else shutil.which("nvcc"),
        wants="nvcc of CUDA 12.8 or newer (the variable CUDA_HOME names its folder)",
        flags=(
            *("-gencode", "arch=compute_90a,code=sm_90a", "-std=c++17", "-O3", STABLE_ABI, "-DUSE_CUDA"),
            *("-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v"),
            *("-isystem", _torch_path("include"), "-isystem", _torch_path("include/torch/csrc/api/include")),
        ),
        # Its own CUDA runtime, and nothing of libtorch's CUDA part: a torch without CUDA builds it too.
        link_flags=("-shared", "-cudart", "static", f"-L{_torch_path('lib')}", "-ltorch_cpu"),
        takes="a minute and a half",
    )


TARGETS: dict[str, Callable[[], Target]] = {"cpu": _cpu, "sm90": _sm90}


@functools.cache
def target(name: str) -> Target:
    return TARGETS[name]()


def cache_dir() -> Path:
    """Where built libraries are kept: MOK_CACHE_DIR, else mok_compile in the user's cache folder."""
    if explicit := os.environ.get("MOK_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mok_compile"


def _library_name(name: str) -> str:
    return f"libmok_{name}.so"


def _prebuilt(name: str, where: Path) -> Path:
    return where / f"libmok_{name}-{target(name).source_hash()}.so"


@functools.cache
def _key(name: str) -> str:
    return target(name).key()


def _found(name: str) -> Path | None:
    """The library, if it need not be built."""
    for path in (
        _prebuilt(name, Path(__file__).parent / "lib"),
        cache_dir() / f"{name}-{_key(name)}" / _library_name(name),
    ):
        if path.exists():
            return path
    return None


def _ninja() -> str | None:
    try:
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    except ImportError:
        return shutil.which("ninja")


def _obstacle(name: str) -> str | None:
    if target(name).compiler is None:
        return f"building it needs {target(name).wants}, and none was found"
    if _ninja() is None:
        return "building it needs ninja, which was not found (pip install ninja)"
    return None


_failures: dict[str, str] = {}
_loaded: set[str] = set()


def unavailable(name: str) -> str | None:
    """Why the library cannot be had, as far as that can be told without building it; None if it probably can."""
    if name in _failures:
        return _failures[name]
    if name in _loaded:  # looking for it means reading all sources
        return None
    return None if _found(name) else _obstacle(name)


@functools.cache
def load(name: str) -> Path:
    """Loads the library into this process, building it first if need be. BuildError if that fails; a failed build is
    not tried again in this process."""
    if name in _failures:
        raise BuildError(_failures[name])
    try:
        path = _found(name) or _build(name)
        torch.ops.load_library(str(path))
        _loaded.add(name)
    except (BuildError, OSError) as error:
        _failures[name] = str(error.__cause__ or error)
        raise BuildError(_failures[name]) from error
    return path


def failure(name: str) -> str | None:
    """Loads the library like `load`; why that failed, None if it did not."""
    try:
        load(name)
    except BuildError as error:
        return str(error)
    return None


def build_all() -> list[tuple[str, Path | str]]:
    """Builds every library that is not there yet: (name, its path or why it could not be built)."""
    results = []
    for name in TARGETS:
        try:
            results.append((name, _found(name) or _build(name)))
        except BuildError as error:
            results.append((name, str(error)))
    return results


def prebuild(into: str | os.PathLike) -> list[Path]:
    """Builds every library that this machine has a compiler for into the folder `into`, for a wheel. BuildError if one
    fails or cannot be loaded, if the compiler makes slow kernels (a build at first use only warns of that), or if there
    is none."""
    into = Path(into)
    into.mkdir(parents=True, exist_ok=True)
    built = []
    for name in TARGETS:
        if reason := _obstacle(name):
            log.warning("mok-compile: leaving out the library %s: %s", name, reason)
            continue
        library, goal = load(name), _prebuilt(name, into)
        if (slow := library.parent / SLOW).exists():
            raise BuildError(f"the compiler makes slow {name} kernels: {slow.read_text()}")
        if library.resolve() != goal.resolve():
            shutil.copy(library, goal)
        built.append(goal)
    if not built:
        raise BuildError("nothing to prebuild: no compiler was found")
    return built


def _build(name: str) -> Path:
    """Builds into the cache. Of several processes one builds and the others wait for it."""
    if reason := _obstacle(name):
        raise BuildError(reason)
    entry = cache_dir() / f"{name}-{_key(name)}"
    work = entry.with_suffix(".tmp")
    try:
        with _lock(entry.with_suffix(".lock")):
            if not entry.exists():
                log.warning(
                    "mok-compile: building the %s kernels (once, about %s) into %s", name, target(name).takes, entry
                )
                # Ours alone while we hold the lock; whatever is in it was left by a build that was killed.
                shutil.rmtree(work, ignore_errors=True)
                try:
                    work.mkdir()
                    slow = slow_code(_run_ninja(target(name), work))
                    for leftover in [p for p in work.iterdir() if p.suffix != ".so"]:
                        leftover.unlink()
                    if slow:
                        log.warning("mok-compile: this compiler makes slow kernels: %s", "; ".join(slow))
                        (work / SLOW).write_text("\n".join(slow))
                    work.rename(entry)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise BuildError(
            f"cannot write the cache ({error}); the variable MOK_CACHE_DIR names another folder"
        ) from error
    return entry / _library_name(name)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when that process dies."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def slow_code(output: str) -> list[str]:
    """What ptxas says of kernels that will be slow: registers spilled to memory (a few, kept over a whole tile, cost
    nothing), tensor-core instructions that wait for one another (C75xx) or that it refuses to overlap (C76xx). One line
    each, with the kernel's mangled name."""
    found, kernel = [], "?"
    for line in output.splitlines():
        if name := re.search(r"(?:Compiling entry function|Function properties for) '?(\w+)", line):
            kernel = name[1]
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if spilled and max(map(int, spilled.groups())) > SPILLED_BYTES:
            found.append(f"{kernel}: {spilled[0]}")
        elif re.search(r"\bC7[56]\d\d\b", line):
            found.append(line.strip())
    return found


def _run_ninja(what: Target, work: Path) -> str:
    """Builds in `work` and returns what the compilers said."""
    (work / "build.ninja").write_text(_ninja_file(what))
    ninja = subprocess.Popen(
        [_ninja(), "-C", str(work)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = ninja.communicate()
    except BaseException:
        os.killpg(ninja.pid, signal.SIGKILL)  # the compilers too
        raise
    if ninja.returncode != 0:
        log.warning("mok-compile: the compiler's output:\n%s", output[-4000:])
        first = next((line for line in output.splitlines() if "error:" in line), "see the compiler's output")
        raise BuildError(f"building the {what.name} kernels failed: {first.strip()}")
    return output


def _ninja_file(what: Target) -> str:
    def escape(text: str) -> str:
        return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

    objects, edges = [], []
    for source in what.sources:
        target_object = source.path.replace("/", "_") + ".o"
        objects.append(target_object)
        edges.append(
            f"build {target_object}: compile {escape(str(csrc() / source.path))}\n  own = {shlex.join(source.flags)}"
        )
    command = shlex.quote(what.compiler)
    return "\n".join(
        [
            "rule compile",
            f"  command = {command} {shlex.join(what.flags)} $own -c $in -o $out".replace("\n", " "),
            "rule link",
            f"  command = {command} $in {shlex.join(what.link_flags)} -o $out",
            *edges,
            f"build {_library_name(what.name)}: link {' '.join(objects)}",
            "",
        ]
    )


if sys.platform == "win32":  # neither the compiler flags above nor file locks exist there
    TARGETS.clear()
