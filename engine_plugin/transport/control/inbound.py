"""The producer's side of the control channel: accept, handshake, serve. It never dials."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from engine_plugin import protocol
from engine_plugin.identity import Address
from engine_plugin.protocol import (
    Accepted,
    Cancel,
    ClientMessage,
    FrameError,
    Hello,
    Lookup,
    Move,
    MoverInfo,
    Ping,
    Pong,
    Proof,
    Refused,
    Release,
)
from engine_plugin.transport.control import handshake
from engine_plugin.transport.control.channel import Channel, ChannelClosed
from engine_plugin.transport.control.handshake import Refusal
from engine_plugin.transport.control.leases import PeerBudget
from engine_plugin.transport.control.serving import Producer, Serving
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.stats import OTHER_PEER

log = logging.getLogger(__name__)


class Listener:
    """Accepts peers on one address and runs a session for each."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], Channel] = {}
        self._servings: set[Serving] = set()
        self._shaking: Counter[str] = Counter()  # connections before the end of their handshake, by host
        self._budgets: dict[str, PeerBudget] = {}

    async def start(self, listen: Address) -> Address:
        """Listen; returns the bound address. Raises OSError."""
        self._server = await asyncio.start_server(self._accept, *listen)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def stop(self) -> None:
        """Stop accepting and end every session."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections))

    def mover_changed(self, mover: Mover) -> None:
        """Our mover was replaced: every peer's mover is made known to the new one."""
        for serving in self._servings:
            serving.wire(mover)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits, stats = self._producer.limits, self._producer.stats
        channel = Channel(reader, writer, send_limit_bytes=2 * limits.message_bytes)
        if self._too_many(channel.remote_host):
            stats.refused[(OTHER_PEER, "limit")] += 1  # strangers get no label of their own
            channel.abort()
            return
        self._shaking[channel.remote_host] += 1
        task = asyncio.create_task(self._serve(channel), name=f"p2p-in-{channel.remote_host}")
        self._connections[task] = channel
        task.add_done_callback(self._connections.pop)

    def _too_many(self, host: str) -> bool:
        limits, shaking = self._producer.limits, self._shaking
        return (
            len(self._connections) - shaking.total() >= limits.connections
            or shaking.total() >= limits.handshakes
            or shaking[host] >= limits.handshakes_per_host
        )

    async def _serve(self, channel: Channel) -> None:
        """One connection from first byte to last. Whatever its bytes, only this connection ends."""
        stats = self._producer.stats
        try:
            try:
                peer = await self._shake_hands(channel)
            finally:
                self._shaking -= Counter((channel.remote_host,))
            if peer is not None:
                await self._converse(channel, peer)
        except ChannelClosed:
            pass
        except FrameError as exc:
            stats.bad_frames += 1
            log.warning("connection from %s closed: %s", channel.remote_host, exc)
        except TimeoutError:
            log.warning("connection from %s closed: silent for too long", channel.remote_host)
        except Exception:
            log.exception("session of %s", channel.remote_host)
        finally:
            await channel.close()

    async def _shake_hands(self, channel: Channel) -> Hello | None:
        producer = self._producer
        theirs: Hello | None = None
        try:
            async with asyncio.timeout(producer.limits.handshake_s):
                theirs = await self._expect_hello(channel)
                await self._verify(channel, theirs)
        except Refusal as refusal:
            trusted = theirs is not None and refusal.reason in ("identity", "limit")
            peer = theirs.identity.instance if theirs is not None and trusted else channel.remote_host
            producer.stats.count_refusal(peer, refusal.label)
            log.warning("peer %s refused: %s %s", peer, refusal.reason, refusal.detail)
            channel.send(Refused(refusal.reason, refusal.detail))
            return None
        return theirs

    async def _expect_hello(self, channel: Channel) -> Hello:
        message = await channel.from_client(protocol.HANDSHAKE_BYTES)
        if not isinstance(message, Hello):
            raise FrameError("the first frame is not a hello")
        return message

    async def _verify(self, channel: Channel, theirs: Hello) -> None:
        producer = self._producer
        ours = handshake.hello(producer.identity, producer.key)
        channel.send(ours)
        handshake.check_hello(theirs, producer.key)
        if producer.key is not None:
            message = await channel.from_client(protocol.HANDSHAKE_BYTES)
            if not isinstance(message, Proof):
                raise FrameError("a proof was due")
            handshake.check_proof(message.mac, producer.key, "client", theirs, ours)
            channel.send(Proof(handshake.proof(producer.key, "server", theirs, ours)))
        handshake.check_identity(producer.identity, theirs.identity)
        budget = self._budgets.get(theirs.identity.instance)
        if budget is not None and budget.connections >= producer.limits.connections_per_peer:
            raise Refusal("limit", "connections_per_peer")
        channel.send(Accepted())

    async def _converse(self, channel: Channel, hello: Hello) -> None:
        limits, stats = self._producer.limits, self._producer.stats
        instance = hello.identity.instance
        budget = self._budgets.setdefault(instance, PeerBudget())
        budget.connections += 1
        serving = Serving(self._producer, hello.identity, budget, channel.send)
        self._servings.add(serving)
        stats.sessions_in += 1
        try:
            while True:
                async with asyncio.timeout(limits.silence_s * 2):
                    message = await channel.from_client(limits.message_bytes)
                _dispatch(serving, channel, message)
        finally:
            stats.sessions_in -= 1
            self._servings.discard(serving)
            serving.end()
            budget.connections -= 1
            self._budgets = {peer: kept for peer, kept in self._budgets.items() if kept != PeerBudget()}


def _dispatch(serving: Serving, channel: Channel, message: ClientMessage) -> None:
    match message:
        case Lookup():
            serving.lookup(message)
        case Move():
            serving.move(message)
        case MoverInfo():
            serving.mover_info(message)
        case Cancel(id=request_id):
            serving.cancel(request_id)
        case Release(lease_id=token):
            serving.release(token)
        case Ping():
            channel.send(Pong())
        case _:
            raise FrameError(f"{type(message).__name__} after the handshake")
