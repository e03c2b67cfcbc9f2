"""Entry point `vllm.general_plugins`: gives our spec and our tier short names in vLLM's configuration.

vLLM loads plugins in all of its processes, some of them more than once; importing this must cost nothing.
"""

from __future__ import annotations

from typing import Final

TIER_NAME: Final = "kvpull"
SPEC_NAME: Final = "PullOffloadingSpec"


def register() -> None:
    """Idempotent. Raises UnsupportedEngine, SaltKeyError."""
    from engine_plugin.vllm import compat, salted_events

    compat.check_engine()
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if SPEC_NAME not in OffloadingSpecFactory._registry:
        OffloadingSpecFactory.register_spec(SPEC_NAME, "engine_plugin.vllm.spec", SPEC_NAME)
    if TIER_NAME not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER_NAME, "engine_plugin.vllm.tier", "PullTier")
    key = salted_events.read_salt_key()
    if key is not None:
        compat.replace_publisher(lambda stock: salted_events.make_publisher(stock, key))
