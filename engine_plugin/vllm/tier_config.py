"""Settings of the pull tier: the keys of its entry in `secondary_tiers`. Plain Python, no vLLM.

Unknown keys, wrong types and a missing key file are refused when the engine starts: a setting that is
silently ignored costs more than an engine that says what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from engine_plugin import wire
from engine_plugin.identity import Address
from engine_plugin.transport import Faults, Limits
from engine_plugin.transport.peer_keys import PeerKeys, read_keys

MIN_CHUNK_BYTES: Final = 64 << 10  # smaller transfers cannot fill a link
FAULTS: Final = ("hold_after_chunks", "stall_lookup", "corrupt_block", "throttle_bytes_per_s")
_WILDCARDS: Final = ("0.0.0.0", "::", "[::]", "*")
_ADDED_BY_VLLM: Final = frozenset({"locality"})


class TierConfigError(ValueError):
    """A setting of the tier cannot be used; the message names it and what is allowed."""


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One rank's settings; every port is the first rank's, rank r uses port + r (0: any free one)."""

    host: str = ""  # what peers dial and where we listen; "": the address vLLM finds for this node
    port: int = wire.P2P_PORT
    reports_port: int = 0  # PullFinished reports; told in kvpull_engine_info
    peer_key_file: str = ""  # a mounted Secret; the pool's engines prove to each other that they hold it
    insecure: bool = False  # without a key: any peer of equal identity is trusted
    model: str = ""  # name that peers compare; "": the engine's --model
    revision: str = ""  # of the weights; peers compare it
    max_extra_ttft_s: float = 1.0  # what a dead, mute, frozen or slow peer may cost a request
    prefill_tokens_per_s: float = 0.0  # measured prefill speed; 0: unknown. A pull may then take as
    # long as computing its tokens would, where that is more than max_extra_ttft_s
    supply_wait_s: float = 30.0  # P/D: how long a decode leg waits for its prefill leg's blocks
    supply_keep_s: float = 60.0  # P/D: how long a prefill leg's blocks stay pinned for its decode leg
    connect: tuple[str, ...] = ()  # host:port of peers to connect to ahead of need
    chunk_bytes: int = Limits().chunk_bytes  # of one transfer; a few are in flight
    events_port: int = 0  # told in kvpull_engine_info; vLLM does not tell a tier where it publishes
    replay_port: int = 0
    faults: tuple[str, ...] = ()  # what this engine shall do wrong as a source; for tests only

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierConfig:
        """Raises TierConfigError."""
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(given) - set(known) - _ADDED_BY_VLLM)
        if unknown:
            raise TierConfigError(
                f"kvpull tier: unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        values = {name: _typed(name, given[name], known[name].default) for name in given if name in known}
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        if bool(self.peer_key_file) == self.insecure:
            raise TierConfigError("kvpull tier: set peer_key_file (a mounted Secret), or insecure: true")
        if self.host in _WILDCARDS:
            raise TierConfigError(
                f"kvpull tier: host {self.host} is no address that peers can dial; "
                "name this pod's, or leave it out"
            )
        for name in ("port", "reports_port", "events_port", "replay_port"):
            if not 0 <= getattr(self, name) < 65_536:
                raise TierConfigError(f"kvpull tier: {name} {getattr(self, name)} is no port")
        for name in ("max_extra_ttft_s", "supply_wait_s", "supply_keep_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise TierConfigError(f"kvpull tier: {name} must be more than 0 and at most 3600 seconds")
        if self.prefill_tokens_per_s < 0:
            raise TierConfigError("kvpull tier: prefill_tokens_per_s must not be negative")
        if self.chunk_bytes < MIN_CHUNK_BYTES:
            raise TierConfigError(f"kvpull tier: chunk_bytes must be at least {MIN_CHUNK_BYTES}")
        self.connect_addresses()
        self.make_faults()

    def connect_addresses(self) -> list[Address]:
        """`connect` as addresses. Raises TierConfigError."""
        addresses = []
        for text in self.connect:
            host, _, port = text.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65_536:
                raise TierConfigError(f"kvpull tier: connect has {text!r}, which is not host:port")
            addresses.append((host.strip("[]"), int(port)))
        return addresses

    def make_faults(self) -> Faults | None:
        """`name=number` texts as `Faults`; None without any. Raises TierConfigError."""
        if not self.faults:
            return None
        values: dict[str, int] = {}
        for text in self.faults:
            name, _, number = text.partition("=")
            if name not in FAULTS or not number.isdigit():
                raise TierConfigError(f"kvpull tier: faults are {', '.join(FAULTS)} (=number), not {text!r}")
            values[name] = int(number)
        return Faults(**values)  # type: ignore[arg-type]

    def limits(self) -> Limits:
        """The transport's waits: none is longer than the patience with a peer."""
        patience_s = self.max_extra_ttft_s
        return Limits(
            connect_s=patience_s,
            handshake_s=patience_s,
            progress_s=patience_s,
            first_progress_s=patience_s,
            chunk_bytes=self.chunk_bytes,
        )

    def read_peer_keys(self) -> PeerKeys:
        """The keys of `peer_key_file`, see `peer_keys`; none if `insecure`. Raises TierConfigError."""
        if self.insecure:
            return ()
        try:
            return read_keys(Path(self.peer_key_file))
        except OSError as error:
            raise TierConfigError(
                f"kvpull tier: peer_key_file {self.peer_key_file}: {error.strerror}"
            ) from None
        except ValueError as error:
            raise TierConfigError(f"kvpull tier: peer_key_file {self.peer_key_file}: {error}") from None

    def deadline_s(self, tokens: int) -> float:
        """How long a pull of `tokens` may take, connection and look-up included."""
        if self.prefill_tokens_per_s > 0:
            return max(self.max_extra_ttft_s, tokens / self.prefill_tokens_per_s)
        return self.max_extra_ttft_s


def _typed(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        ok, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        ok, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(default, float):
        ok, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif isinstance(default, tuple):
        ok = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        wanted, value = "a list of texts", tuple(value) if ok else value
    else:
        ok, wanted = isinstance(value, str), "a text"
    if not ok:
        raise TierConfigError(f"kvpull tier: {name} must be {wanted}")
    return value
