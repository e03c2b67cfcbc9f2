"""Secrets that the picker reads from files at start. A message names the flag and the file, never what
is in it.
"""

from __future__ import annotations

from pathlib import Path

from engine_plugin.salt import MIN_POOL_KEY_BYTES
from engine_plugin.transport.peer_keys import PeerKeys, parse_keys
from epp.core.errors import ConfigError
from epp.core.hashing import INDEX_SEED_BYTES
from sidecar.routing_auth import load_routing_key


def debug_token(path: Path | None) -> str | None:
    """Bearer token of the debug routes; None: there are none.

    Raises:
        ConfigError: unreadable or empty.
    """
    if path is None:
        return None
    token = _read(path, "--debug-token-file").decode("utf-8", "replace").strip()
    if not token:
        raise ConfigError(f"--debug-token-file {path}: is empty")
    return token


def routing_key(path: Path | None) -> bytes | None:
    """Key that signs routing headers; None: they are not signed.

    Raises:
        ConfigError: unreadable or too short.
    """
    if path is None:
        return None
    raw = _read(path, "--routing-key-file")
    try:
        return load_routing_key(raw)
    except ValueError as error:
        raise ConfigError(f"--routing-key-file {path}: {error}") from error


def peer_keys(path: Path | None) -> PeerKeys:
    """The engines' pool keys, for orders to them, the one to show first; none: they are given none.

    Raises:
        ConfigError: unreadable, none, or one that is too short.
    """
    if path is None:
        return ()
    try:
        return parse_keys(_read(path, "--peer-key-file"))
    except ValueError as error:
        raise ConfigError(f"--peer-key-file {path}: {error}") from error


def salt_key(path: Path | None) -> bytes | None:
    """Pool key of published salts; None: salts are compared in clear only.

    Raises:
        ConfigError: unreadable or too short.
    """
    if path is None:
        return None
    key = _read(path, "--salt-key-file").rstrip(b"\r\n")
    if len(key) < MIN_POOL_KEY_BYTES:
        raise ConfigError(
            f"--salt-key-file {path}: {len(key)} bytes, at least {MIN_POOL_KEY_BYTES} are needed"
        )
    return key


def index_seed(path: Path | None) -> bytes | None:
    """The index seed; None: none is given.

    Raises:
        ConfigError: unreadable, not hex digits, or of another length.
    """
    if path is None:
        return None
    raw = _read(path, "--index-seed-file")
    try:
        seed = bytes.fromhex(raw.decode("ascii", "replace").strip())
    except ValueError as error:
        raise ConfigError(f"--index-seed-file {path}: not hex digits") from error
    if len(seed) != INDEX_SEED_BYTES:
        raise ConfigError(f"--index-seed-file {path}: {len(seed)} bytes, {INDEX_SEED_BYTES} are needed")
    return seed


def _read(path: Path, flag: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error
