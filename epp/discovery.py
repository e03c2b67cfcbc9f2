"""Where the picker's endpoints and thresholds come from: files, or a Kubernetes API server.

    endpoints   --endpoints-file, else file-discovery of the configuration, else --endpoint-selector with
                its ports, else --pool-name
    thresholds  --thresholds-configmap / --thresholds-selector where they have a document, else
                --thresholds-dir

Part of the composition root: it joins sources that do not know each other, and owns the one connection to
the API server, which exists only if something is read from there.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine_plugin.identity import EndpointId
from epp.config import EppConfig
from epp.core.errors import ConfigError
from epp.core.thresholds import PullThresholds
from epp.endpoints.file_source import FileSource
from epp.endpoints.pool_source import PoolSource
from epp.objectives.watch import ObjectiveWatch
from epp.thresholds.choice import ThresholdChoice
from epp.thresholds.config_maps import ConfigMapThresholds
from epp.thresholds.directory_source import DirectoryThresholds
from epp.thresholds.refusal_events import RefusalEvents
from sidecar.endpoint_file import EndpointRow
from sidecar.pool_watch.access import Environment, KubeAccess
from sidecar.pool_watch.errors import AccessError
from sidecar.pool_watch.resources import CONFIG_MAPS, Selection
from sidecar.pool_watch.status import WatchStatus
from sidecar.pool_watch.views import InvalidPool, pool_spec

log = logging.getLogger(__name__)


class EndpointSource(Protocol):
    """A component that tells of endpoints."""

    @property
    def loaded(self) -> asyncio.Event:
        """Set by the first whole reading that has been told."""

    async def run(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EndpointCallbacks:
    """Who is told of endpoints; `upsert` with whether it is draining."""

    upsert: Callable[[EndpointRow, bool], None]
    remove: Callable[[EndpointId], None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The sources in use. Component: `open`, `run` until cancelled, `close`."""

    endpoints: EndpointSource
    thresholds: ThresholdChoice
    access: KubeAccess | None = None
    pool: PoolSource | None = None
    config_maps: ConfigMapThresholds | None = None
    events: RefusalEvents | None = None
    objectives: ObjectiveWatch | None = None

    @property
    def watches(self) -> tuple[WatchStatus, ...]:
        """Every watch at the API server."""
        parts = (self.pool, self.config_maps, self.objectives)
        return tuple(status for part in parts if part for status in part.statuses)

    def ready(self) -> bool:
        """Endpoints have been told, and the thresholds are those of now or known to be out of reach."""
        return self.endpoints.loaded.is_set() and self.thresholds.settled

    async def wait_ready(self) -> None:
        await self.endpoints.loaded.wait()
        await self.thresholds.wait_settled()

    async def open(self) -> None:
        """Raises ConfigError: there is no API server to be reached from here."""
        if self.access is not None:
            try:
                await self.access.open()
            except AccessError as error:
                raise ConfigError(str(error)) from error
        await self.thresholds.refresh()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.endpoints.run())
            group.create_task(self.thresholds.run())
            for part in (self.events, self.objectives):
                if part is not None:
                    group.create_task(part.run())

    async def close(self) -> None:
        if self.access is not None:
            await self.access.close()


def build_inputs(
    arguments: argparse.Namespace,
    config: EppConfig,
    callbacks: EndpointCallbacks,
    on_thresholds: Callable[[PullThresholds], None],
    environment: Environment | None = None,
) -> Inputs:
    """Raises ConfigError: no source of endpoints, or one that cannot be meant."""
    path = arguments.endpoints_file or config.discovery_path
    in_cluster = bool(arguments.endpoint_selector or arguments.pool_name)
    if path is None and not in_cluster:
        raise ConfigError(
            "no endpoints: give --pool-name, --endpoint-selector, --endpoints-file, or file-discovery in "
            "dataLayer.discovery"
        )
    access = None
    if path is None or arguments.thresholds_configmap or arguments.thresholds_selector:
        access = KubeAccess(environment or Environment.of_process())
    choice = ThresholdChoice(on_thresholds)
    config_maps, events = _config_maps(arguments, access, choice) if access else (None, None)
    directory = None
    if arguments.thresholds_dir is not None:
        directory = DirectoryThresholds(arguments.thresholds_dir, choice.from_directory)
    choice.connect(directory, config_maps)
    if path is None and access is not None:
        pool = _pool_source(arguments, access, callbacks)
        return Inputs(pool, choice, access, pool, config_maps, events, _objectives(arguments, access))
    if in_cluster:
        log.warning("endpoints come from %s: the pool and the selector are not watched", path)
    file = FileSource(
        Path(str(path)), on_upsert=lambda row: callbacks.upsert(row, False), on_remove=callbacks.remove
    )
    return Inputs(file, choice, access, None, config_maps, events)


def _pool_source(
    arguments: argparse.Namespace, access: KubeAccess, callbacks: EndpointCallbacks
) -> PoolSource:
    spec = None
    if arguments.endpoint_selector:
        found = pool_spec(arguments.endpoint_selector, arguments.endpoint_target_ports or [])
        if isinstance(found, InvalidPool):
            reason = found.reason.replace("spec.targetPorts", "--endpoint-target-ports")
            raise ConfigError(f"--endpoint-selector: {reason}")
        spec = found
    return PoolSource(
        access,
        namespace=arguments.pool_namespace or access.namespace,
        on_upsert=callbacks.upsert,
        on_remove=callbacks.remove,
        name=arguments.pool_name or "",
        spec=spec,
        group=arguments.pool_group,
    )


def _objectives(arguments: argparse.Namespace, access: KubeAccess) -> ObjectiveWatch | None:
    """They name their pool, so there are none for a bare selector."""
    if not arguments.pool_name or not arguments.objectives_group:
        return None
    namespace = arguments.pool_namespace or access.namespace
    return ObjectiveWatch(access, namespace, arguments.pool_name, group=arguments.objectives_group)


def _config_maps(
    arguments: argparse.Namespace, access: KubeAccess, choice: ThresholdChoice
) -> tuple[ConfigMapThresholds | None, RefusalEvents | None]:
    namespace = arguments.pool_namespace or access.namespace
    wanted = [Selection.named(CONFIG_MAPS, namespace, name) for name in arguments.thresholds_configmap]
    if arguments.thresholds_selector:
        terms = ",".join(f"{name}={value}" for name, value in sorted(arguments.thresholds_selector.items()))
        wanted.append(Selection(CONFIG_MAPS, namespace, labels=terms))
    if not wanted:
        return None, None
    events = RefusalEvents(access, namespace)
    return ConfigMapThresholds(access, wanted, choice.from_watch, on_refused=events.tell), events
