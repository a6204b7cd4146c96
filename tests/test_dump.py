"""The dump folder, the page, the repro scripts, the trace and the log; `explain` in all its uses."""

import ast
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blocks import HIDDEN, INNER, Moe
from torch import nn

import mok_compile
from mok_compile import dump
from mok_compile.backend import transform
from mok_compile.options import Options
from mok_compile.report import IN_TRANSFORMERS, REASONS, Report, Site

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TLPARSE = Path(sys.executable).with_name("tlparse")


class Scaled(Moe):
    """Misses: a tensor from elsewhere inside the activation."""

    def activate(self, h):
        return super().activate(h) * self.scale

    def make_weights(self):
        super().make_weights()
        self.scale = self.new(self.inner)


class Normed(Moe):
    """Fused as far as the experts' outputs, which are changed before the combine."""

    def project_down(self, rows, sorted_ids, offsets):
        return torch.tanh(super().project_down(rows, sorted_ids, offsets))


class Kept(Moe):
    """Misses: a value inside the block is returned."""

    def forward(self, x):
        return super().forward(x), self.seen

    def activate(self, h):
        self.seen = super().activate(h)
        return self.seen


class Net(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def dumped(folder, model, *args, **options):
    """The report of `model` and the one folder that it leaves behind."""
    report = mok_compile.explain(model, {"mok.dump": str(folder), "mok.engine": "portable", **options})(*args)
    (made,) = (p for p in folder.iterdir() if p.is_dir())
    return report, made


X = torch.randn(2, 7, HIDDEN)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A model with a fused block, a missed one, and one of which the experts alone are fused; dumped."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return dumped(tmp_path_factory.mktemp("dump"), Net(Moe(), Scaled(seed=1), Normed(seed=2)), X)


def test_folder_holds_what_the_documentation_says(three):
    _, folder = three
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    sites = {f"site_{i:02d}/{name}" for i in range(3) for name in ("slice.txt", "repro.py")}
    assert names == {"before.py", "after.py", "diff.txt", "report.json", "index.html", *sites}
    assert (folder.parent / "index.html").exists()
    page = (Path(__file__).parent.parent / "docs" / "dumps.md").read_text()
    assert all(f"`{re.sub('site_..', 'site_00', name)}`" in page for name in names)


def test_code_is_python_and_annotated(three):
    _, folder = three
    before, after = ((folder / name).read_text() for name in ("before.py", "after.py"))
    for code in (before, after):
        ast.parse(code)
    assert before.count("= torch.ops.transformers.") == 6 and after.count("= torch.ops.transformers.") == 2
    assert "torch.ops.mok.moe.default(" in after
    assert '"f32[42, 48]"' in before  # shapes and dtypes
    assert "# layers.1 [Scaled]" in before  # module paths
    assert "blocks.py:" in before and "in gather: return x[perm // self.k]" in before  # source lines
    diff = (folder / "diff.txt").read_text()
    assert diff.startswith("--- before.py\n+++ after.py\n") and "+    moe" in diff


def test_report_has_its_schema(three):
    report, folder = three
    found = json.loads((folder / "report.json").read_text())
    assert set(found) == {
        "schema", "summary", "fused", "missed", "sites", "options", "versions", "environment", "process",
    }  # fmt: skip
    assert found["schema"] == 1 and (found["fused"], found["missed"]) == (2, 1)
    assert found["options"]["mok.engine"] == "portable" and found["versions"]["torch"] == torch.__version__
    fused, scaled, normed = found["sites"]
    assert fused["sizes"]["hidden"] == HIDDEN and fused["sizes"]["intermediate"] == INNER
    assert [s["reason"] for s in found["sites"]] == [None, "activation", "post-norm"]
    assert scaled["what_to_do"] == REASONS["activation"][1]
    assert normed["op"] == "experts" and "tanh" in normed["combine_detail"] and not fused["combine_detail"]
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    page = (Path(__file__).parent.parent / "docs" / "dumps.md").read_text()
    assert all(f"`{key}`" in page for key in (*found, *fused))


def test_facts_and_roles_of_a_fused_block(three):
    fused = json.loads((three[1] / "report.json").read_text())["sites"][0]
    assert set(fused["roles"].values()) == {"router", "dispatch", "up", "activation", "down", "combine", "use"}
    assert "silu(gate) * up, sorted order" in fused["facts"].values()
    assert {"logits [T, E]", "scores: softmax", "experts of each token: top 3"} <= set(fused["facts"].values())
    assert "routing weights: scores of the chosen experts, normalised" in fused["facts"].values()
    assert "router: softmax, top 3, normalised (mok::moe)" in (three[1] / "index.html").read_text()
    assert {fused["roles"][node] for node in ("matmul", "scores", "topk")} == {"router"}
    assert any(fact.startswith("end of the rows of each of 5 experts") for fact in fused["facts"].values())
    text = (three[1] / "site_00" / "slice.txt").read_text()
    assert "# dispatch: slot at each sorted position of ids" in text


def test_a_miss_shows_where_the_proof_broke_and_what_was_expected(three):
    scaled = json.loads((three[1] / "report.json").read_text())["sites"][1]
    assert scaled["broke"]["op"] == "aten.mul.Tensor" and scaled["broke"]["node"] == scaled["node"]
    rows, scale = scaled["broke"]["arguments"]
    assert rows["known"] == "silu(gate) * up, sorted order" and rows["expected"]
    assert scale["argument"].endswith("scale_") and scale["known"] == "nothing is known"
    assert "return super().activate(h) * self.scale" in scaled["detail"] and "test_dump.py:" in scaled["location"]
    assert ">>> the proof breaks here" in (three[1] / "site_01" / "slice.txt").read_text()


@pytest.mark.parametrize("site, says", [(0, "1 fused (portable)"), (1, "activation"), (2, "1 fused (portable)")])
def test_repro_runs_without_the_model(three, site, says, capsys):
    runpy.run_path(str(three[1] / f"site_{site:02d}" / "repro.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert says in printed
    if site == 0:
        assert float(re.search(r"difference from eager (\S+)", printed)[1]) < 1e-5


def test_repro_of_a_value_read_outside(tmp_path, capsys):
    _, folder = dumped(tmp_path, Kept(), X)
    runpy.run_path(str(folder / "site_00" / "repro.py"), run_name="__main__")
    assert "interior-use" in capsys.readouterr().out


def test_checkpointed_bodies_have_their_own_listing(tmp_path):
    block = Moe()

    def forward(x):
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    report, folder = dumped(tmp_path, forward, X.clone().requires_grad_())
    assert report.fused == 1 and report.sites[0].subgraph
    assert f"def {report.sites[0].subgraph}(" in (folder / "after.py").read_text()


def test_page_is_self_contained(three):
    page = (three[1] / "index.html").read_text()
    assert not re.search(r"(src|href)\s*=\s*\"(?!#)", page) and "@import" not in page and "url(" not in page
    for reason in ("activation", "post-norm"):
        assert REASONS[reason][1].replace("'", "&#x27;") in page
    for role in ("router", "dispatch", "up", "activation", "down", "combine", "use"):
        assert f'class="chip {role}"' in page and re.search(rf'<td class="code {role}\b', page)


def chromium(page, *arguments):
    return subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *arguments, page],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_page_in_a_browser(three, tmp_path):
    page = (three[1] / "index.html").as_uri()
    dom = chromium(f"{page}#q=normal%20order%20silu", "--dump-dom")
    dom = chromium(f"{page}#q=tanh", "--dump-dom")
    shown = re.findall(r'<tr class="find[^"]*"', dom)
    hidden = [row for row in shown if "hidden" in row]
    assert 0 < len(shown) - len(hidden) < 10 < len(hidden)
    picture = tmp_path / "page.png"
    chromium(page, "--window-size=1400,1600", "--hide-scrollbars", f"--screenshot={picture}")
    assert picture.stat().st_size > 30_000  # an empty page of that size has less than 10 kB


def test_overview_lists_all_graphs(tmp_path):
    for _ in range(2):
        torch._dynamo.reset()
        mok_compile.explain(Moe(), {"mok.dump": str(tmp_path), "mok.engine": "portable"})(X)
    folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    page = (tmp_path / "index.html").read_text()
    assert len(folders) == 2 and all(f'href="{name}/index.html"' in page for name in folders)


WRITER = """
import sys
from pathlib import Path
from mok_compile import dump
for _ in range(20):
    dump._write(Path(sys.argv[1]), {"report.json": '{"sites": [], "fused": 0, "missed": 0, "summary": "one"}'})
"""


def test_processes_share_a_folder(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path]) for _ in range(2)]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    folders = [p.name for p in tmp_path.iterdir() if p.is_dir()]
    page = (tmp_path / "index.html").read_text()
    assert len(folders) == 40 and all(f'href="{name}/index.html"' in page for name in folders)


def test_folders_of_ranks_differ(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr(dump, "rank", lambda rank=rank: rank)
        torch._dynamo.reset()
        mok_compile.explain(Moe(), {"mok.dump": str(tmp_path), "mok.engine": "portable"})(X)
    names = sorted(p.name.rpartition("_")[0] for p in tmp_path.iterdir() if p.is_dir())
    assert names == [f"{os.getpid()}_rank0", f"{os.getpid()}_rank1"]


def captured(model, *args):
    """The Dynamo graph of `model`."""
    graphs = []
    torch._dynamo.reset()
    torch.compile(model, backend=lambda gm, inputs: graphs.append((gm, inputs)) or gm.forward)(*args)
    return graphs[0]


def test_nothing_is_computed_when_nobody_watches(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("computed for nobody")

    gm, inputs = captured(Moe(), X)
    monkeypatch.setattr(dump, "_trace", logging.getLogger("mok_compile.test"))
    monkeypatch.setattr(dump, "listing", never)
    monkeypatch.setattr(dump, "publish", never)
    monkeypatch.setitem(sys.modules, "mok_compile.passes.fusing.extract", None)
    report = transform(gm, inputs, Options(engine="portable"))
    assert report.fused == 1 and report.sites[0].slice is None and report.graphs[0].before == ""


def test_a_dump_that_cannot_be_written_does_not_end_the_compile(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    report = mok_compile.explain(Moe(), {"mok.dump": str(blocked), "mok.engine": "portable"})(X)
    assert report.fused == 1 and "dump could not be written" in caplog.text


def test_one_info_line_a_graph_on_the_first_rank(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "mok_compile")
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setattr(dump, "rank", lambda rank=rank: rank)
        caplog.clear()
        transform(*captured(Moe(), X), Options(engine="portable"))
        assert len([r for r in caplog.records if r.levelno == logging.INFO]) == lines
    assert torch._dynamo.utils.counters["mok"]["fused"] == 2


PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from blocks import HIDDEN, Moe
torch.compile(Moe(), backend="mok", options={"mok.engine": "portable"})(torch.randn(2, 7, HIDDEN))
"""


@pytest.mark.slow
def test_trace_and_log_of_a_real_compile(tmp_path):
    environment = {**os.environ, "TORCH_LOGS": "+mok_compile", "TORCH_TRACE": str(tmp_path / "trace")}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")  # what comes from a cache is not traced
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"1 MoE block: 1 fused \(portable\)\n", done.stderr)) >= 1  # the INFO line
    assert "silu(gate) * up" in done.stderr  # the table, at DEBUG level
    assert "mok" not in done.stdout
    if not TLPARSE.exists():
        pytest.skip("needs tlparse")
    (log,) = (tmp_path / "trace").glob("*.log")
    subprocess.run([TLPARSE, log, "-o", tmp_path / "parsed", "--no-browser"], check=True, capture_output=True)
    names = {re.sub(r"_\d+$", "", p.stem) for p in (tmp_path / "parsed").rglob("mok_*")}
    assert names >= {"mok_before", "mok_after", "mok_diff", "mok_report", "mok_site_00_repro", "mok_site_00_slice"}
    (report,) = (tmp_path / "parsed").rglob("mok_report*.json")
    assert json.loads(report.read_text())["fused"] == 1


def test_explain_takes_functions_modules_and_compiled_ones():
    block = Moe()
    for model in (block, lambda x: block(x), torch.compile(block), block.forward):
        torch._dynamo.reset()
        report = mok_compile.explain(model, {"mok.engine": "portable"})(X)
        assert (report.fused, report.missed) == (1, 0)
    block.compile()
    torch._dynamo.reset()
    assert mok_compile.explain(block, {"mok.engine": "portable"})(X).fused == 1


def test_explain_sees_every_graph_of_a_method_that_calls_the_model_often():
    class Looping(Moe):
        def generate(self, x, steps):
            with torch.no_grad():
                for _ in range(steps):
                    x = torch.cat([x, self(x)[:, -1:]], 1)
            return x

    model = Looping()
    report = mok_compile.explain(model.generate, {"mok.engine": "portable"})(X, steps=3)
    assert len(report.graphs) >= 2 and report.fused == len(report.graphs)
    assert model._compiled_call_impl is None


def test_table_fits_its_columns(three, monkeypatch):
    report = three[0]
    long = Report([site for site in report.sites for _ in range(1)])
    long.sites[0].location = "model." + "very_long_name." * 12 + "experts [Moe] file.py:1"
    text = str(long)
    assert max(map(len, text.splitlines())) <= 100 and "\033" not in text
    assert REASONS["activation"][1] in " ".join(text.split())
    assert "combine not fused: aten.tanh works on the output of the down projection" in " ".join(text.split())
    monkeypatch.setattr("mok_compile.table.is_terminal", lambda file: True)
    with open(os.devnull, "w") as file:
        report.show(file)


def test_sites_that_are_alike_share_a_row():
    report = mok_compile.explain(Net(*(Moe(seed=i) for i in range(3))), {"mok.engine": "portable"})(X)
    assert report.fused == 3 and "layers.0-2 (x3)" in str(report)


def test_html_for_notebooks(three):
    html = three[0]._repr_html_()
    assert "layers.1" in html and REASONS["activation"][1] in html and html.count("<tr>") == 4


def test_colour_only_on_a_terminal(three, capsys):
    three[0].show()
    assert "\033" not in capsys.readouterr().out
    assert "\033[31m" in mok_compile.table.text(three[0], colour=True)


@pytest.mark.parametrize("reason", IN_TRANSFORMERS)
def test_advice_about_transformers_is_for_its_blocks_alone(reason):
    own, theirs, remote = (
        Site("missed", reason, "", f"mlp [Experts] {file}:3").cure
        for file in (
            "model.py",
            "transformers/models/some/modeling_some.py",
            "/c/transformers_modules/some/modeling.py",
        )
    )
    assert own == REASONS[reason][1] and IN_TRANSFORMERS[reason] not in own
    assert theirs == remote == f"{own}; {IN_TRANSFORMERS[reason]}"


class LoopedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if len(token) > 0:
                y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return y


@pytest.mark.parametrize("compiled", [False, True], ids=["explain", "compile"])
def test_a_loop_has_a_folder_of_its_own(tmp_path, monkeypatch, compiled):
    monkeypatch.setattr(torch._TorchCompileInductorWrapper, "__call__", lambda self, gm, inputs: gm.forward)
    model = LoopedExperts()
    inputs = torch.randn(6, HIDDEN), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    options = {"mok.dump": str(tmp_path)}
    call = torch.compile(model, backend="mok", options=options) if compiled else mok_compile.explain(model, options)
    call(*inputs)
    (text,) = tmp_path.glob("*/site_00/loop.txt")
    said = text.read_text()
    assert "# missed: (no module) [LoopedExperts] " in said and "# data-dependent: the Python loop" in said
    assert "token, slot = torch.where(ids == e)" in said and "(0-3): 4 x Linear" in said
    report = json.loads((text.parent.parent / "report.json").read_text())
    assert [site["reason"] for site in report["sites"]] == ["data-dependent"]
    page = (text.parent.parent / "index.html").read_text()
    assert "token, slot = torch.where(ids == e)" in page and not (text.parent.parent / "before.py").exists()
    assert text.parent.parent.name in (tmp_path / "index.html").read_text()


def test_no_script_stands_for_a_loop_that_follows_its_router(tmp_path):
    """All that the graph holds is the router."""

    def route(x, gate, experts):
        weights, ids = (x @ gate).softmax(-1).topk(2)
        return sum(experts[e](x) * weights[:, :1] for e in set(ids.flatten().tolist()))

    experts = [nn.Linear(HIDDEN, HIDDEN) for _ in range(4)]
    gate = nn.Parameter(torch.randn(HIDDEN, 4))
    report = mok_compile.explain(route, {"mok.dump": str(tmp_path)})(torch.randn(6, HIDDEN), gate, experts)
    assert [site.cut_off for site in report.sites] == [True]
    assert list(tmp_path.glob("*/site_00/slice.txt")) and not list(tmp_path.rglob("repro.py"))


def test_experts_that_loop_in_python_are_named():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = LoopedExperts()

        def forward(self, x, ids, weights):
            return x + self.mlp(x, ids, weights)

    report = mok_compile.explain(Layer())(torch.randn(6, HIDDEN), torch.rand(6, 4).topk(2).indices, torch.rand(6, 2))
    assert [(s.status, s.reason) for s in report.sites] == [("missed", "data-dependent")]
    assert report.sites[0].location.startswith("mlp [LoopedExperts] ")
    said = " ".join(str(report).split())
    assert REASONS["data-dependent"][1] in said and "set_experts_implementation" not in said
    assert any(note.startswith("graph break:") for note in report.notes)
