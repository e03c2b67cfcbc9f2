"""The scorers that are most used, by one name for importers."""

from epp.plugins.load_scorers import (
    ActiveRequestScorer,
    KvCacheUtilizationScorer,
    LoadAwareScorer,
    QueueScorer,
    RunningRequestsScorer,
    TokenLoadScorer,
)
from epp.plugins.plugin_type import TierWeights
from epp.plugins.prefix_scorer import PrefixCacheScorer

__all__ = [
    "ActiveRequestScorer",
    "KvCacheUtilizationScorer",
    "LoadAwareScorer",
    "PrefixCacheScorer",
    "QueueScorer",
    "RunningRequestsScorer",
    "TierWeights",
    "TokenLoadScorer",
]
