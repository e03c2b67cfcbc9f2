"""The file of the pool's peer keys: what is one, and how a change of it is taken up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine_plugin.transport.peer_keys import MAX_KEYS, follow, parse_keys
from engine_plugin.wire import key_state

OLD, NEW = b"0123456789abcdef", b"fedcba9876543210"
WAIT_S = 10.0


def test_one_key_a_line_the_first_is_shown() -> None:
    assert parse_keys(OLD) == (OLD,)
    assert parse_keys(NEW + b"\r\n\n  " + OLD + b"\n") == (NEW, OLD)
    assert parse_keys(OLD + b"\n" + OLD) == (OLD,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no key in it"),
        (b"\n\n", "no key in it"),
        (OLD + b"\nshort\n", "line 2 has 5 bytes, and 16 are needed"),
        (b"\n".join(OLD + bytes((65 + n,)) for n in range(MAX_KEYS + 1)), "5 keys, at most 4"),
    ],
)
def test_what_is_no_key_is_named_by_its_line_and_not_shown(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        parse_keys(content)
    assert "short" not in str(refused.value)


def test_a_key_s_state_on_metrics() -> None:
    assert [key_state(key, ("new", "old")) for key in ("new", "old", "older")] == [2, 1, 0]
    assert key_state("old", ()) == 0


class Taker:
    """What was handed over, in order."""

    def __init__(self) -> None:
        self.taken: asyncio.Queue[tuple[bytes, ...]] = asyncio.Queue()

    async def use_keys(self, keys: Sequence[bytes]) -> None:
        self.taken.put_nowait(tuple(keys))

    async def next(self) -> tuple[bytes, ...]:
        async with asyncio.timeout(WAIT_S):
            return await self.taken.get()


async def test_a_changed_file_is_taken_up_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, taker = tmp_path / "key", Taker()
    file.write_bytes(OLD)
    following = asyncio.create_task(follow(file, (OLD,), taker, every_s=0.001))
    try:
        replace(file, OLD + b"\n" + NEW)
        assert await taker.next() == (OLD, NEW)
        replace(file, b"short")
        async with asyncio.timeout(WAIT_S):
            while "line 1 has 5 bytes" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        file.unlink()
        async with asyncio.timeout(WAIT_S):
            while "No such file" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        replace(file, NEW)
        assert await taker.next() == (NEW,), "the broken one was not taken for no keys"
        assert taker.taken.empty(), "and an unchanged file is no news"
    finally:
        following.cancel()
    assert caplog.text.count("line 1 has 5 bytes") == 1, "said once"
    assert OLD.decode() not in caplog.text
    assert NEW.decode() not in caplog.text


def replace(file: Path, content: bytes) -> None:
    """As the kubelet does: whole, at once."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.rename(file)
