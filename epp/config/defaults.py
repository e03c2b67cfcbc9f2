"""What the reference adds where a file leaves it out: profiles, pickers, the profile handler. Added, never
hidden: each addition carries its reason, and `kvpull config explain` shows it.
"""

from __future__ import annotations

from collections.abc import Mapping

from epp.config.document import Document, PluginEntry, PluginRef, ProfileEntry
from epp.config.instances import Configured, default_plugin
from epp.plugins.registry import PLUGIN_TYPES, Kind

DEFAULT_PICKER = "max-score-picker"
DEFAULT_HANDLER = "single-profile-handler"
# with neither plugins nor profiles, as in the reference
_DEFAULT_SCORERS = (
    ("queue-scorer", 2.0),
    ("kv-cache-utilization-scorer", 2.0),
    ("prefix-cache-scorer", 3.0),
)


_IN_PROFILES = frozenset({Kind.FILTER, Kind.DETECTOR, Kind.SCORER, Kind.PICKER})


def with_default_profile(document: Document) -> tuple[Document, tuple[str, ...]]:
    """The document, and sentences about what was added to it."""
    if document.scheduling_profiles:
        return document, ()
    if document.plugins:
        return _with_profile_of_all(document)
    refs = [PluginRef.model_validate({"pluginRef": n, "weight": w}) for n, w in _DEFAULT_SCORERS]
    changed = document.model_copy(
        update={
            "plugins": [PluginEntry(type=name) for name, _ in _DEFAULT_SCORERS],
            "scheduling_profiles": [ProfileEntry(name="default", plugins=refs)],
        }
    )
    listed = ", ".join(f"{name} x {weight:g}" for name, weight in _DEFAULT_SCORERS)
    return changed, (f"no plugins and no profiles: a profile `default` with {listed} was added",)


def _with_profile_of_all(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Plugins without a profile: every one that a profile can hold, in the order of the file."""
    rows = [(entry.name or entry.type, PLUGIN_TYPES.get(entry.type)) for entry in document.plugins]
    names = [name for name, row in rows if row is not None and row.kind in _IN_PROFILES]
    refs = [PluginRef.model_validate({"pluginRef": name}) for name in names]
    profile = ProfileEntry(name="default", plugins=refs)
    listed = ", ".join(names) or "no plugin"
    note = f"no profiles: a profile `default` with {listed} was added, each with weight 1"
    return document.model_copy(update={"scheduling_profiles": [profile]}), (note,)


def missing_defaults(document: Document, plugins: Mapping[str, Configured]) -> dict[str, Configured]:
    """Plugins that have to be added for profiles to work, by name."""
    added: dict[str, Configured] = {}
    for profile in document.scheduling_profiles:
        named = [plugins[ref.plugin_ref] for ref in profile.plugins if ref.plugin_ref in plugins]
        if not any(p.row.kind is Kind.PICKER for p in named) and DEFAULT_PICKER not in {**plugins, **added}:
            added[DEFAULT_PICKER] = default_plugin(DEFAULT_PICKER, f"profile {profile.name} names no picker")
    if not any(p.row.kind is Kind.PROFILE_HANDLER for p in plugins.values()):
        added[DEFAULT_HANDLER] = default_plugin(DEFAULT_HANDLER, "no profile handler is configured")
    return added
