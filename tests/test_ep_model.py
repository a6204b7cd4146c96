"""Expert parallelism on paper: bytes, rows, tiles and times of cases that can be worked out by hand."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def load(name):
    """A file of the benchmarks; they import each other as scripts do."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    sys.path.append(str(BENCHMARKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


model = load("ep_model")
cost, routing, shapes = (sys.modules[name] for name in ("ep_cost", "ep_routing", "shapes"))

# Two ranks with two tokens each; experts 0 and 1 on the first rank, 2 and 3 on the second.
IDS = torch.tensor([[[0, 1], [2, 3]], [[0, 2], [2, 3]]])
SMALL = shapes.Shape(hidden=8, inner=4, experts=4, top_k=2)
NO_LINK = cost.Fabric("no waiting", 8, nvlink=1e30, nic=1e30)


def test_routes_and_tokens_from_rank_to_rank():
    load = routing.traffic(IDS, SMALL.experts)
    assert load.routes.tolist() == [[2, 2], [1, 3]]
    assert load.tokens.tolist() == [[1, 1], [1, 2]]
    assert load.per_expert.tolist() == [[2, 1], [3, 2]]
    assert load.rows.tolist() == [3, 5]


def test_experts_that_do_not_divide():
    """Three experts on two ranks are two and one; a rank may have none."""
    load = routing.traffic(torch.tensor([[[0, 2]], [[1, 0]]]), 3)
    assert load.per_expert.tolist() == [[2, 1], [1, 0]]
    assert routing.traffic(torch.tensor([[[0]], [[0]], [[1]]]), 2).per_expert.tolist() == [[2], [1], [0]]


def predicted(load, setup, tokens=2, shape=SMALL):
    costs = dict.fromkeys(cost.PASSES, cost.Cost("none", 0.0, 1e-9, 1))
    return cost.predict("small", shape, "explicit", load, tokens, setup, costs)


def test_bytes_of_the_busiest_port():
    """Rows of 16 bytes: the first rank sends 2 routes, which are 1 token."""
    p = predicted(routing.traffic(IDS, SMALL.experts), cost.Setup(NO_LINK))
    assert (p.route_bytes, p.unique_bytes, p.nic_bytes) == (32, 16, 0)
    assert (p.rows_mean, p.rows) == (4.0, 5)
    assert (p.flat_bytes, p.filled, p.turns) == (32, 0.5, 1)
    assert predicted(routing.traffic(IDS, SMALL.experts), cost.Setup(NO_LINK, unique=False)).filled == 1.0


def test_tiles_and_waves():
    """Row blocks of 128; 200 / 96 and 400 / 192 columns of tiles."""
    shape = shapes.Shape(hidden=400, inner=200, experts=4, top_k=1)
    per_expert = torch.tensor([[130, 0], [128, 1]])
    assert [t.tolist() for t in cost.tiles(per_expert, shape)] == [[6, 6], [6, 6]]
    wide = shapes.Shape(hidden=1920, inner=960, experts=4, top_k=1)
    assert cost.step_rows(wide, 124) == 128 * 25  # 10 tiles a block, 248 wanted
    load = routing.Traffic(torch.tensor([[130, 0], [0, 129]]), torch.tensor([[130, 0], [0, 129]]), per_expert)
    p = predicted(load, cost.Setup(NO_LINK), shape=wide)
    assert p.waves_up == p.waves_down == pytest.approx(20 / 124)


def test_turns_cost_the_fixed_time_of_every_expert_in_each(monkeypatch):
    """An expert on each of two ranks, whose fixed time is that of 3 * 1000 rows, with 2000 rows, half of them from the
    other. The ring has room for 400 of its 2000 tokens: 128 three times."""
    shape = shapes.Shape(hidden=960, inner=960, experts=2, top_k=1)
    sent, each = torch.full((2, 2), 1000), torch.full((2, 1), 2000)
    c, row = cost.Cost("none", 3000.0, 1.0, 0), 960 * 2
    monkeypatch.setattr(cost, "RING", 400 * row)
    p = cost.predict("", shape, "", routing.Traffic(sent, sent, each), 2000, cost.Setup(NO_LINK), {
        "forward": c, "both": c})  # fmt: skip
    assert (p.flat_bytes, p.filled, p.turns) == (2000 * row, 0.5, 6)
    assert p.turns_slowdown == pytest.approx((6 * 3 + 2) / (3 + 2))


def test_the_schedule_reads_and_sorts_the_ids_of_all_ranks():
    fabric = cost.Fabric("islands", 2, nvlink=100.0, nic=10.0)
    ids = 4 * 5 * 2  # bytes of a rank with 5 tokens
    assert cost.latency(1, 5, SMALL, fabric) == (0.0, 0.0)
    assert cost.latency(2, 5, SMALL, fabric) == pytest.approx(
        (ids / 100 + 2 * 1.6e-6 + 10 * cost.SORT_SLOT, 2 * 1.6e-6)
    )
    assert cost.latency(4, 5, SMALL, fabric)[0] == pytest.approx(2 * ids / 10, rel=1e-4)


def test_a_link_carries_pulls_and_pushes():
    """Rank 1 gets 10 rows of rank 0; they come back. Each port passes 10 rows in each direction: out of 0 the others'
    pulls, out of 1 its pushes."""
    fabric = cost.Fabric("slow", 2, nvlink=100.0, nic=10.0)
    moved = cost.move(torch.tensor([[5, 10], [0, 7]]), 20, fabric)
    assert moved.pull.tolist() == [0.0, 2.0]
    assert moved.link.tolist() == [2.0, 2.0] and moved.by == ["NVLink", "NVLink"]


def test_what_leaves_the_domain_goes_through_the_network_card():
    fabric = cost.Fabric("islands", 2, nvlink=100.0, nic=10.0)
    sent = torch.zeros(4, 4, dtype=torch.int64)
    sent[0, 1], sent[0, 2] = 10, 3
    near, far = cost.split(sent, fabric.domain)
    assert near.sum() == near[0, 1] == 10 and far.sum() == far[0, 2] == 3
    moved = cost.move(sent, 20, fabric)
    assert moved.link.tolist() == [6.0, 2.0, 6.0, 0.0]
    assert moved.by == ["NIC", "NVLink", "NIC", "NVLink"]
    p = predicted(routing.traffic(IDS, SMALL.experts), cost.Setup(cost.Fabric("apart", 1)))
    assert p.nic_bytes == p.unique_bytes


def time_of(compute, moved, step=10, waits=0.0):
    load = routing.Traffic(torch.tensor([[50, 50], [50, 50]]), torch.tensor([[9, 9], [9, 9]]), torch.full((2, 2), 50))
    return cost.phase(torch.tensor(compute), load, moved, step, waits)


def test_what_limits_a_pass():
    """100 rows a rank, half of them from elsewhere, in steps of 10: a fifth of the pull, a tenth of the products."""

    def moved(pull, link):
        return cost.Moved(torch.tensor([pull] * 2), torch.tensor([link] * 2), ["NVLink"] * 2)

    busy = time_of([20.0, 30.0], moved(5.0, 10.0), waits=0.5)
    assert (busy.limit, busy.compute, busy.seconds) == ("compute", 30.0, pytest.approx(30 + 1 + 0.5))
    passing = time_of([20.0, 30.0], moved(50.0, 100.0))
    assert (passing.limit, passing.link, passing.seconds) == ("NVLink", 100.0, pytest.approx(100 + 3))
    idle = time_of([1.0, 1.0], moved(0.5, 1.0), waits=9.0)
    assert (idle.limit, idle.seconds) == ("latency", pytest.approx(10.1))


def test_the_first_step_hides_behind_the_rows_that_are_there():
    """A step's pull takes 10; half the products, 2, are of the rank's own tokens."""
    moved = cost.Moved(torch.tensor([50.0] * 2), torch.tensor([1.0] * 2), ["NVLink"] * 2)
    assert time_of([4.0, 4.0], moved).seconds == pytest.approx((10 - 2) + 4 + 10)


def test_one_rank_is_the_block_that_was_measured():
    rows = model.read_rows(model.ONE_GPU)
    costs = cost.fit(rows)
    assert set(costs) == set(shapes.ONE_CARD)
    for name in costs:
        shape = shapes.SHAPES[name]
        for tokens in (2048, 16384):
            r = next(r for r in reversed(rows) if r.get("candidate") == "op" and r["shape"] == name
                     and r["tokens"] == tokens and r["routing"] == "balanced")  # fmt: skip
            each = tokens * shape.top_k // shape.experts
            sent = torch.tensor([[tokens]])
            load = routing.Traffic(sent * shape.top_k, sent, torch.full((1, shape.experts), each))
            p = cost.predict(name, shape, "even", load, tokens, cost.Setup(cost.FABRICS["h200"]), costs[name])
            assert p.forward.seconds * 1e3 == pytest.approx(r["fwd_ms"])
            assert p.both.seconds * 1e3 == pytest.approx(r["both_ms"])
            assert p.of_ideal("both") == pytest.approx(1.0) and p.turns == 1 and p.turns_slowdown == 1.0


def test_what_was_measured_but_not_fitted_is_met():
    """Zipf routing on one GPU. Also that the file's own format is understood: a prediction set beside itself is 1."""
    costs = cost.fit(model.read_rows(model.ONE_GPU))
    setup, how = cost.Setup(cost.FABRICS["h200"]), routing.Zipf()
    measured = [r for r in model.one_gpu(model.read_rows(model.ONE_GPU)) if r["tokens"] == 2048]
    checks = model.check(measured, costs, setup, how)
    assert len(checks) == len(measured) >= 12
    assert all(0.9 < c.ratio < 1.1 for c in checks), checks
    layer = {"shape": [2048, 768, 128, 8], "ep": 4, "tokens": 256, "routing": "balanced", "candidate": "mok"}
    [first] = model.check([{**layer, "pass": "both", "ms": ms} for ms in (9.0, 1.0)], costs, setup, how)
    assert first.measured == 1.0, "the last one of a point"
    others = [
        {**layer, "pass": "both", "ms": first.predicted},
        {**layer, "pass": "both", "ms": 1.0, "candidate": "nccl"},
    ]
    assert [c.ratio for c in model.check(others, costs, setup, how)] == [1.0]
    assert (first.shape, first.ranks, first.which) == ("qwen3-30b-a3b", 4, "both")


def test_weights_are_read_however_few_the_rows():
    c, shape = cost.Cost("none", 0.0, 1e-30, 1), shapes.SHAPES["deepseek-v3"]
    read = 3 * shape.hidden * shape.inner * 2 / cost.READ
    times = c.seconds(torch.tensor([0.0, 0.25, 1.0, 5.0]), shape, cost.FABRICS["h200"], cost.SMS)
    assert times.tolist() == pytest.approx([0.0, read / 4, read, read])


def test_skew_and_distance_never_help():
    shape = shapes.SHAPES["qwen3-30b-a3b"]
    costs = cost.nearest(cost.fit(model.read_rows(model.ONE_GPU)), shape)
    setup, how = cost.Setup(cost.FABRICS["h200"]), routing.Zipf()
    found = {}
    for kind, make in routing.ROUTINGS.items():
        load = routing.traffic(make(shape.experts, shape.top_k, how).ids(16, 512, 0), shape.experts)
        found[kind] = cost.predict("qwen3-30b-a3b", shape, kind, load, 512, setup, costs)
        near = cost.predict("", shape, kind, load, 512, cost.Setup(cost.Fabric("one domain", 16)), costs)
        assert near.both.seconds < found[kind].both.seconds
        assert found[kind].unique_bytes < found[kind].route_bytes
    assert found["balanced"].rows < found["zipf-shuffled"].rows < found["zipf"].rows
    assert found["balanced"].both.seconds < found["zipf-shuffled"].both.seconds < found["zipf"].both.seconds


def test_routing_is_seeded_and_gives_different_experts():
    for make in routing.ROUTINGS.values():
        drawn = make(16, 4, routing.Zipf()).ids(3, 50, seed=1)
        again = make(16, 4, routing.Zipf()).ids(2, 50, seed=1)
        assert torch.equal(drawn[:2], again) and not torch.equal(drawn[0], drawn[1])
        assert all(len(set(token)) == 4 for token in drawn.view(-1, 4).tolist())
    counts = torch.bincount(routing.zipf(16, 1, routing.Zipf(2.0)).ids(1, 20000, 0).flatten(), minlength=16)
    share = 1 / sum(1 / n**2 for n in range(1, 17))
    assert counts[0] / 20000 == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / 20000))


def test_counted_experts_come_as_often_as_they_were_counted():
    counts = torch.tensor([40, 10, 0, 30, 20, 60])
    drawn = routing.counted("layer", counts, 2).ids(1, 8000, 0)[0]
    assert all(len(set(token)) == 2 for token in drawn.tolist())
    shares = torch.bincount(drawn.flatten(), minlength=6) / 8000
    assert shares.tolist() == pytest.approx([0.5, 0.125, 0.0, 0.375, 0.25, 0.75], abs=0.025)
    with pytest.raises(ValueError, match="expert 1 has 60% of the routes"):
        routing.counted("layer", torch.tensor([1, 6, 3]), 2)


def test_counts_from_files(tmp_path):
    (tmp_path / "one.json").write_text("[1, 2, 3]")
    (tmp_path / "layers.json").write_text(json.dumps({"a": [[1, 2], [3, 4]], "b": [5, 6]}))
    assert {k: v.tolist() for k, v in routing.load_counts(tmp_path / "one.json").items()} == {"one": [1, 2, 3]}
    expected = {"a 0": [1, 2], "a 1": [3, 4], "b": [5, 6]}
    assert {k: v.tolist() for k, v in routing.load_counts(tmp_path / "layers.json").items()} == expected
    numpy = pytest.importorskip("numpy")
    numpy.savez(tmp_path / "some.npz", a=[[1, 2], [3, 4]], b=[5, 6])
    assert {k: v.tolist() for k, v in routing.load_counts(tmp_path / "some.npz").items()} == expected


def test_the_script_writes_what_it_predicts(tmp_path, monkeypatch, capsys):
    (tmp_path / "counts.json").write_text(json.dumps({"real": list(range(1, 129))}))
    monkeypatch.setattr(model, "one_gpu", lambda rows: [])
    arguments = [
        "--shapes",
        "qwen3-30b-a3b",
        "--ep",
        "2,16",
        "--tokens",
        "64",
        "--counts",
        str(tmp_path / "counts.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["ep_model.py", *arguments, "--out", str(tmp_path / "out")])
    model.main()
    written = json.loads((tmp_path / "out.json").read_text())
    assert "prediction" in written["conditions"]["what"]
    names = {row["routing"] for row in written["rows"]}
    assert names == {*routing.ROUTINGS, "real"} and len(written["rows"]) == 4 * 2 * 2
    lines = model.table(list(stored(written)))
    assert len(lines) == 2 + len(written["rows"]) and "\n".join(lines) in (tmp_path / "out.md").read_text()


def stored(written):
    """The predictions of a file of results."""
    for row in written["rows"]:
        times = {which: cost.Time(**row[which]) for which in cost.PASSES}
        yield cost.Prediction(**{**row, **times})


def test_the_table_in_the_documentation_is_that_of_the_results():
    written = json.loads((BENCHMARKS / "results" / "ep_model.json").read_text())
    documented = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")
    assert "\n".join(model.summary(list(stored(written)), 16384)) in documented
    ratios = [check["predicted"] / check["measured"] for check in written["checks"] if check["ranks"] == 1]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times what was measured ({len(ratios)} times)" in documented
