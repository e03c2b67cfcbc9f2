"""A changed configuration file takes effect without a restart: profiles, weights, parameters of policies.

The file is compared twice a second, which also sees the link swap by which a kubelet replaces a ConfigMap.
A new content is parsed whole; it comes into force whole or not at all, the last good one stays, and why is
in `state.rejected` with the path inside the document. What is read once at start (producers, sources, queues,
`epp.config.loading`) cannot change: such a content is refused with the paths that need a restart. Plugins
whose parameters and wiring are as they were keep what they remember; requests in flight are not touched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from epp.config import EppConfig, parse_config
from epp.config.loading import read_config_text
from epp.core.errors import ConfigError
from epp.thresholds.mounts import frozen_mount, read_mounts

log = logging.getLogger(__name__)

POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ConfigState:
    """What is in force, and whether the file's newest content was refused."""

    config: EppConfig
    generation: int = 1
    rejected: str | None = None  # why the newest content is not in force


class ConfigReload:
    """Component: calls `on_change` with every new configuration, on the loop."""

    def __init__(
        self,
        path: Path | None,
        config: EppConfig,
        on_change: Callable[[EppConfig], None],
        mounts: Callable[[], Mapping[str, str]] = read_mounts,
    ) -> None:
        """`config`: as it was loaded from `path` at start; None: from no file, and nothing is reloaded."""
        self._path = path
        self._on_change = on_change
        self._mounts = mounts
        self._text: str | None = config.text  # read last
        self.state = ConfigState(config)

    async def run(self) -> None:
        if self._path is None:
            await asyncio.Event().wait()  # a component that ends is a fault
            return
        path = self._path.absolute()
        frozen = frozen_mount(path.parent.resolve(), [path], self._mounts())
        if frozen is not None:
            log.warning("the configuration cannot be reloaded: %s", frozen)
        while True:
            await asyncio.sleep(POLL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Read the file once and apply what is new in it; every failure ends in `state.rejected`."""
        if self._path is None:
            return
        text: str | None = None
        try:
            text = await asyncio.to_thread(read_config_text, self._path)
            if text == self._text:
                return
            self._text = text
            config = await asyncio.to_thread(parse_config, text, str(self._path), self.state.config)
            self._offer(config)
        except ConfigError as error:
            if text is None:
                self._text = None  # whatever comes next is news
            self._reject(str(error))
        except Exception as error:  # task guard: a document must not end the picker
            self._reject(f"{self._path}: fault of the picker: {type(error).__name__}")
            log.exception("a configuration could not be applied")

    def _offer(self, config: EppConfig) -> None:
        fixed = needing_restart(self.state.config, config)
        if fixed:
            raise ConfigError(f"{self._path}: needs a restart: {', '.join(fixed)}")
        generation = self.state.generation
        if config.explanation != self.state.config.explanation:
            self._on_change(config)
            generation += 1
            log.info("configuration generation %d is in force", generation)
            for note in config.notes:
                log.warning("%s", note)
        elif self.state.rejected is not None:
            log.info("the configuration is that of generation %d again", generation)
        self.state = ConfigState(config, generation)

    def _reject(self, why: str) -> None:
        if why != self.state.rejected:
            log.error("configuration not accepted, generation %d stays: %s", self.state.generation, why)
            self.state = replace(self.state, rejected=why)


def needing_restart(before: EppConfig, after: EppConfig) -> list[str]:
    """Paths inside the document that differ and are read once."""
    missing = object()
    names = {**before.fixed, **after.fixed}
    return [name for name in names if before.fixed.get(name, missing) != after.fixed.get(name, missing)]
