"""`python -m mok_compile tune`: settings, the choice, the file. Measuring: tests/distributed/test_sweep.py."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mok_compile import build, cli
from mok_compile.distributed import peer_memory, sweep, tune, tuned, windows
from mok_compile.distributed.sharding import Sharding
from mok_compile.distributed.sweep import Job, Times
from mok_compile.distributed.transports import Call, Operands
from mok_compile.distributed.tuned import Best, Key
from mok_compile.engines import sm90

GPU = "NVIDIA H200"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path / "cache"))
    tuned.best_for.cache_clear()
    yield tmp_path / "cache"
    tuned.best_for.cache_clear()


def key(**changes):
    return replace(Key(GPU, 2, 64, 32, 8, 2, "bfloat16", tuned.library()), **changes)


def test_the_grid_ends_where_the_gpu_or_the_kernels_do():
    assert sweep.grid(132) == sweep.GRID and max(sweep.GRID) == tuned.MAX_SMS
    assert sweep.grid(20) == tuple(n for n in sweep.GRID if n <= 20)
    assert sweep.grid(0) == (1,)
    assert tuned.DEFAULT.sms in sweep.GRID and tuned.DEFAULT.backward_sms in sweep.GRID


def test_forward_and_backward_are_chosen_on_their_own():
    times = [Times(64, 4, 2.0, 5.0), Times(64, 8, 1.0, 6.0), Times(64, 16, 1.5, 7.0)]
    assert sweep.choose(times) == Best(8, 4, (64,))


def test_the_choice_is_for_all_numbers_of_tokens_by_ratios_not_by_milliseconds():
    """4 SMs win 10 ms where a pass takes 110; they lose half where it takes 2."""
    times = [Times(9000, 4, 100.0, 100.0), Times(9000, 8, 110.0, 110.0), Times(9, 4, 3.0, 3.0), Times(9, 8, 2.0, 2.0)]
    assert sweep.choose(times) == Best(8, 8, (9, 9000))


def test_settings_that_are_alike_leave_the_most_sms_to_the_products():
    times = [Times(64, 1, 2.0, 2.0), Times(64, 8, 1.005, 1.02), Times(64, 16, 1.0, 1.0)]
    assert sweep.choose(times) == Best(8, 16, (64,))


def test_what_is_stored_comes_back(folder):
    assert tuned.read() == {}
    for sms, other in ((4, key(ranks=4)), (8, key(experts=16)), (12, key())):
        tuned.remember(other, Best(sms, 2 * sms, (64, 128)))
    tuned.remember(key(), Best(24, 32, (64,)))
    assert tuned.read() == {
        key(ranks=4): Best(4, 8, (64, 128)), key(experts=16): Best(8, 16, (64, 128)), key(): Best(24, 32, (64,))
    }  # fmt: skip
    tuned.forget([key(), key(top_k=4)])
    assert list(tuned.read()) == [key(ranks=4), key(experts=16)]
    assert not (folder / "tuned.tmp").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"tuned": 3}', '{"tuned": [{"sms": 4}]}', "sms", "backward_sms", "ranks", "library", "tokens"],
)
def test_a_damaged_file_is_said_once_and_ignored(folder, caplog, content):
    folder.mkdir()
    if content.isidentifier():
        tuned.remember(key(), Best(4, 8, (64,)))
        entries = json.loads(tuned.path().read_text())
        entries["tuned"][0][content] = 65 if content.endswith("sms") else -1
        content = json.dumps(entries)
    tuned.path().write_text(content)
    assert tuned.read() == {} and tuned.read() == {}
    assert [r.getMessage() for r in caplog.records if str(tuned.path()) in r.getMessage()] == caplog.messages[:1] != []
    tuned.remember(key(), Best(4, 8, (64,)))
    assert tuned.read() == {key(): Best(4, 8, (64,))}


def call(experts=8, ranks=2, options=""):
    return Call(Job(64, 32, experts, 2, (4,)).spec, "sm90", "group", Sharding(experts, ranks), options)


def operands(dtype=torch.bfloat16):
    x, ids = torch.zeros(4, 64, dtype=dtype), torch.zeros(4, 2, dtype=torch.int64)
    return Operands(x, ids, torch.zeros(4, 2), [x.new_zeros(4, 64, 64)], [x.new_zeros(4, 64, 32)], [], [])


def settled(options="", dtype=torch.bfloat16, **how):
    found = peer_memory.Options.parse(options).settled(operands(dtype), call(options=options, **how))
    return found.sms, found.backward_sms


def test_the_transport_uses_what_is_stored_for_its_shape(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    tuned.remember(key(), Best(4, 24))
    assert settled() == (4, 24)
    assert settled("sms=2") == (2, 24) and settled("backward_sms=3") == (4, 3)  # what is said wins
    assert settled("sms=5 backward_sms=6 room=1.5") == (5, 6)
    default = (tuned.DEFAULT.sms, tuned.DEFAULT.backward_sms)
    assert settled(ranks=4) == settled(experts=6) == settled(dtype=torch.float16) == default
    tuned.remember(key(), Best(8, 12))
    assert settled() == (8, 12)
    tuned.forget([key()])
    assert settled() == default
    tuned.remember(key(library="of other sources"), Best(4, 24))
    assert settled() == default


def test_options_that_are_none():
    for text in ("sms=65", "backward_sms=-1", "sms=x", "sms"):
        with pytest.raises(ValueError, match=r"^peer_memory: .*sms"):
            peer_memory.Options.parse(text)


def test_blocks_that_share_a_window_read_with_their_own_sms(monkeypatch):
    shape = windows.Shape("group", torch.device("cpu"), 64, 2, False)
    four = [torch.zeros(4, dtype=torch.int64) for _ in range(4)]
    monkeypatch.setitem(windows._windows, shape, windows.Windows(shape, 0, 2, 128, 1, 1.0, (16, 16), *four))
    for text in ("sms=4 backward_sms=8", "sms=32 backward_sms=2"):
        options = peer_memory.Options.parse(text)
        found = windows.windows_for(shape, None, 4, "", None, options)
        assert found.numbers[11:13] == [options.sms, options.backward_sms]


def refused(capsys, *arguments):
    assert cli.main(["tune", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tune: ")
    return said.err


@pytest.fixture
def other_gpus(monkeypatch):
    """To be replaced by the test; sm90 remembers what it has seen."""
    forget = sm90._is_hopper.cache_clear, sm90._unsupported.cache_clear

    def become(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        for clear in forget:
            clear()

    yield become
    for clear in forget:
        clear()


def test_what_cannot_be_measured_is_said(capsys, folder, monkeypatch, other_gpus):
    assert "give H, I, E" in refused(capsys) and "give H, I, E" in refused(capsys, "64", "32")
    assert "K is 9, more than the 8 experts" in refused(capsys, "64", "32", "8", "9")
    assert "H is 60 and I is 33: " in refused(capsys, "60", "33", "8", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no NVIDIA GPU" in refused(capsys, "64", "32", "8", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "3 ranks need as many GPUs, and 1 can be seen" in refused(capsys, "64", "32", "8", "2", "--ranks", "3")
    assert "at least two ranks" in refused(capsys, "64", "32", "8", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    other_gpus((8, 0))
    said = refused(capsys, "64", "32", "8", "2")
    assert "the engine sm90 cannot run here" in said and "(9, 0), and there are only (8, 0)" in said
    other_gpus((9, 0))
    monkeypatch.setattr(build, "unavailable", lambda name: None)
    monkeypatch.setattr(build, "load", fails)
    assert "cannot run here: building the sm90 kernels failed" in refused(capsys, "64", "32", "8", "2")
    monkeypatch.setattr(build, "load", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    said = refused(capsys, "64", "32", "99999", "2")
    assert f"GPU 0 ({GPU}) cannot run it: it takes at most" in said
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=30))
    job, ranks = tune.prepare(Job(64, 32, 8, 2, (4,)), None)
    assert ranks == 2 and job.sms == sweep.grid(30)


def fails(name):
    raise build.BuildError("building the sm90 kernels failed")


@pytest.fixture
def measured(folder, monkeypatch):
    """Two GPUs that take what this says."""
    times = [Times(n, sms, n / sms, n * sms) for n in (64, 128) for sms in (4, 8)]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    monkeypatch.setattr(tune, "prepare", lambda job, ranks: (job, ranks))
    monkeypatch.setattr(tune, "measure", lambda job, ranks, progress: times)


def test_the_best_is_printed_and_stored(capsys, measured, monkeypatch):
    assert cli.main(["tune", "64", "32", "8", "2", "--ranks", "2", "--tokens", "64", "128"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"2 x {GPU}" in lines[0] and "64 tokens" in lines[2] and "128 tokens" in lines[2]
    assert lines[3].split() == ["4", "16.000", "256.000*", "32.000", "512.000*"]
    assert lines[4].split() == ["8", "8.000*", "512.000", "16.000*", "1024.000"]
    assert lines[5].endswith("sms=8 backward_sms=4") and settled() == (8, 4)
    tuned.remember(key(top_k=4, library="of other sources"), Best(2, 2, (64,)))
    assert cli.main(["tune", "--show"]) == 0
    where, ours, other = capsys.readouterr().out.splitlines()
    assert where == str(tuned.path()) and ours.endswith("sms=8 backward_sms=4 (tokens 64, 128)")
    assert "4 per token" in other and "not used" in other
    assert cli.main(["tune", "64", "32", "8", "2", "--show"]) == 0
    assert capsys.readouterr().out.splitlines() == [where, ours]
    assert cli.main(["tune", "64", "32", "8", "2", "--forget"]) == 0
    assert list(tuned.read()) == [key(top_k=4, library="of other sources")]
    assert cli.main(["tune", "--forget"]) == 0 and tuned.read() == {}
    capsys.readouterr()
    assert cli.main(["tune", "--show"]) == 0
    assert "nothing is stored" in capsys.readouterr().out


def test_a_setting_that_changes_bits_is_not_stored(capsys, measured, monkeypatch):
    def differs(job, ranks, progress):
        raise sweep.Differs("sms=8 changes bits")

    monkeypatch.setattr(tune, "measure", differs)
    assert cli.main(["tune", "64", "32", "8", "2", "--ranks", "2"]) == 1
    assert "sms=8 changes bits" in capsys.readouterr().err and tuned.read() == {}


def test_a_folder_that_cannot_be_written(capsys, measured, folder):
    folder.write_text("a file")
    assert cli.main(["tune", "64", "32", "8", "2", "--ranks", "2"]) == 2
    said = capsys.readouterr()
    assert f"2 x {GPU}" in said.out and "MOK_CACHE_DIR" in said.err
