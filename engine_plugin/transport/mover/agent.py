"""The NIXL agent of one mover: registration, peers, WRITE transfers, notifications.

The only module that knows NIXL. It runs in the mover process on one thread (several threads on one
agent crash it; STRICT sync is belt and braces), without NIXL's progress thread: whoever waits for a
transfer polls, and an idle agent costs nothing. Rules learnt the hard way: a timed-out transfer cannot
be fenced (release and remove return at once, bytes land later), so a handle is kept until it resolves;
`deserialize_descs` is pickle and is never called.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from engine_plugin.pull_plan import Chunk

WARM_UP: Final = "-"  # a tag that nobody expects


class PeerLost(Exception):
    """The peer's mover is gone or unusable; the transfers to it will not complete."""


@dataclass(slots=True)
class _Peer:
    metadata: bytes
    refs: int = 1
    loaded: bool = False
    broken: bool = False


class Agent:
    """One NIXL agent with the whole tier registered.

    Attributes:
        name: what peers' agents call this one, and what their notifications are addressed to.
        metadata: what a peer's `add_peer` needs.
    """

    def __init__(
        self, name: str, base_address: int, total_bytes: int, staging: tuple[int, int] | None = None
    ) -> None:
        """`staging`: address and size of memory beside the tier that transfers may use."""
        api, bindings = _import_nixl()
        config = api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        self.name = name
        self._agent: Any = api.nixl_agent(name, config)
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(bindings, error)
            for error in dir(bindings)
            if error.startswith("nixl") and error.endswith("Error")
        )
        self._base = base_address
        areas = [(base_address, total_bytes), *([staging] if staging else [])]
        self._registered = self._agent.register_memory([(*area, 0, "") for area in areas], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._peers: dict[str, _Peer] = {}

    def add_peer(self, agent: str, metadata: bytes) -> None:
        """Know a peer; loaded at once, and again on the next use if that failed or it broke.

        An empty notification makes UCX connect now (lazily it would do so on the first write).
        """
        peer = self._peers.get(agent)
        if peer is None:
            peer = self._peers[agent] = _Peer(metadata)
        else:
            peer.refs += 1
            peer.metadata = metadata
        with contextlib.suppress(PeerLost):
            self._load(agent, peer)
            self.notify(agent, WARM_UP)

    def drop_peer(self, agent: str) -> bool:
        """One reference less; True when nobody refers to it any more (call `forget_peer` when quiet)."""
        peer = self._peers.get(agent)
        if peer is None:
            return False
        peer.refs -= 1
        return peer.refs <= 0

    def forget_peer(self, agent: str) -> None:
        """Unload a peer that has no reference and no unresolved transfer."""
        peer = self._peers.get(agent)
        if peer is not None and peer.refs <= 0:
            del self._peers[agent]
            self._unload(agent, peer)

    def prepare(self, agent: str) -> None:
        """Make a peer writable, reloading one that broke; only while it has no unresolved transfer.

        Raises:
            PeerLost: unknown, or its metadata does not load.
        """
        peer = self._peers.get(agent)
        if peer is None:
            raise PeerLost(f"no peer {agent}")
        if peer.broken:
            self._unload(agent, peer)
        self._load(agent, peer)

    def post(self, agent: str, chunk: Chunk, target_base: int, source_base: int | None = None) -> Any:
        """Start writing one chunk, from the tier or `source_base`; returns its handle. Raises PeerLost."""
        base = self._base if source_base is None else source_base
        try:
            source = np.empty((len(chunk.segments), 3), dtype=np.uint64)
            target = np.empty_like(source)
            for row, segment in enumerate(chunk.segments):
                source[row] = (base + segment.source, segment.length, 0)
                target[row] = (target_base + segment.target, segment.length, 0)
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(source, "DRAM"),
                self._agent.get_xfer_descs(target, "DRAM"),
                agent,
            )
            state = self._agent.transfer(handle)
        except self._errors as exc:
            raise self._lost(agent, exc) from exc
        except (OverflowError, ValueError, TypeError) as exc:  # addresses that no memory has
            raise PeerLost(f"{type(exc).__name__}: {str(exc)[:120]}") from exc
        if state == "ERR":
            raise self._lost(agent, RuntimeError("transfer refused"))
        return handle

    def resolved(self, agent: str, handle: Any) -> bool:
        """Make progress; True once the chunk is in the peer's memory. Raises PeerLost."""
        try:
            state = self._agent.check_xfer_state(handle)
        except self._errors as exc:
            self._release(handle)
            raise self._lost(agent, exc) from exc
        if state == "PROC":
            return False
        self._release(handle)
        if state == "ERR":
            raise self._lost(agent, RuntimeError("transfer failed"))
        return True

    def notify(self, agent: str, tag: str) -> None:
        """Tell the peer's mover that everything of `tag` is there. Raises PeerLost."""
        try:
            self._agent.send_notif(agent, tag.encode())
        except self._errors as exc:
            raise self._lost(agent, exc) from exc

    def arrivals(self) -> list[str]:
        """Make progress as a target; tags peers have notified since the last call."""
        notified: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [raw.decode("ascii", "replace") for messages in notified.values() for raw in messages]

    def _load(self, agent: str, peer: _Peer) -> None:
        if peer.loaded:
            return
        try:
            named = self._agent.add_remote_agent(peer.metadata)
        except self._errors as exc:
            raise PeerLost(f"metadata of {agent} does not load: {type(exc).__name__}") from exc
        named = named.decode() if isinstance(named, bytes) else str(named)
        if named != agent:
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(named)
            raise PeerLost(f"metadata says {named[:64]!r}, the peer said {agent!r}")
        peer.loaded = True

    def _unload(self, agent: str, peer: _Peer) -> None:
        if peer.loaded:
            with contextlib.suppress(*self._errors):
                self._agent.remove_remote_agent(agent)
        peer.loaded = peer.broken = False

    def _lost(self, agent: str, cause: Exception) -> PeerLost:
        peer = self._peers.get(agent)
        if peer is not None:
            peer.broken = True
        return PeerLost(f"{type(cause).__name__}: {str(cause)[:120]}")

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(handle)


def _import_nixl() -> tuple[Any, Any]:
    for package in ("nixl_cu12", "nixl"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{package}._api"), importlib.import_module(f"{package}._bindings")
    raise ModuleNotFoundError("neither nixl_cu12 nor nixl is installed: the mover cannot start")
