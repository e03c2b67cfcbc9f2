"""docs/kubernetes.md says what the code does: metric names, and the rights that are enough."""

from __future__ import annotations

import re
from pathlib import Path

from sidecar.pool_watch.metrics import WatchCollector
from sidecar.pool_watch.status import WatchStatus

PAGE = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text()
RBAC, HA_RBAC = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[:2]  # applied by tests/integration/app


def test_the_metrics_are_all_named() -> None:
    statuses = [WatchStatus("a", "pods", contact_s=1.0), WatchStatus("b", "pods", contact_s=4.0, synced=True)]
    families = list(WatchCollector(lambda: statuses, lambda: 5.0).collect())
    exported = {f.name + ("_total" if f.type == "counter" else "") for f in families}
    assert set(re.findall(r"`(kvpull_kube_\w+)", PAGE)) == exported
    values = {f.name: f.samples[0].value for f in families}
    assert values["kvpull_kube_cache_age_seconds"] == 4  # the oldest
    assert values["kvpull_kube_synced"] == 0  # one of them is not


def test_an_age_is_only_said_when_it_is_known() -> None:
    statuses = [WatchStatus("a", "pods"), WatchStatus("b", "pods", contact_s=4.0)]
    families = {f.name: f for f in WatchCollector(lambda: statuses, lambda: 5.0).collect()}
    assert families["kvpull_kube_cache_age_seconds"].samples == []
