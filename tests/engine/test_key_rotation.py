"""The pool's key is replaced under two running engines, by their mounted file alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.pull_engines import BLOCK_BYTES, KEY, PullEngine, fresh, until

pytestmark = pytest.mark.timeout(900)
BLOCKS = 2
NEW = KEY[::-1]


def mount(file: Path, *keys: bytes) -> None:
    """As the kubelet does: whole, at once."""
    following = file.with_suffix(".next")
    following.write_bytes(b"\n".join(keys))
    following.rename(file)


def states(engine: PullEngine) -> dict[str, float]:
    """Of the keys it has had: 2 shown, 1 accepted, 0 no longer."""
    samples = engine.metrics().items()
    return {name: value for name, value in samples if name.startswith("kvpull_peer_keys{")}


def pull(source: PullEngine, consumer: PullEngine) -> None:
    """A fresh prefix is moved, whole."""
    prompt = fresh(BLOCKS)
    source.complete(prompt)
    received = consumer.metric("kvpull_pull_received_bytes_total")
    consumer.complete(prompt, params=consumer.pull_from(source, "rotation"))
    wanted = received + BLOCKS * BLOCK_BYTES
    until(lambda: consumer.metric("kvpull_pull_received_bytes_total") == wanted)


def test_both_engines_follow_the_file_and_go_on_pulling(
    source: PullEngine, consumer: PullEngine, peer_key_file: Path
) -> None:
    until(lambda: len(states(source)) == len(states(consumer)) == 1)
    (old,) = states(source)
    steps = [((KEY, NEW), 2, 1), ((NEW, KEY), 1, 2), ((NEW,), 0, 2), ((NEW, KEY), 1, 2), ((KEY,), 2, 0)]
    for keys, of_old, of_new in steps:
        mount(peer_key_file, *keys)
        wanted = {of_old, of_new}
        until(lambda: states(source) == states(consumer))
        until(lambda: states(source)[old] == of_old and set(states(source).values()) == wanted)  # noqa: B023
        until(lambda: states(source) == states(consumer))
        pull(source, consumer)
