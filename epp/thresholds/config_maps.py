"""PullThresholds from ConfigMaps, watched through the Kubernetes API: effect in a second or so.

The other input is a mounted directory; both end in `in_force`. Which ConfigMaps: those with given names
(one watch each, in the form that a Role with `resourceNames` allows), or those a label selects. Every key
that ends in `.yaml` or `.yml` is a document named `configmap/key`. Nothing is in force before all of them
have been seen; content that cannot be used changes nothing, and `on_refused` hears of the ConfigMap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from epp.core.errors import ConfigError
from epp.core.thresholds import PullThresholds
from epp.thresholds.in_force import Reading, ThresholdsInForce, ThresholdState, read_documents
from epp.thresholds.merge import Texts
from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.objects import ConfigMap
from sidecar.pool_watch.reflector import Reflector, WatchRules
from sidecar.pool_watch.resources import Selection
from sidecar.pool_watch.status import WatchStatus

MAX_DOCUMENTS: Final = 64
_SUFFIXES: Final = (".yaml", ".yml")
_read_config_map = msgspec.json.Decoder(ConfigMap).decode


@dataclass(frozen=True, slots=True)
class ConfigMapView:
    """The texts of one ConfigMap."""

    uid: str
    documents: tuple[tuple[str, str], ...]  # key and text
    other_keys: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A ConfigMap whose content is not taken over, and why."""

    config_map: str
    uid: str
    why: str


def view_config_map(raw: msgspec.Raw) -> ConfigMapView:
    obj = _read_config_map(raw)
    data = obj.data or {}
    documents = tuple((key, text) for key, text in data.items() if key.endswith(_SUFFIXES))
    return ConfigMapView(obj.metadata.uid or "", documents, len(data) - len(documents))


class ConfigMapThresholds:
    """Component: keeps `state` current and calls `on_change` with every new value."""

    def __init__(
        self,
        access: KubeAccess,
        selections: Sequence[Selection],
        on_change: Callable[[PullThresholds], None],
        *,
        on_refused: Callable[[Refused], None] = lambda refused: None,
        rules: WatchRules | None = None,
    ) -> None:
        self._on_refused = on_refused
        self._dirty = asyncio.Event()
        self._found = [_Found(self._dirty) for _ in selections]
        self._reflectors = [
            Reflector(access, selection, view_config_map, found, rules=rules)
            for selection, found in zip(selections, self._found, strict=True)
        ]
        source = "API watch of " + ", ".join(map(str, selections))
        self._in_force = ThresholdsInForce(source, on_change)
        self._last: Reading | None = None
        self.has_documents = False  # the newest content has at least one
        self.settled: Final = asyncio.Event()  # the first content is in force, or refused, or cannot be read

    @property
    def state(self) -> ThresholdState:
        return self._in_force.state

    @property
    def statuses(self) -> tuple[WatchStatus, ...]:
        """Of its watches: age, failures."""
        return tuple(reflector.status for reflector in self._reflectors)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())
            group.create_task(self._until_settled())
            while True:
                await self._dirty.wait()
                self._dirty.clear()
                await self._take()

    async def _until_settled(self) -> None:
        for reflector in self._reflectors:
            await reflector.settled.wait()
        self._dirty.set()

    async def _take(self) -> None:
        """Offer what is there now, once everything has been seen."""
        missing = [reflector.status for reflector in self._reflectors if not reflector.synced.is_set()]
        if not missing:
            await self._offer()
        elif all(reflector.settled.is_set() for reflector in self._reflectors):
            self._in_force.reject("; ".join(status.error or f"{status.what}: not read" for status in missing))
        else:
            return
        self.settled.set()

    async def _offer(self) -> None:
        maps = {name: view for found in self._found for name, view in found.maps.items()}
        try:
            texts = _texts(maps)
            if self._last is None or self._last.texts != texts:
                self._last = await asyncio.to_thread(read_documents, texts)
        except ConfigError as error:
            self._refuse(str(error), maps)
            return
        if self._last.refusal is not None:
            self._refuse(self._last.refusal, maps)
            return
        self.has_documents = bool(texts)
        self._in_force.offer(self._last)

    def _refuse(self, why: str, maps: Mapping[str, ConfigMapView]) -> None:
        new = why != self.state.rejected
        self._in_force.reject(why)
        name = why.partition("/")[0].partition(":")[0]
        if new and name in maps:
            self._on_refused(Refused(name, maps[name].uid, why))


class _Found:
    """Sink of one watch."""

    def __init__(self, dirty: asyncio.Event) -> None:
        self.maps: dict[str, ConfigMapView] = {}
        self._dirty = dirty

    def replace(self, maps: dict[str, ConfigMapView]) -> None:
        self.maps = maps
        self._dirty.set()

    def put(self, name: str, view: ConfigMapView) -> None:
        self.maps[name] = view
        self._dirty.set()

    def remove(self, name: str) -> None:
        self.maps.pop(name, None)
        self._dirty.set()


def _texts(maps: Mapping[str, ConfigMapView]) -> Texts:
    """Raises ConfigError for a ConfigMap that surely means something else, and for too many documents."""
    texts: list[tuple[str, str]] = []
    for name, view in maps.items():
        if view.other_keys and not view.documents:
            raise ConfigError(f"{name}: none of its keys ends in .yaml or .yml")
        texts += [(f"{name}/{key}", text) for key, text in view.documents]
    if len(texts) > MAX_DOCUMENTS:
        raise ConfigError(f"{len(texts)} documents; {MAX_DOCUMENTS} are allowed")
    return tuple(sorted(texts))
