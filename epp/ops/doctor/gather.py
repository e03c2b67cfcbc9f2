"""Asks pickers, engines and sidecars what they are and how they are: reads only, sends no prompt."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from epp.ops.asking import STRANGE
from epp.ops.doctor.calls import Caller, Reply
from epp.ops.doctor.facts import EngineFacts, Listed, PickerFacts, ShmFacts
from epp.ops.doctor.pages import DECISIONS, SIDECAR_PULLS, Page, drops_of, info_of, listed, messages_of

_TIER_FILE: Final = re.compile(r"vllm_offload_.*\.mmap")
_UNAUTHORISED: Final = 401
_NOT_FOUND: Final = 404
_LOOKS: Final = 20  # while the pickers settle


@dataclass(frozen=True, slots=True)
class Asking:
    """How and where to ask."""

    urls: Sequence[str]
    token: str
    sidecar_metrics_port: int | None = None
    model: str | None = None
    sidecar_metrics_scheme: str = "http"  # https: not verified, since pods are asked by address

    @property
    def authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


async def gather_pickers(caller: Caller, asking: Asking) -> tuple[PickerFacts, ...]:
    return tuple(await asyncio.gather(*(_picker(caller, asking, url) for url in asking.urls)))


async def gather_settled(
    caller: Caller,
    asking: Asking,
    first: tuple[PickerFacts, ...],
    engines: Mapping[str, EngineFacts],
    settle_s: float,
) -> tuple[PickerFacts, ...]:
    """What the pickers say once they have heard of every engine that can be heard of, or after `settle_s`.

    A fleet that has just been installed is looked at first: "not yet" must not be taken for "never".
    """
    pickers, deadline_s = first, time.monotonic() + settle_s
    while any(_not_heard_of(row, engines) for picker in pickers for row in picker.endpoints):
        if time.monotonic() >= deadline_s:
            break
        await asyncio.sleep(settle_s / _LOOKS)
        pickers = await gather_pickers(caller, asking)
    return pickers


def _not_heard_of(row: Listed, engines: Mapping[str, EngineFacts]) -> bool:
    engine = engines.get(row.name)
    if engine is None or engine.fault is not None:
        return False  # waiting would not help
    mute = row.state == "unsupported" or engine.info.get("events_port") == "0"
    return row.metrics_age_s is None or not (row.has_claim or mute)


async def _picker(caller: Caller, asking: Asking, url: str) -> PickerFacts:
    pages = ("/debug/kvpull/endpoints", "/debug/kvpull/thresholds")
    rows, thresholds = await asyncio.gather(*(caller.get(url + page, asking.authorization) for page in pages))
    metrics = await caller.get(f"{url}/metrics")
    for reply in (rows, thresholds):
        if not reply.good:
            return PickerFacts(url, fault=_picker_fault(reply))
    page = Page(metrics.text if metrics.good else "")
    try:
        endpoints = tuple(listed(rows.json()))
        in_force = dict(thresholds.json())
    except STRANGE:
        return PickerFacts(url, fault="its answer is not a picker's")
    return PickerFacts(
        url,
        endpoints=endpoints,
        thresholds=in_force,
        pull_decisions=page.by(DECISIONS, "reason").get("pull"),
        messages=messages_of(page),
        clock_offset_s=rows.clock_offset_s,
    )


def _picker_fault(reply: Reply) -> str:
    if reply.status == _UNAUTHORISED:
        return "401: the token is wrong, or the picker runs without --debug-token-file"
    if reply.status == _NOT_FOUND:
        return "404: no picker of this release answers there"
    return reply.why


async def gather_engines(
    caller: Caller, asking: Asking, endpoints: Sequence[Listed]
) -> dict[str, EngineFacts]:
    found = await asyncio.gather(*(_engine(caller, asking, row) for row in endpoints))
    return {row.name: facts for row, facts in zip(endpoints, found, strict=True)}


async def _engine(caller: Caller, asking: Asking, row: Listed) -> EngineFacts:
    base = f"http://{row.address}"
    reply, models, closed = await asyncio.gather(
        caller.get(f"{base}/metrics"), caller.get(f"{base}/v1/models"), _closed_ports(caller, row)
    )
    page, sidecar = Page(reply.text if reply.good else ""), await sidecar_page(caller, asking, row)
    info = info_of(page, row.name.rpartition("/")[2])
    return EngineFacts(
        fault=None if reply.good else reply.why,
        info_labels=None if info is None else tuple(info),
        info=info or {},
        metric_names=page.names,
        closed=closed,
        model=asking.model or _model(models),
        clock_offset_s=reply.clock_offset_s,
        sidecar_offset_s=None if sidecar is None else sidecar[1].clock_offset_s,
        sidecar_drops={} if sidecar is None else drops_of(sidecar[0]),
        sidecar_pulls=None if sidecar is None else sidecar[0].total(SIDECAR_PULLS) or 0.0,
    )


def _model(reply: Reply) -> str | None:
    """The first one served: the base model under its first name."""
    try:
        return str(reply.json()["data"][0]["id"]) if reply.good else None
    except STRANGE:
        return None


async def sidecar_page(caller: Caller, asking: Asking, row: Listed) -> tuple[Page, Reply] | None:
    """None: its metrics port is not known, or does not answer."""
    if asking.sidecar_metrics_port is None:
        return None
    host = f"[{row.host}]" if ":" in row.host else row.host
    url = f"{asking.sidecar_metrics_scheme}://{host}:{asking.sidecar_metrics_port}/metrics"
    reply = await caller.get(url, verify=False)
    return (Page(reply.text), reply) if reply.good else None


async def _closed_ports(caller: Caller, row: Listed) -> dict[str, str]:
    """Connections to the ports that picker and sidecars use: only what failed."""
    wanted: dict[str, int] = {}
    host, _, port = row.p2p_address.rpartition(":")
    if port.isdigit():
        wanted["p2p"] = int(port)
    for name, number in (("events", row.events_port), ("replay", row.replay_port)):
        if number:
            wanted[name] = number
    hosts = {"p2p": host.strip("[]")}
    faults = await asyncio.gather(*(caller.knock(hosts.get(n, row.host), p) for n, p in wanted.items()))
    return {name: fault for name, fault in zip(wanted, faults, strict=True) if fault is not None}


def gather_shm(path: Path = Path("/dev/shm"), proc: Path = Path("/proc")) -> ShmFacts | None:
    """Room, and tier files that no process (that we may look at) has mapped."""
    try:
        space, names = os.statvfs(path), [entry.name for entry in path.iterdir()]
    except OSError:
        return None
    left = {name for name in names if _TIER_FILE.fullmatch(name)}
    if left:
        left -= _mapped(left, proc)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return ShmFacts(str(path), size, free, tuple(sorted(left)))


def _mapped(names: set[str], proc: Path) -> set[str]:
    """A process that we may not look at may have any of them: then nothing is called left over."""
    mapped: set[str] = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "maps").read_text()
        except PermissionError:
            return names
        except OSError:
            continue
        mapped |= {name for name in names if name in text}
    return mapped
