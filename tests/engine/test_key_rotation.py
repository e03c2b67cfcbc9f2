"""The pool's key is replaced under two running engines, by their mounted file alone."""

from __future__ import annotations

from pathlib import Path

from tests.engine.pull_engines import BLOCK_BYTES, KEY, PullEngine, fresh, until

BLOCKS = 2
NEW = KEY[::-1]


def mount(file: Path, *keys: bytes) -> None:
    """As the kubelet does: whole, at once."""
    following = file.with_suffix(".next")
    following.write_bytes(b"\n".join(keys))
    following.rename(file)


def states(engine: PullEngine) -> list[int]:
    """Of the keys it has had: 2 shown, 1 accepted, 0 no longer."""
    samples = engine.metrics().items()
    return sorted(int(value) for name, value in samples if name.startswith("kvpull_peer_keys{"))


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
    steps = [((KEY, NEW), [1, 2]), ((NEW, KEY), [1, 2]), ((NEW,), [0, 2]), ((NEW, KEY), [1, 2])]
    try:
        for keys, wanted in steps:
            mount(peer_key_file, *keys)
            until(lambda: states(source) == states(consumer) == wanted)  # noqa: B023
            pull(source, consumer)
    finally:
        mount(peer_key_file, KEY)
        until(lambda: states(source) == states(consumer) == [0, 2])
