"""Reads and writes Leases at the API server; every request is bounded. Decides nothing."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

from epp.leases.record import LeaseName, LeaseRecord, read_lease
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.errors import ApiFailure, Malformed, Unreachable
from sidecar.pool_watch.resources import LEASES, Call

REQUEST_S: Final = 5.0
_NOT_FOUND: Final = 404
_CONFLICT: Final = 409


class LeaseStore:
    """One API server. Every method raises KubeError, and nothing else."""

    def __init__(self, access: KubeAccess) -> None:
        self._access = access

    async def get(self, lease: LeaseName) -> LeaseRecord | None:
        """None: there is none."""
        try:
            return await self._send("get", lease)
        except ApiFailure as error:
            if error.code == _NOT_FOUND:
                return None
            raise

    async def put(self, lease: LeaseName, record: LeaseRecord) -> LeaseRecord | None:
        """Create it, or update it where `record.revision` names what was read.

        Returns what is stored now; None where somebody else was faster.
        """
        verb = "update" if record.revision else "create"
        try:
            return await self._send(verb, lease, lease.body(record))
        except ApiFailure as error:
            if error.code in (_CONFLICT, _NOT_FOUND):
                return None
            raise

    async def delete(self, lease: LeaseName) -> None:
        """Also right where there is none."""
        try:
            await self._read(Call("delete", LEASES, lease.namespace, lease.name))
        except ApiFailure as error:
            if error.code != _NOT_FOUND:
                raise

    async def _send(self, verb: str, lease: LeaseName, body: dict[str, Any] | None = None) -> LeaseRecord:
        name = "" if verb == "create" else lease.name
        raw = await self._read(Call(verb, LEASES, lease.namespace, name, body=body))
        try:
            return read_lease(raw)
        except msgspec.DecodeError as error:
            raise Malformed(f"{verb} {LEASES.qualified}: the answer is not a Lease") from error

    async def _read(self, call: Call) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_S):
                return await self._access.read(call)
        except TimeoutError as error:
            raise Unreachable(f"{call.verb} {LEASES.qualified}: no answer in {REQUEST_S:.0f} s") from error
