"""Names of an engine's gauges as `core-metrics-extractor` writes them: `name` or `name{label=value,...}`.

Pure. Who looks for them on a page is `epp.endpoints`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SPEC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"\\]*)"|([^",{}\s]+))\s*')


class GaugeSpec(NamedTuple):
    """The samples of `name` that have these labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def fits(self, labels: dict[str, str]) -> bool:
        """Whether a sample with `labels` is meant."""
        return all(labels.get(name) == value for name, value in self.labels)

    @property
    def key(self) -> str:
        """Another one for every spec, and no name of a metric where there are labels."""
        return self.name + "".join(f"\n{name}={value}" for name, value in self.labels)


class EngineGauges(NamedTuple):
    """What is looked for besides vLLM's and SGLang's names, the first on a page wins."""

    waiting: tuple[GaugeSpec, ...] = ()
    running: tuple[GaugeSpec, ...] = ()
    kv_usage: tuple[GaugeSpec, ...] = ()


NO_MORE_GAUGES = EngineGauges()


def read_spec(text: str) -> GaugeSpec:
    """Raises ValueError: it is not written in this way."""
    found = _SPEC.fullmatch(text.strip())
    parts = found[2].split(",") if found and found[2] is not None and found[2].strip() else []
    labels = [_LABEL.fullmatch(part) for part in parts]
    if found is None or None in labels:
        raise ValueError(f"{text!r}: expected a metric such as name or name{{label=value}}")
    return GaugeSpec(found[1], tuple((label[1], label[2] or label[3] or "") for label in labels if label))
