"""Sessions to sources: one each, shared by concurrent pulls, dialled on demand, with back-off.

A source that failed, at the dial or in the middle of a pull (silent, or gone), is left alone for a moment;
pulls from it fail at once meanwhile, with the same reason. The moment doubles with every failure in a row.
Only failure is remembered: it is never taken for "not there".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from engine_plugin.identity import Address
from engine_plugin.transport.control.outbound import OutboundSession
from engine_plugin.transport.control.pool_tls import PoolKeys
from engine_plugin.transport.limits import Limits
from engine_plugin.transport.types import PullError, PullReason

_PEERS_FAULT: Final = (PullReason.TIMEOUT, PullReason.DISCONNECTED, PullReason.UNREACHABLE)
MAX_FAILURES: Final = 1024  # sources whose failure is remembered

Connect = Callable[[Address], Coroutine[Any, Any, OutboundSession]]


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: PullReason
    detail: str
    delay_s: float
    until_s: float


class Dialer:
    """Hands out sessions. `on_session` is called with each new one."""

    def __init__(
        self, connect: Connect, limits: Limits, on_session: Callable[[OutboundSession], None]
    ) -> None:
        self._connect = connect
        self._limits = limits
        self._on_session = on_session
        self._sessions: dict[Address, OutboundSession] = {}
        self._dials: dict[Address, asyncio.Task[OutboundSession]] = {}
        self._failures: dict[Address, _Failure] = {}
        self._stopped = False

    @property
    def sessions(self) -> tuple[OutboundSession, ...]:
        """The live sessions."""
        return tuple(self._sessions.values())

    async def session(self, source: Address) -> OutboundSession:
        """The session to `source`, dialling if needed; cancelling does not disturb other callers.

        Raises:
            PullError: the dial failed, now or a moment ago.
        """
        dial = self._dials.get(source)
        if dial is None:
            self._check_failure(source)
            session = self._sessions.get(source)
            if session is not None and not session.closed.done():
                return session
            dial = asyncio.create_task(self._dial(source), name="p2p-dial")
            self._dials[source] = dial
            dial.add_done_callback(lambda task: self._dialled(source, task))
        try:
            return await asyncio.shield(dial)
        except asyncio.CancelledError:
            if dial.cancelled():
                raise PullError(PullReason.DISCONNECTED, "the transport stops") from None
            raise

    async def stop(self) -> None:
        """End every session and dial."""
        self._stopped = True
        dials = set(self._dials.values())
        for dial in dials:
            dial.cancel()
        if dials:
            await asyncio.wait(dials)
        for session in self.sessions:
            await session.close()

    async def _dial(self, source: Address) -> OutboundSession:
        session = await self._connect(source)
        self._sessions[source] = session
        session.closed.add_done_callback(lambda _: self._forget(source, session))
        self._on_session(session)
        return session

    def _dialled(self, source: Address, task: asyncio.Task[OutboundSession]) -> None:
        self._dials.pop(source, None)
        if not task.cancelled() and isinstance(error := task.exception(), PullError):
            self._remember(source, error)

    def failed(self, source: Address, error: PullError) -> None:
        """A pull from `source` ended so. Only what the peer is to blame for counts, and a failure that
        merely repeats a remembered one does not count again."""
        remembered = self._failures.get(source)
        if error.reason in _PEERS_FAULT and (remembered is None or self._over(remembered)):
            self._remember(source, error)

    def worked(self, source: Address) -> None:
        """A pull from `source` brought blocks."""
        self._failures.pop(source, None)

    def keys_changed(self, keys: PoolKeys) -> None:
        """Sessions to sources whose key is no longer accepted end; who was refused may be asked again."""
        for session in self.sessions:
            if not keys.accepts(session.certificate):
                session.abort()
        for source, failure in list(self._failures.items()):
            if failure.reason is PullReason.REFUSED_AUTH:
                del self._failures[source]

    def _remember(self, source: Address, error: PullError) -> None:
        before = self._failures.pop(source, None)
        delay_s = (
            self._limits.redial_s if before is None else min(2 * before.delay_s, self._limits.redial_max_s)
        )
        until_s = asyncio.get_running_loop().time() + delay_s
        self._failures[source] = _Failure(error.reason, error.detail, delay_s, until_s)
        if len(self._failures) > MAX_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _check_failure(self, source: Address) -> None:
        if self._stopped:
            raise PullError(PullReason.DISCONNECTED, "the transport stops")
        failure = self._failures.get(source)
        if failure is not None and not self._over(failure):
            raise PullError(failure.reason, failure.detail)

    @staticmethod
    def _over(failure: _Failure) -> bool:
        return asyncio.get_running_loop().time() >= failure.until_s

    def _forget(self, source: Address, session: OutboundSession) -> None:
        if self._sessions.get(source) is session:
            del self._sessions[source]
