"""The list of slow tests names tests that there are."""

from __future__ import annotations

import pytest

from tests.conftest import COLLECTED
from tests.slow import NODE_IDS


def test_slow_tests_exist(request: pytest.FixtureRequest):
    collected = request.config.stash[COLLECTED]
    files = {node.partition("::")[0] for node in collected}
    assert not [node for node in NODE_IDS if node.partition("::")[0] in files and node not in collected]
