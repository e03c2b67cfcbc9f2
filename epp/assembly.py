"""What the composition root is made of, where building a part takes more than its constructor."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry

from epp import key_files
from epp.config import EXACT_TOKENS_NEEDED, EppConfig
from epp.core.cache_view import CacheView
from epp.core.endpoint_picker import EndpointPicker
from epp.core.errors import ConfigError
from epp.core.index_choice import IndexChoice
from epp.core.index_limits import IndexLimits
from epp.flow.admission import Admission
from epp.flow.choice import build_admission
from epp.orders.sender import PrefetchSender
from epp.request.back_end import TokeniserPlan
from epp.request.render import RenderTokeniser
from epp.request.tokenise import LocalTokeniser
from epp.telemetry.flow_metrics import FlowCollector, FlowMetrics

log = logging.getLogger("epp.app")


def build_picker(
    arguments: argparse.Namespace, config: EppConfig, choice: IndexChoice, seed: bytes
) -> EndpointPicker:
    """The core, with an empty index."""
    settings = replace(
        config.settings,
        metrics_staleness_s=arguments.metrics_staleness_threshold,
        pull_deadline_s=arguments.pull_deadline,
        approx=replace(config.settings.approx, seed=seed) if config.settings.approx else None,
    )
    cache = CacheView(
        choice.make(seed, IndexLimits(max_bytes=arguments.index_max_bytes)),
        salt_key=key_files.salt_key(arguments.salt_key_file),
        speculation=config.speculation,
    )
    return EndpointPicker(settings, cache)


def build_tokeniser(
    arguments: argparse.Namespace, config: EppConfig, picker: EndpointPicker
) -> LocalTokeniser | RenderTokeniser | None:
    """None: every request is routed by load.

    Raises:
        ConfigError: exact tokens are needed and nobody knows them.
    """
    tokeniser = TokeniserPlan(
        parameters=config.tokens,
        directory=arguments.tokenizer,
        budget_s=arguments.tokenizer_budget,
        members=lambda: [endpoint.address for endpoint in picker.endpoints],
    ).build()
    if tokeniser is None and config.precise is not None:
        raise ConfigError(f"nothing knows the engines' tokens: {EXACT_TOKENS_NEEDED}, or give --tokenizer")
    if tokeniser is None:
        log.warning("no tokenizer configured: every request is routed by load, and nothing is pulled")
    return tokeniser


def build_orders(
    arguments: argparse.Namespace, config: EppConfig, picker: EndpointPicker
) -> PrefetchSender | None:
    """None: engines are given no orders.

    Raises:
        ConfigError: orders are configured and cannot be given.
    """
    keys = key_files.peer_keys(arguments.peer_key_file)
    if not keys:
        if config.settings.next_turns is not None:
            raise ConfigError("kvpull-next-turn-prefetcher orders engines to pull: give --peer-key-file")
        return None
    return PrefetchSender(lambda: picker.next_turns, keys, arguments.peer_key_file)


def build_admission_of(
    config: EppConfig, picker: EndpointPicker, pool: str, registry: CollectorRegistry
) -> Admission:
    """Made once: the detector and the limits of a reloaded configuration need a restart."""
    asked, waits = config.admission, FlowMetrics(registry, pool)

    def saturation(now_s: float, unbooked: int) -> float | None:
        assert asked is not None
        level = picker.saturation(asked.detector, now_s, unbooked)
        return None if level is None else level / asked.usage_limit

    admission = build_admission(
        asked.flow if asked else None, saturation if asked else None, time.monotonic, waits.waited
    )
    registry.register(FlowCollector(admission, pool))
    return admission
