"""Which of the three answers a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable

from epp.core.flow.bands import FlowSettings
from epp.flow.admission import Admission, Asking, Open, PoolSaturation, Shedding
from epp.flow.controller import FlowController

OnWait = Callable[[Asking, str, float], None]


def build_admission(
    settings: FlowSettings | None,
    saturation: PoolSaturation | None,
    clock: Callable[[], float],
    on_wait: OnWait,
) -> Admission:
    """`saturation` None: there is no detector. `settings` None: the feature gate is off."""
    if saturation is None:
        return Open()
    if settings is None:
        return Shedding(saturation, clock)
    return FlowController(settings, saturation, on_wait=on_wait, clock=clock)
