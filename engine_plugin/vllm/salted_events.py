"""vLLM's KV event publisher, but no tenant's cache salt leaves the engine in clear.

Stock engines put the salt into their events as it is, on a socket without authentication; whoever has it
shares that tenant's cache. With a pool key (`KVPULL_SALT_KEY_FILE`) the events carry a keyed digest, which
the picker computes as well. It fails closed: a key that cannot be read stops the engine.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_plugin.salt import MIN_POOL_KEY_BYTES, published_salt

KEY_FILE_VARIABLE: Final = "KVPULL_SALT_KEY_FILE"
ExtraKeys = Sequence[Sequence[Any] | None]


class SaltKeyError(ValueError):
    """The pool key for salts cannot be used."""


def read_salt_key() -> bytes | None:
    """The pool key; None when none is configured. Raises SaltKeyError."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    if not named:
        return None
    try:
        key = Path(named).read_bytes().strip(b"\r\n")
    except OSError as error:
        raise SaltKeyError(f"{KEY_FILE_VARIABLE} {named}: {error.strerror}") from None
    if len(key) < MIN_POOL_KEY_BYTES:
        raise SaltKeyError(f"the key in {named} has {len(key)} bytes, and {MIN_POOL_KEY_BYTES} are needed")
    return key


def hide_salts(key: bytes, extra_keys: ExtraKeys, lora_name: str | None) -> list[tuple[Any, ...] | None]:
    """Every bare text but the LoRA adapter's name (which comes first) is a salt or might be one."""
    return [None if keys is None else _hidden(key, keys, lora_name) for keys in extra_keys]


def _hidden(key: bytes, keys: Sequence[Any], lora_name: str | None) -> tuple[Any, ...]:
    kept = 1 if lora_name is not None and keys and keys[0] == lora_name else 0
    hidden = (published_salt(key, one) if isinstance(one, str) else one for one in keys[kept:])
    return (*keys[:kept], *hidden)


def make_publisher(stock: type[Any], key: bytes) -> type[Any]:
    """The stock publisher's class with salts hidden."""

    class SaltHidingPublisher(stock):
        """Runs where the stock one does: the rewriting on the scheduler thread, for salted blocks only."""

        def publish(self, events: Any) -> None:
            events.events = [_without_salt(key, event) for event in events.events]
            super().publish(events)

    return SaltHidingPublisher


def _without_salt(key: bytes, event: Any) -> Any:
    extra_keys = getattr(event, "extra_keys", None)
    if not extra_keys or not any(extra_keys):
        return event
    return msgspec.structs.replace(event, extra_keys=hide_salts(key, extra_keys, event.lora_name))
