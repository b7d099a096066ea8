"""The suite itself: tests that share a server or a job run in one process of the two that `make test` has."""

from __future__ import annotations

import pytest


def test_tests_of_a_group_stay_together(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts them, and no machine is fast enough. Seen with pytest 9.2, which does not take the
    names that pytest-xdist 3.8 gives to tests of a group."""
    if not request.config.getoption("loadgroup", False):
        return  # all in this process
    session = request.session
    apart = [i.nodeid for i in session.items if i.get_closest_marker("xdist_group") and "@" not in i.nodeid]
    assert not apart, "this pytest-xdist does not keep groups together with this pytest"
