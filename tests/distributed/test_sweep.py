"""The sweep behind `python -m mok_compile tune`, on gloo processes."""

import math
from dataclasses import replace

import ep_tune
import pytest

from mok_compile.distributed import sweep, tune
from mok_compile.distributed.sweep import Job

JOB = Job(
    16, 24, 5, 2, (3, 40), "float32", (4, 8), rounds=2, transport="collectives", engine="portable", device="cpu"
)  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_setting_is_measured_for_every_number_of_tokens(group_of, ranks):
    results = group_of(ranks).run(ep_tune.swept, JOB)
    times, told = results[0]
    assert all(found == times for found, _ in results)  # the slowest rank's, on all
    assert [(t.tokens, t.sms) for t in times] == [(n, sms) for n in JOB.tokens for sms in JOB.sms]
    assert all(0 < ms < math.inf for t in times for ms in (t.forward, t.backward))
    assert sweep.choose(times).sms in JOB.sms
    steps = len(JOB.tokens) * len(JOB.sms) * (JOB.rounds + 1)
    assert [done for done, _, _ in told] == list(range(steps + 1)) and {total for _, total, _ in told} == {steps}


def test_the_budget_ends_a_sweep_after_its_first_round(group_of):
    results = group_of(2).run(ep_tune.swept, replace(JOB, budget=1e-6, rounds=1000))
    for times, told in results:
        assert len(told) == len(JOB.tokens) * len(JOB.sms) * 2 + 1  # to warm up, and one round
        assert all(t.forward < math.inf and t.backward < math.inf for t in times)


def test_a_setting_that_changes_a_bit_is_an_error_on_all_ranks(group_of):
    job = replace(JOB, dtype="bfloat16", transport="crooked sms={0}")
    said = group_of(2).run(ep_tune.crooked, job)
    assert said[0] == said[1]
    assert said[0].startswith("crooked sms=8, 3 tokens: other bits") and "rank 1: y, down." in said[0]
    assert group_of(2).run(ep_tune.crooked, replace(job, sms=(1, 2, 4))) == [None, None]
    assert group_of(2).run(ep_tune.crooked, replace(job, sms=(8, 16))) == [None, None]  # the same bits with both


def test_the_command_starts_its_ranks():
    times = tune.measure(replace(JOB, rounds=1), 2, sweep_progress)
    assert [(t.tokens, t.sms) for t in times] == [(n, sms) for n in JOB.tokens for sms in JOB.sms]
    line = tune.text(JOB, 2, "CPU", times, sweep.choose(times)).splitlines()[3].split()
    assert line[0] == "4" and len(line) == 1 + 2 * len(JOB.tokens)


def test_what_a_rank_says_reaches_the_user():
    with pytest.raises(tune.TuneError, match=r"^rank \d of 2: transport 'collectives sms=4' cannot run this block"):
        tune.measure(replace(JOB, transport="collectives sms={0}"), 2, sweep_progress)


def sweep_progress(done, total, what):
    """Must be a function of a module: it is called in another process."""
    assert 0 <= done <= total
