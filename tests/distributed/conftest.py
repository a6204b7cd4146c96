"""One group of gloo processes for each number of ranks, started when the first test asks for it."""

import pytest
from ep_group import Group


@pytest.fixture(scope="session")
def group_of():
    groups = {}

    def get(ranks):
        if ranks not in groups:
            groups[ranks] = Group(ranks)
        return groups[ranks]

    yield get
    for group in groups.values():
        group.close()
