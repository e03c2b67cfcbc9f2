"""Unrelated load on one endpoint, steered there with the lab listener's subset hint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from deploy.local.client import COMPLETIONS
from deploy.local.envoy import LAB_SUBSET_HEADER
from deploy.local.errors import FleetError
from deploy.local.fleet import Fleet
from deploy.local.handles import EndpointView
from deploy.local.waiting import until

_PROMPT = "Write down every number that you see, one after another, and do not stop."
_SHORT_TOKENS = 1024
_SETTLE_S = 60.0


class Load:
    """Requests under way on one endpoint. Their answers are nobody's business."""

    def __init__(self, pod: str, tasks: list[asyncio.Task[None]]) -> None:
        self.pod = pod
        self._tasks = tasks

    def broken(self) -> str | None:
        """Why a request has ended, or None while all are under way."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                return str(task.exception() or "answered")
        return None

    async def end(self) -> None:
        """Disconnect all; how each ended does not matter."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def busy(
    fleet: Fleet,
    pod: str,
    *,
    waiting: int,
    answer_tokens: int = _SHORT_TOKENS,
    more: Mapping[str, Any] | None = None,
) -> AsyncIterator[Load]:
    """Keep `pod` busy: a full batch and `waiting` requests behind it, until the block ends.

    `answer_tokens` decides how many device blocks a running request reserves; `more` goes into each
    request. Entered when the
    picker knows of the queue; left when the engine and the picker know that it is gone.
    """
    load = _send(fleet, pod, fleet.spec.max_num_seqs + waiting, {"max_tokens": answer_tokens, **(more or {})})
    try:
        await until(
            f"the picker sees {waiting} requests waiting on {pod}",
            lambda: _loaded_view(fleet, load),
            lambda view: view.waiting == waiting,
            timeout_s=_SETTLE_S,
        )
        yield load
    finally:
        await load.end()
    await until(
        f"the picker sees {pod} idle",
        lambda: _view(fleet, pod),
        lambda view: not view.waiting and view.inflight == 0,  # unknown when the pod has died
        timeout_s=_SETTLE_S,
    )


def _send(fleet: Fleet, pod: str, requests: int, more: Mapping[str, Any]) -> Load:
    headers = {LAB_SUBSET_HEADER: fleet.engine_spec(pod).address.serving}
    body = {"prompt": _PROMPT, **more}
    return Load(
        pod,
        [
            asyncio.create_task(
                fleet.lab.hold_open(COMPLETIONS, body, request_id=f"load-{pod}-{n}", headers=headers)
            )
            for n in range(requests)
        ],
    )


async def _view(fleet: Fleet, pod: str) -> EndpointView:
    return (await fleet.picker.endpoints())[pod]


async def _loaded_view(fleet: Fleet, load: Load) -> EndpointView:
    """As `_view`, while every request of the load is under way."""
    why = load.broken()
    if why is not None:
        raise FleetError(f"Load on {load.pod} ended early: {why}")
    return await _view(fleet, load.pod)
