"""Inductor's caches across processes: an unchanged project hits, a changed gradient formula does not.

The processes run a copy of the sources, so that one of them can be changed.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mok_compile
from mok_compile import _layout

PROGRAM = """
import json, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
from torch._dynamo.utils import counters
import mok_compile
assert mok_compile.__file__.startswith({root!r}), mok_compile.__file__
from blocks import Moe, tokens
model, x = Moe(hidden=8, inner=8), tokens(6, 8)
compiled = torch.compile(model, backend="mok", options={{"mok.engine": "portable"}})
compiled(x).sum().backward()
import mok_compile.passes.facts.rules as rules
assert rules.__file__.startswith({root!r}), rules.__file__
found = {{n: p.grad.norm().item() for n, p in model.named_parameters()}}
plain = Moe(hidden=8, inner=8)
plain(x.detach()).sum().backward()
wanted = {{n: p.grad.norm().item() for n, p in plain.named_parameters()}}
cache = counters["aot_autograd"]
print(json.dumps(dict(
    fused=counters["mok"]["fused"], found=found, wanted=wanted,
    hits=cache["autograd_cache_hit"], misses=cache["autograd_cache_miss"], bypasses=cache["autograd_cache_bypass"],
    inductor=counters["inductor"]["fxgraph_cache_hit"],
)))
"""


class Sources:
    """A copy of the project that may be changed, and a cache folder."""

    def __init__(self, folder):
        self.root, self.cache = folder / "project", folder / "cache"
        ignore = shutil.ignore_patterns("__pycache__", "passes", "lib")
        shutil.copytree(Path(mok_compile.__file__).parent, self.root / "mok_compile", ignore=ignore)
        shutil.copytree(_layout.folder("passes"), self.root / "mok_compile" / "passes", ignore=ignore)

    def change(self, file, old, new):
        path = self.root / "mok_compile" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}"
        path.write_text(text.replace(old, new))

    def run(self):
        code = textwrap.dedent(PROGRAM).format(root=str(self.root), tests=str(Path(__file__).parent))
        env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("MOK_")},
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            "PYTHONPATH": str(self.root),
        }
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_changed_gradient_is_not_served_stale(tmp_path):
    sources = Sources(tmp_path)
    first = sources.run()
    assert (first["fused"], first["hits"], first["misses"]) == (1, 0, 1), first
    assert first["found"] == pytest.approx(first["wanted"], rel=1e-4)

    again = sources.run()
    assert (again["fused"], again["hits"], again["misses"]) == (1, 1, 0), again
    assert again["found"] == pytest.approx(first["found"], rel=1e-6)

    # The gradient of the weights of the down projection, doubled behind the op's back, in autograd's formula.
    sources.change(
        "ops.py",
        "*(next(grads) if n else None for n in listed))",
        "next(grads), 2 * next(grads))",
    )
    changed = sources.run()
    assert changed["hits"] == 0, changed
    expected = {**first["found"], "down": 2 * first["found"]["down"]}
    assert changed["found"] == pytest.approx(expected, rel=1e-6)


def test_salt_covers_every_source(tmp_path):
    """Any file of ours that can change a result changes the salt."""
    sources = Sources(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(sources.root)!r})\n"
        "from mok_compile.cache import salt; from mok_compile.options import Options; print(salt(Options()))"
    )

    def salt():
        env = {**os.environ, "PYTHONPATH": str(sources.root)}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True).stdout

    salts = {salt()}
    for number, file in enumerate(("reference.py", "passes/facts/rules.py"), start=2):
        path = sources.root / "mok_compile" / file
        path.write_text(path.read_text() + "\n# changed\n")
        salts.add(salt())
        assert len(salts) == number, file
