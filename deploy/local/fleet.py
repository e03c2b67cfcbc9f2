"""One fleet on one machine: starts and stops all parts, and hands out typed views of them.

It knows how parts depend on each other (a picker is ready when it sees every engine; the gateway,
when it sees the picker) and nothing of what the scenario wants.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import aiohttp

from deploy.local import commands, envoy, preflight
from deploy.local.client import GatewayClient
from deploy.local.errors import FleetError
from deploy.local.handles import EngineHandle, PickerHandle, SidecarHandle
from deploy.local.ports import CONTROL_HOST
from deploy.local.run_files import RunFiles
from deploy.local.spec import EngineSpec, FleetSpec
from deploy.local.supervisor import PartFailed, PartSpec, Supervisor
from deploy.local.waiting import until

NO_ROLES: Mapping[str, str] = MappingProxyType({})
DEFAULT_DELTA_TOKENS = 2048
_HEALTHY = "cluster.picker.membership_healthy: 1"


class Fleet:
    """A running fleet. Made by `running_fleet`."""

    def __init__(
        self, spec: FleetSpec, files: RunFiles, supervisor: Supervisor, session: aiohttp.ClientSession
    ) -> None:
        self.spec = spec
        self.files = files
        self._supervisor = supervisor
        self._session = session
        self._strangers: dict[str, EngineSpec] = {}
        self._roles = NO_ROLES
        control = spec.addresses.control
        self.gateway_url = f"http://{CONTROL_HOST}:{control.gateway_port}"
        self.gateway = self._client(self.gateway_url)
        self.lab = self._client(f"http://{CONTROL_HOST}:{control.lab_port}")
        picker_url = f"http://{CONTROL_HOST}:{control.metrics_port}"
        self.picker = PickerHandle(picker_url, files.debug_token, session)
        self._envoy_admin = f"http://{CONTROL_HOST}:{control.admin_port}"

    # --- views ------------------------------------------------------------------------------------
    @property
    def pids(self) -> dict[str, int]:
        return self._supervisor.pids

    @property
    def debug_token_file(self) -> Path:
        return self.files.debug_token_file

    @property
    def routing_key_file(self) -> Path:
        return self.files.routing_key_file

    def engine_spec(self, pod: str) -> EngineSpec:
        return self._strangers.get(pod) or self.spec.engine(pod)

    def engine(self, pod: str) -> EngineHandle:
        return EngineHandle(self.engine_spec(pod).address, self._session)

    def sidecar(self, pod: str) -> SidecarHandle:
        return SidecarHandle(self.engine_spec(pod).address, self._session)

    def engines(self) -> tuple[EngineHandle, ...]:
        return tuple(self.engine(pod) for pod in self.spec.pods)

    def engine_client(self, pod: str) -> GatewayClient:
        """A client of one engine, past gateway and sidecar."""
        return self._client(self.engine(pod).url)

    def _client(self, url: str) -> GatewayClient:
        timeout_s = self.spec.request_timeout_s
        return GatewayClient(url, self._session, model=self.spec.model, timeout_s=timeout_s)

    async def failure(self) -> PartFailed:
        """Wait until a part ends by itself."""
        return await self._supervisor.failure()

    # --- whole fleet ------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start every part at once and wait until a request could be served and matched.

        Raises:
            FleetError: a part failed, or the parts do not see each other in time.
        """
        self._write_endpoints(self.spec.engines())
        self.files.write_thresholds(enabled=True, min_cached_token_delta=DEFAULT_DELTA_TOKENS)
        self.files.write_bootstrap(envoy.bootstrap(self.spec.addresses.control))
        engines = [part for engine in self.spec.engines() for part in self._pod_parts(engine)]
        picker = commands.picker_part(self.spec, self.spec.picker_config, self.files)
        await self._start_all([*engines, picker, self._envoy_part()])
        await self.wait_live([e.pod for e in self.spec.engines() if e.publishes_events])
        await self._wait_gateway()

    async def _start_all(self, parts: Sequence[PartSpec]) -> None:
        """In parallel; the first failure is raised after the others have been cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for part in parts:
                    group.create_task(self._supervisor.start(part))
        except* FleetError as failures:
            raise failures.exceptions[0] from None

    # --- pods -------------------------------------------------------------------------------------
    async def kill_engine(self, pod: str) -> None:
        """SIGKILL an engine with its mover; the sidecar stays, as a container beside it would."""
        await self._supervisor.kill(pod)

    async def start_engine(self, pod: str) -> None:
        engine = self.engine_spec(pod)
        await self._supervisor.start(self.engine_part(engine))

    async def start_stranger(self, pod: str, *, hash_seed: str, tier_tokens: int) -> None:
        """Start one more pod, with another hash seed; nobody knows of it before `list_strangers`."""
        number = len(self.spec.pods) + len(self._strangers) + 1
        engine = replace(
            self.spec.engine(self.spec.pods[0]),
            address=self.spec.addresses.engine(number, pod),
            hash_seed=hash_seed,
            device_tier_tokens=tier_tokens,
            cpu_tier_tokens=tier_tokens,
        )
        self._strangers[pod] = engine
        await self._start_all(self._pod_parts(engine))

    def list_strangers(self) -> None:
        """Put them into the endpoint file; the running parts take them up."""
        self._write_endpoints([*self.spec.engines(), *self._strangers.values()])

    def engine_part(self, engine: EngineSpec) -> PartSpec:
        """How one engine is started; another kind of fleet has other engines."""
        return commands.engine_part(self.spec, engine, self.files)

    def _pod_parts(self, engine: EngineSpec) -> list[PartSpec]:
        return [
            self.engine_part(engine),
            commands.sidecar_part(self.spec, engine, self.files),
        ]

    def _write_endpoints(self, engines: Sequence[EngineSpec]) -> None:
        self.files.write_endpoints(engines, self._roles)

    # --- picker and gateway -----------------------------------------------------------------------
    async def stop_picker(self) -> None:
        await self._supervisor.stop(commands.PICKER)

    async def start_picker(self, config: Path, roles: Mapping[str, str] = NO_ROLES) -> None:
        """Start the picker and wait until the gateway sends to it; its index may still be empty."""
        self._roles = roles
        self._write_endpoints(self.spec.engines())
        await self._supervisor.start(commands.picker_part(self.spec, config, self.files))
        await self._wait_gateway()

    async def set_thresholds(self, *, enabled: bool, min_cached_token_delta: int) -> None:
        """Write the thresholds file and wait until the picker applies it."""
        self.files.write_thresholds(enabled=enabled, min_cached_token_delta=min_cached_token_delta)
        await until(
            f"the picker applies thresholds enabled={enabled}, minCachedTokenDelta={min_cached_token_delta}",
            self.picker.thresholds,
            lambda seen: (seen["enabled"], seen["minCachedTokenDelta"]) == (enabled, min_cached_token_delta),
        )

    async def wait_live(self, pods: Sequence[str]) -> None:
        """Until the picker knows the cache state and the load of every one of `pods`."""
        await until(
            f"the picker knows cache state and load of {', '.join(pods)}",
            self.picker.endpoints,
            lambda rows: all(pod in rows and rows[pod].known for pod in pods),
        )

    def _envoy_part(self) -> PartSpec:
        command = envoy.EnvoyCommand(envoy.find_binary(), self.files.bootstrap_file)
        return PartSpec(commands.ENVOY, command.argv(), probe=self._envoy_answers)

    async def _envoy_answers(self) -> bool:
        return await self._admin("/ready") is not None

    async def _wait_gateway(self) -> None:
        await until(
            "the gateway sees a healthy picker",
            lambda: self._admin("/stats?filter=membership_healthy"),
            lambda stats: stats is not None and _HEALTHY in stats,
        )

    async def _admin(self, path: str) -> str | None:
        """Text of an admin page, or None while Envoy does not serve."""
        return await self.page(f"{self._envoy_admin}{path}")

    async def page(self, url: str) -> str | None:
        """Text of a page, or None while nobody serves it."""
        try:
            async with self._session.get(url) as answer:
                return await answer.text() if answer.status == 200 else None
        except aiohttp.ClientError:
            return None


@contextlib.asynccontextmanager
async def running_fleet(
    spec: FleetSpec, progress: Callable[[str], None], kind: type[Fleet] = Fleet
) -> AsyncIterator[Fleet]:
    """Start a fleet of that `kind`, yield it, and end every part of it however the block ends.

    Raises:
        FleetError: something is missing, or a part does not start. One sentence a line.
    """
    obstacles = preflight.check_all(spec.listeners(), spec.memory())
    if obstacles:
        raise FleetError("\n".join(obstacles))
    files = RunFiles(spec.run_dir)
    supervisor = Supervisor(spec.log_dir)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as session:
            fleet = kind(spec, files, supervisor, session)
            progress(f"starting {len(spec.pods)} engines with sidecars, the picker and Envoy")
            await fleet.start()
            yield fleet
            progress("stopping")
    finally:
        await supervisor.stop_all()
        files.remove()
