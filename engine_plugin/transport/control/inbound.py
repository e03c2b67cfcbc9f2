"""The producer's side of the control channel: accept, handshake, serve. It never dials."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from typing import Final

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
    Prefetch,
    Refused,
    Release,
)
from engine_plugin.transport.control import handshake
from engine_plugin.transport.control.channel import Channel, ChannelClosed, SpeaksTls
from engine_plugin.transport.control.handshake import Refusal
from engine_plugin.transport.control.leases import PeerBudget
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.control.producer import Producer
from engine_plugin.transport.control.serving import Serving
from engine_plugin.transport.control.turns import TokenBucket
from engine_plugin.transport.mover.link import Mover
from engine_plugin.transport.stats import OTHER_PEER

BACKLOG: Final = 128
ACCEPT_PAUSE_S: Final = 0.2  # after an accept that failed, e.g. for want of a descriptor

log = logging.getLogger(__name__)


class Listener:
    """Accepts peers on one address and runs a session for each. `keys` None: insecure."""

    def __init__(self, producer: Producer, keys: PoolKeys | None) -> None:
        self._producer = producer
        self._keys = keys
        self._channels: set[Channel] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._servings: set[Serving] = set()
        self._shaking: Counter[str] = Counter()  # connections before the end of their handshake, by host
        self._budgets: dict[str, PeerBudget] = {}

    async def start(self, listen: Address) -> Address:
        """Listen; returns the bound address. Raises OSError."""
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        sock = socket.create_server(listen, family=family, backlog=BACKLOG)
        sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept_all(sock), name="p2p-accept")
        self._accepting.add_done_callback(lambda _: sock.close())
        host, port = sock.getsockname()[:2]
        return str(host), int(port)

    async def stop(self) -> None:
        """Stop accepting and end every session."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(set(self._connections))

    def mover_changed(self, mover: Mover) -> None:
        """Our mover was replaced: every peer's mover is made known to the new one."""
        for serving in self._servings:
            serving.wire(mover)

    def keys_changed(self) -> None:
        """Whoever has proved a key that is no longer accepted has proved nothing: its connection ends."""
        assert self._keys is not None
        for channel in [one for one in self._channels if not self._keys.accepts(one.certificate)]:
            log.info("session of %s ended: its peer key is no longer accepted", channel.remote_host)
            channel.abort()

    async def _accept_all(self, listening: socket.socket) -> None:
        """Not `asyncio.start_server`: that does the TLS handshakes itself, as many as strangers like."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError as exc:
                log.warning("cannot accept a connection: %s", exc.strerror)
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            self._accept(sock, str(address[0]))

    def _accept(self, sock: socket.socket, host: str) -> None:
        if self._too_many(host):
            # strangers get no label of their own
            self._producer.stats.refused[(OTHER_PEER, "limit")] += 1
            sock.close()
            return
        self._shaking[host] += 1
        task = asyncio.create_task(self._serve(sock, host), name=f"p2p-in-{host}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        task.add_done_callback(lambda _: sock.close())  # of a task that was cancelled before it ran

    def _too_many(self, host: str) -> bool:
        limits, shaking = self._producer.limits, self._shaking
        return (
            len(self._connections) - shaking.total() >= limits.connections
            or shaking.total() >= limits.handshakes
            or shaking[host] >= limits.handshakes_per_host
        )

    async def _serve(self, sock: socket.socket, host: str) -> None:
        """One connection from first byte to last. Whatever its bytes, only this connection ends."""
        stats = self._producer.stats
        channel: Channel | None = None
        try:
            try:
                async with asyncio.timeout(self._producer.limits.handshake_s):
                    channel = await self._secure(sock)
                    peer = await self._shake_hands(channel)
            except (ChannelClosed, ConnectionError, TimeoutError):
                stats.handshakes_unfinished += 1
                raise
            finally:
                self._shaking -= Counter((host,))
            if peer is not None:
                await self._converse(channel, peer)
        except (ChannelClosed, ConnectionError):
            pass
        except ssl.SSLError as exc:
            stats.count_refusal(host, "auth")
            log.warning("connection from %s refused: auth %s", host, exc.reason)
        except FrameError as exc:
            stats.bad_frames += 1
            log.warning("connection from %s closed: %s", host, exc)
        except TimeoutError:
            log.warning("connection from %s closed: silent for too long", host)
        except Exception:
            log.exception("session of %s", host)
        finally:
            if channel is not None:
                self._channels.discard(channel)
                await channel.close()

    async def _secure(self, sock: socket.socket) -> Channel:
        limit_bytes = 2 * self._producer.limits.message_bytes
        tls = None if self._keys is None else self._keys.tls.server
        channel = await Channel.open(sock, tls, server_side=True, send_limit_bytes=limit_bytes)
        self._channels.add(channel)
        if self._keys is not None and not self._keys.accepts(channel.certificate):
            channel.abort()  # the key was taken out meanwhile
        return channel

    async def _shake_hands(self, channel: Channel) -> Hello | None:
        producer = self._producer
        theirs: Hello | None = None
        try:
            theirs = await self._expect_hello(channel)
            self._verify(channel, theirs)
        except Refusal as refusal:
            known = theirs is not None and refusal.reason in ("identity", "limit")
            peer = theirs.identity.instance if theirs is not None and known else channel.remote_host
            producer.stats.count_refusal(peer, refusal.label)
            log.warning("peer %s refused: %s %s", peer, refusal.reason, refusal.detail)
            channel.send(Refused(refusal.reason, refusal.detail))
            return None
        return theirs

    async def _expect_hello(self, channel: Channel) -> Hello:
        try:
            message = await channel.from_client(protocol.HANDSHAKE_BYTES)
        except SpeaksTls as exc:
            raise Refusal("auth", str(exc)) from exc
        if not isinstance(message, Hello):
            raise FrameError("the first frame is not a hello")
        return message

    def _verify(self, channel: Channel, theirs: Hello) -> None:
        producer = self._producer
        handshake.check_form(theirs.identity)
        channel.send(handshake.hello(producer.identity))
        handshake.check_hello(theirs)
        if theirs.role == "peer":
            handshake.check_identity(producer.identity, theirs.identity)
        elif self._keys is None:
            raise Refusal("auth", "orders are taken over TLS only")
        budget = self._budgets.get(channel.remote_host)
        if budget is not None and budget.connections >= producer.limits.connections_per_peer:
            raise Refusal("limit", "connections_per_peer")
        channel.send(Accepted())

    async def _converse(self, channel: Channel, hello: Hello) -> None:
        limits, stats = self._producer.limits, self._producer.stats
        budget = self._budget(channel.remote_host)
        budget.connections += 1
        serving = Serving(self._producer, hello.identity, budget, channel.send)
        self._servings.add(serving)
        stats.sessions_in += 1
        try:
            while True:
                async with asyncio.timeout(limits.silence_s * 2):
                    message = await channel.from_client(limits.message_bytes)
                if hello.role == "picker" and not isinstance(message, _OF_PICKERS):
                    raise FrameError(f"{type(message).__name__} of a picker")
                _dispatch(serving, channel, message)
        finally:
            stats.sessions_in -= 1
            self._servings.discard(serving)
            serving.end()
            budget.connections -= 1
            self._forget_idle()

    def _budget(self, host: str) -> PeerBudget:
        budget = self._budgets.get(host)
        if budget is None:
            limits, now_s = self._producer.limits, asyncio.get_running_loop().time()
            budget = PeerBudget(host, TokenBucket(limits.movers_per_s, limits.movers_burst, now_s))
            self._budgets[host] = budget
        return budget

    def _forget_idle(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for host in [host for host, budget in self._budgets.items() if budget.idle(now_s)]:
            del self._budgets[host]


_OF_PICKERS = (Prefetch, Cancel, Ping)


def _dispatch(serving: Serving, channel: Channel, message: ClientMessage) -> None:
    match message:
        case Lookup():
            serving.lookup(message)
        case Move():
            serving.move(message)
        case MoverInfo():
            serving.mover_info(message)
        case Prefetch():
            serving.prefetch(message)
        case Cancel(id=request_id):
            serving.cancel(request_id)
        case Release(lease_id=token):
            serving.release(token)
        case Ping():
            channel.send(Pong())
        case _:
            raise FrameError(f"{type(message).__name__} after the handshake")
