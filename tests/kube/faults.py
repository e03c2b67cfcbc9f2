"""What goes wrong on request: failures of matching requests, and requests that are held."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from tests.kube.notice import Notice
from tests.kube.status import ApiFault


@dataclass
class Rule:
    """One fault, for requests of a verb and a plural ("*": any), for so many of them."""

    verb: str
    plural: str
    fault: ApiFault | ConnectionResetError | None = None
    left: int | None = None  # None: until `stop`
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    hits: int = 0
    notice: Notice = field(default_factory=Notice)

    def matches(self, verb: str, plural: str) -> bool:
        return self.left != 0 and self.verb in ("*", verb) and self.plural in ("*", plural)

    def stop(self) -> None:
        """No more faults; what is held goes on."""
        self.left = 0
        self.opened.set()

    async def reached(self, hits: int = 1) -> None:
        """Until so many requests have met the fault."""
        await self.notice.until(lambda: self.hits >= hits)


class Faults:
    """The faults in force."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def fail(
        self,
        code: int,
        *,
        verb: str = "*",
        plural: str = "*",
        times: int | None = None,
        retry_after: int = 0,
        reason: str = "InternalError",
        message: str = "asked to fail",
    ) -> Rule:
        """Matching requests get this status."""
        rule = Rule(verb, plural, ApiFault(code, reason, message, retry_after=retry_after), times)
        self._rules.append(rule)
        return rule

    def hold(self, *, verb: str = "*", plural: str = "*", times: int | None = None) -> Rule:
        """Matching requests get no answer until `stop`."""
        rule = Rule(verb, plural, None, times)
        self._rules.append(rule)
        return rule

    def drop(self, *, verb: str = "*", plural: str = "*", times: int | None = None) -> Rule:
        """Matching requests lose their connection in the middle of the answer."""
        rule = Rule(verb, plural, ConnectionResetError(), times)
        self._rules.append(rule)
        return rule

    async def meet(self, verb: str, plural: str) -> None:
        """Raises ApiFault or ConnectionResetError, waits, or neither."""
        for rule in self._rules:
            if rule.matches(verb, plural):
                rule.hits += 1
                rule.left = None if rule.left is None else rule.left - 1
                rule.notice.tell()
                if rule.fault is not None:
                    raise rule.fault
                await rule.opened.wait()

    def stop_all(self) -> None:
        for rule in self._rules:
            rule.stop()
