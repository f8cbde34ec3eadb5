"""Packs of a step from --tokens_per_step, and what is said where ranks have too large a share."""

from __future__ import annotations

from common.data.flags import BatchFlags
from common.data.training_data import packs_per_step
from common.distributed.world import Mesh


def test_steps_that_are_too_large_for_the_flag_are_warned_of(caplog):
    flags = BatchFlags(tokens_per_step=1 << 21)
    assert packs_per_step(flags, Mesh(0, 64), 32_768).most == 64
    assert packs_per_step(flags, Mesh(0, 8), 32_768).most == 64
    assert caplog.messages == []
    assert packs_per_step(flags, Mesh(0, 256), 32_768).most == 256
    assert caplog.messages == [
        "A step has 8,388,608 tokens, not the 2,097,152 of --tokens_per_step: as many ranks need packs of 8,192 "
        "(--tokens_per_pack)"
    ]
