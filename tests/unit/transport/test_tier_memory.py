"""The slab: shared through its descriptor, nameless, and refused clearly where it does not fit."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from engine_plugin.transport import TierMemory, TierMemoryError, TransportStats
from engine_plugin.transport.mover.link import environment
from engine_plugin.transport.stats import MAX_PEER_LABELS, OTHER_PEER


def test_what_one_mapping_writes_the_other_reads() -> None:
    with TierMemory.create(4, 4096) as tier, mmap.mmap(tier.fd, tier.total_bytes) as other:
        assert tier.array.shape == (4, 4096)
        assert tier.array.dtype == np.uint8
        tier.array[2] = 7
        assert other[2 * 4096 : 3 * 4096] == b"\7" * 4096
        other[0:1] = b"\x09"
        assert tier.array[0, 0] == 9


def test_it_never_has_a_name() -> None:
    before = set(os.listdir("/dev/shm"))
    with TierMemory.create(2, 4096):
        assert set(os.listdir("/dev/shm")) == before


def test_closing_twice_and_with_a_view_alive_is_fine() -> None:
    tier = TierMemory.create(2, 4096)
    view = tier.array[1]
    view[:] = 5
    tier.close()
    tier.close()
    assert tier.fd == -1
    assert int(view.sum()) == 5 * 4096


def test_more_than_there_is_names_need_and_room() -> None:
    with pytest.raises(TierMemoryError, match=r"needs \d+ MiB in /dev/shm, which has \d+ MiB free"):
        TierMemory.create(1 << 20, 1 << 24)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 1), (1, 0), (-1, 4096)])
def test_an_empty_tier_is_a_programming_error(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="slots and bytes"):
        TierMemory.create(slots, slot_bytes)


def test_peer_labels_are_bounded() -> None:
    stats = TransportStats()
    for at in range(10 * MAX_PEER_LABELS):
        stats.count_refusal(f"peer-{at}", "auth")
    assert len(stats.refused) == MAX_PEER_LABELS + 1
    assert stats.refused[(OTHER_PEER, "auth")] == 9 * MAX_PEER_LABELS


def test_a_movers_environment_has_what_it_needs_and_no_more() -> None:
    seen = environment({"UCX_TLS": "tcp", "UCX_TCP_RX_SEG_SIZE": "64k", "PATH": "/bin", "PEER_KEY": "secret"})
    assert (seen["UCX_TLS"], seen["UCX_TCP_RX_SEG_SIZE"], seen["UCX_TCP_TX_SEG_SIZE"]) == (
        "tcp",
        "64k",
        "256k",
    )
    assert "secret" not in seen.values()
