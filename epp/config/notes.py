"""Sentences that an operator should see: at start in the log, and by `kvpull config explain`."""

from __future__ import annotations

from collections.abc import Iterator

from epp.config.document import Document
from epp.config.gates import HA_POPULATE, read_gates
from epp.config.instances import only, set_but_ignored
from epp.config.wiring import P2P_PRODUCER, Wiring
from epp.core.disagg import DisaggProfileHandler, ProfileHandler
from epp.plugins import producers
from epp.plugins.registry import Kind

LEGACY_GROUP = "inference.networking.x-k8s.io"
_USED_BY_PROFILES = (Kind.FILTER, Kind.SCORER, Kind.PICKER)


def notes_of(
    document: Document, wiring: Wiring, handler: ProfileHandler, flow_control: bool
) -> tuple[str, ...]:
    return (
        *_of_pulls(wiring),
        *_of_experiments(wiring),
        *wiring.notes,
        *_of_parameters(wiring),
        *_of_profiles(document, wiring, handler),
        *_of_document(document, flow_control),
    )


def _of_pulls(wiring: Wiring) -> Iterator[str]:
    source = only(wiring.plugins, P2P_PRODUCER, producers.P2PSourceProducerParameters)
    if source is None:
        yield "pulls are off: p2p-source-producer is not configured"
    elif source.min_cached_token_delta is None:
        yield (
            "p2p-source-producer sets no minCachedTokenDelta: no source is named until a PullThresholds "
            "document sets one (calibrate first)"
        )


def _of_experiments(wiring: Wiring) -> Iterator[str]:
    for plugin in wiring.plugins.values():
        if plugin.row.experimental:
            yield f"{plugin.name} is experimental: it may change or go in any version (docs/experiments.md)"


def _of_parameters(wiring: Wiring) -> Iterator[str]:
    for plugin in wiring.plugins.values():
        for path, reason in set_but_ignored(plugin):
            yield f"{plugin.name}: {path} is ignored: {reason}"


def _of_profiles(document: Document, wiring: Wiring, handler: ProfileHandler) -> Iterator[str]:
    used = {ref.plugin_ref for profile in document.scheduling_profiles for ref in profile.plugins}
    used |= {profile.picker.name for profile in handler.profiles}
    for plugin in wiring.plugins.values():
        if plugin.row.kind in _USED_BY_PROFILES and plugin.name not in used:
            yield f"{plugin.name} has no effect: no profile uses it"
    running = {profile.name for profile in handler.profiles}
    for profile in document.scheduling_profiles:
        if profile.name not in running:
            yield f"profile {profile.name} has no effect: no stage runs it"
    if isinstance(handler, DisaggProfileHandler) and handler.prefill is None:
        yield "prompts are never split: disagg-profile-handler has no deciders.prefill"


def _of_document(document: Document, flow_control: bool) -> Iterator[str]:
    if document.api_version.startswith(LEGACY_GROUP):
        yield f"apiVersion {document.api_version} is deprecated: write llm-d.ai/v1alpha1"
    if document.saturation_detector is not None:
        yield "saturationDetector at the top is deprecated: write flowControl.saturationDetector"
    if document.parser is not None:
        yield "parser at the top is deprecated: write requestHandler.parsers"
    if document.parser_refs:
        yield "requestHandler.parsers has no effect: every known path is understood, the others pass through"
    if not read_gates(document.feature_gates, "")[HA_POPULATE]:
        yield f"{HA_POPULATE}=false has no effect: every replica follows the pool"
    if document.flow_control is not None and not flow_control:
        yield (
            "flowControl queues nothing: its feature gate is off (at saturation, requests of a priority "
            "below 0 are refused)"
        )
