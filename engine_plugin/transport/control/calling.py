"""The client's half of a session's beginning: dial, TLS, hellos. Bounded, and every failure a `PullError`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass
from typing import Final, TypeVar

from engine_plugin import protocol
from engine_plugin.identity import Address, PeerIdentity, format_address
from engine_plugin.protocol import Accepted, FrameError, Hello, Message, Refused, Role
from engine_plugin.transport.control import handshake
from engine_plugin.transport.control.channel import Channel, ChannelClosed, SpeaksTls, dial
from engine_plugin.transport.control.handshake import Refusal
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.stats import TransportStats
from engine_plugin.transport.types import PullError, PullReason

_REFUSED: Final = {
    "auth": PullReason.REFUSED_AUTH,
    "identity": PullReason.REFUSED_IDENTITY,
    "protocol": PullReason.PROTOCOL,
    "limit": PullReason.REFUSED_LIMIT,
}

M = TypeVar("M", bound=Message)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """What of us every session to a source needs. `keys` None: insecure."""

    identity: PeerIdentity
    keys: PoolKeys | None
    limits: Limits
    stats: TransportStats
    local_host: str = ""
    role: Role = "peer"


async def reach(source: Address, caller: Caller) -> tuple[Channel, str]:
    """A channel on which `source` has accepted us, and its instance; within `connect_s` + `handshake_s`.

    Raises:
        PullError: UNREACHABLE, TIMEOUT, DISCONNECTED, REFUSED_*, PROTOCOL.
    """
    name, limits = format_address(source), caller.limits
    try:
        async with asyncio.timeout(limits.connect_s):
            sock = await dial(source, caller.local_host)
    except (OSError, TimeoutError, ValueError) as exc:
        raise PullError(PullReason.UNREACHABLE, f"{name}: {exc or type(exc).__name__}") from exc
    channel: Channel | None = None
    try:
        async with asyncio.timeout(limits.handshake_s):
            tls = None if caller.keys is None else caller.keys.tls.client
            channel = await Channel.open(
                sock, tls, server_side=False, send_limit_bytes=2 * limits.message_bytes
            )
            peer = await _shake_hands(channel, caller, name)
        if caller.keys is not None and not caller.keys.accepts(channel.certificate):
            raise PullError(PullReason.REFUSED_AUTH, f"{name}: its peer key was taken out meanwhile")
    except BaseException as exc:
        if channel is not None:
            channel.abort()
        if (error := _failed(exc, name, caller.stats)) is not None:
            raise error from exc
        raise
    return channel, peer


def _failed(exc: BaseException, name: str, stats: TransportStats) -> PullError | None:
    """What a pull is told of it; None for what is no failure of the handshake."""
    match exc:
        case TimeoutError():
            return PullError(PullReason.TIMEOUT, f"{name} did not finish the handshake")
        case ssl.SSLError():
            stats.count_refusal(name, "auth")
            log.warning("peer %s refused: auth %s", name, exc.reason)
            return PullError(PullReason.REFUSED_AUTH, f"{name} does not prove to have our peer key")
        case ChannelClosed() | OSError():
            return PullError(PullReason.DISCONNECTED, f"{name} closed during the handshake; see its log")
        case FrameError():
            stats.bad_frames += 1
            return PullError(PullReason.PROTOCOL, f"{name}: {exc}")
    return None


async def _shake_hands(channel: Channel, caller: Caller, name: str) -> str:
    """The client's half of the handshake; returns the peer's instance. Raises PullError."""
    peer = name
    try:
        channel.send(handshake.hello(caller.identity, caller.role))
        theirs = await _receive(channel, Hello)
        handshake.check_hello(theirs)
        peer = theirs.identity.instance
        if caller.role == "peer":
            handshake.check_identity(caller.identity, theirs.identity)
        await _receive(channel, Accepted)
    except Refusal as refusal:
        caller.stats.count_refusal(peer, refusal.label)
        log.warning("peer %s refused: %s %s", peer, refusal.reason, refusal.detail)
        detail = refusal.detail if refusal.reason == "identity" else f"{name}: {refusal.detail}"
        raise PullError(_REFUSED[refusal.reason], detail) from refusal
    return peer


async def _receive(channel: Channel, kind: type[M]) -> M:
    try:
        message = await channel.from_server(protocol.HANDSHAKE_BYTES)
    except SpeaksTls as exc:
        raise Refusal("auth", str(exc)) from exc
    if isinstance(message, Refused):
        raise Refusal(message.reason, message.detail)
    if not isinstance(message, kind):
        raise FrameError(f"{type(message).__name__} where {kind.__name__} was due")
    return message
