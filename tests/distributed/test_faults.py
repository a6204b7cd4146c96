"""What all ranks say when one of them goes wrong: the same error, or one that names rank, phase and counts."""

import ep_faults
import pytest
from ep_group import Group


@pytest.mark.parametrize(
    "what, says",
    [
        ("k", "ids [T, 1]"),
        ("dtype", "float64"),
        ("experts", "rank 1: cannot take part: its weights must be those of 2 of the 6 experts"),
        ("shape", "rank 1: cannot take part: mok::experts: expected x [T, H]"),
        ("floats", "rank 1: cannot take part: mok::experts: ids must be integer"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_on_every_rank(group_of, what, says):
    said = group_of(3).run(ep_faults.wrong_arguments, what)
    assert len(set(said)) == 1
    kind, text = said[0]
    assert kind == "ValueError" and says in text and "dispatch" in text


def test_ranks_in_different_passes(group_of):
    for kind, text in group_of(2).run(ep_faults.another_pass):
        assert kind == "ValueError" and "backward of" in text and "forward of" in text


def test_a_group_of_another_size(group_of):
    for kind, text in group_of(2).run(ep_faults.wrong_group):
        assert kind == "ValueError" and "2 ranks" in text


def test_a_late_rank_is_waited_for(group_of):
    assert group_of(2).run(ep_faults.late, 3) == [(4, 16), (3, 16)]


def test_a_rank_that_does_not_come_ends_with_the_timeout():
    group = Group(2)
    try:
        ((kind, text), waited), _ = group.run(ep_faults.does_not_come, 3)
        assert kind == "RuntimeError" and "dispatch on rank 0 of 2" in text and "timeout" in text
        assert waited < 20
    finally:
        group.close()


def test_a_rank_that_dies():
    group = Group(2)
    try:
        with pytest.raises(AssertionError, match="has ended"):
            group.run(ep_faults.dies)
        kind, text = group.last[0]
        assert kind == "RuntimeError"
        assert "dispatch on rank 0 of 2" in text and "routes to the ranks [" in text
    finally:
        group.close()
