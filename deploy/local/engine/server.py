"""An engine's life: start, serve, shut down, on one screen.

Order of shutdown: refuse new requests, let running ones end within the drain time, abandon the
rest, then stop loop, transport (and with it the mover), sockets, memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web

from deploy.local.engine.api import MAX_BODY_BYTES, OpenAiApi, error_shapes
from deploy.local.engine.assembly import Assembly, assemble
from deploy.local.engine.config import EngineConfig
from deploy.local.engine.core import Engine
from deploy.local.engine.debugging import DebugPages
from deploy.local.engine.metrics import CONTENT_TYPE, EngineMetrics
from engine_plugin.transport.peer_keys import follow

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Running:
    """A serving engine: its real ports, and its inside for tests."""

    port: int
    p2p_port: int
    events_port: int
    replay_port: int
    reports_port: int
    assembly: Assembly
    engine: Engine
    failed: asyncio.Future[None]  # done with the exception if the loop or the replay server breaks

    def ready_line(self) -> dict[str, object]:
        names = ("port", "p2p_port", "events_port", "replay_port", "reports_port")
        ports = {name: getattr(self, name) for name in names}
        return {"ready": True, "instance": self.assembly.identity.instance, **ports}


@contextlib.asynccontextmanager
async def serving(config: EngineConfig) -> AsyncIterator[Running]:
    """Everything up inside the block, everything gone after it."""
    async with contextlib.AsyncExitStack() as stack:
        assembly = assemble(config)
        stack.callback(assembly.tier.close)
        stack.callback(assembly.parts.memory.close)
        stack.callback(assembly.publisher.close)
        events_port = replay_port = 0
        if config.publishes_events:
            events_port, replay_port = assembly.publisher.bind(
                config.host, config.events_port, config.replay_port
            )
        stack.callback(assembly.reports.close)
        reports_port = assembly.reports.bind(config.host, config.reports_port)
        await assembly.transport.start()
        stack.push_async_callback(assembly.transport.stop)
        engine = assembly.engine()
        stack.push_async_callback(engine.close)
        stack.push_async_callback(assembly.transport.stop)  # first: it ends the pulls that `close` waits for
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await stack.enter_async_context(_background(engine, assembly, failed))
        metrics = _metrics(assembly, engine, events_port, replay_port, reports_port)
        api = OpenAiApi(
            engine,
            assembly.reader,
            model=config.served_name,
            old_transfer_keys=config.old_transfer_keys,
        )
        runner = _runner(assembly, engine, api, metrics)
        await runner.setup()
        stack.push_async_callback(_drain, engine, api, runner, config.drain_s)
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        port = int(runner.addresses[0][1])
        running = Running(
            port,
            assembly.transport.address[1],
            events_port,
            replay_port,
            reports_port,
            assembly,
            engine,
            failed,
        )
        log.info("%s serves %s on %s:%d", config.name, config.served_name, config.host, port)
        yield running


def _runner(assembly: Assembly, engine: Engine, api: OpenAiApi, metrics: EngineMetrics) -> web.AppRunner:
    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.page(), headers={"content-type": CONTENT_TYPE})

    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[error_shapes])
    app.add_routes(api.routes())
    app.add_routes(
        DebugPages(engine.requests, assembly.publisher, assembly.faults, assembly.parts.puller.paces).routes()
    )
    app.add_routes([web.get("/metrics", page)])
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)


def _metrics(
    assembly: Assembly, engine: Engine, events_port: int, replay_port: int, reports_port: int
) -> EngineMetrics:
    info = assembly.identity.info_labels(
        p2p_addr=assembly.transport.address,
        events_port=events_port,
        replay_port=replay_port,
        reports_port=reports_port,
    )
    return EngineMetrics(engine, lambda: assembly.transport.stats, assembly.config, info)


@contextlib.asynccontextmanager
async def _background(
    engine: Engine, assembly: Assembly, failed: asyncio.Future[None]
) -> AsyncIterator[None]:
    """The engine's loop, the replay server and the look at the key file as tasks; the first failure is told
    through `failed`."""
    config = assembly.config
    tasks = [asyncio.create_task(engine.run())]
    if config.peer_key_file is not None:
        following = follow(config.peer_key_file, config.peer_keys, assembly.transport)
        tasks.append(asyncio.create_task(following))
    if config.publishes_events:
        tasks.append(asyncio.create_task(assembly.publisher.run()))

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            log.critical("the engine has failed", exc_info=error)
            failed.set_exception(error)

    for task in tasks:
        task.add_done_callback(ended)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed.done():
            failed.exception()  # seen


async def _drain(engine: Engine, api: OpenAiApi, runner: web.AppRunner, drain_s: float) -> None:
    api.draining = True
    if not await engine.drain(drain_s):
        log.warning("shutting down with %d requests unfinished", len(engine.parts.scheduler.requests()))
    for request in engine.parts.scheduler.requests():
        engine.abandon(request)
    await runner.cleanup()
