"""A peer that orders an engine to pull: it holds the pool's key and says of itself what the engine says."""

from __future__ import annotations

import hashlib
import pickle
import socket
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from engine_plugin import protocol
from engine_plugin.identity import PeerIdentity
from engine_plugin.protocol import Declined, Hello, Prefetched
from engine_plugin.transport import Limits, PrefetchOrder, TransportStats
from engine_plugin.transport.control import handshake
from engine_plugin.transport.control.calling import Caller
from engine_plugin.transport.control.channel import Channel
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from tests.engine.pull_engines import BLOCK_TOKENS, KEY, PullEngine

PATIENCE_S: Final = 60.0
_SEED: Final = "vllm-none-hash"
_STRANGER: Final = PeerIdentity(uuid.uuid4().hex, 0, "?", "?", 1, 1, "?", "?", 1, "?", "?")
_LIMITS: Final = replace(Limits(), connect_s=PATIENCE_S, handshake_s=PATIENCE_S, silence_s=PATIENCE_S)


async def order_pull(target: PullEngine, source: PullEngine, keys: Sequence[bytes]) -> Prefetched | Declined:
    """Have `target` pull `keys` from `source` now."""
    pool = PoolKeys((KEY,))
    address = ("127.0.0.1", target.p2p_port)
    identity = replace(await _identity_at(address, pool), instance=uuid.uuid4().hex)
    session = await OutboundSession.connect(address, Caller(identity, pool, _LIMITS, TransportStats()))
    order = PrefetchOrder(("127.0.0.1", source.p2p_port), "order", tuple(keys), PATIENCE_S)
    try:
        return await session.prefetch(order)
    finally:
        await session.close()


async def _identity_at(address: tuple[str, int], keys: PoolKeys) -> PeerIdentity:
    """What the engine there says of itself in the handshake; ours is refused, which is no matter."""
    sock = socket.create_connection(address)
    sock.setblocking(False)
    channel = await Channel.open(sock, keys.tls.client, server_side=False, send_limit_bytes=1 << 20)
    try:
        channel.send(handshake.hello(_STRANGER))
        message = await channel.from_server(protocol.HANDSHAKE_BYTES)
        assert isinstance(message, Hello)
        return message.identity
    finally:
        channel.abort()


def block_keys(ids: Sequence[int]) -> list[bytes]:
    """vLLM's own names of a prompt's whole blocks (`sha256`, no salt), as its tiers have them."""
    parent, keys = _digest(_SEED), []
    for at in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = _digest((parent, tuple(ids[at : at + BLOCK_TOKENS]), None))
        keys.append(parent + (0).to_bytes(4, "big"))
    return keys


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()
