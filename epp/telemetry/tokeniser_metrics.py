"""Metrics of the tokeniser, read from its counters when Prometheus asks. Labels are reasons from our code."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from epp.request.render import RenderTokeniser
from epp.request.tokenise import LocalTokeniser


class TokeniserCollector(Collector):
    """`kvpull_epp_tokenised_*` and what each back end has besides."""

    def __init__(self, tokeniser: LocalTokeniser | RenderTokeniser) -> None:
        self._tokeniser = tokeniser

    def collect(self) -> Iterator[Metric]:
        counters = self._tokeniser.counters
        outcomes = CounterMetricFamily(
            "kvpull_epp_tokenised_prompts", "Prompts by what became of them.", labels=["outcome"]
        )
        for outcome, count in counters.outcomes.items():
            outcomes.add_metric([outcome], count)
        tokens = CounterMetricFamily(
            "kvpull_epp_tokenised_tokens", "Tokens encoded, or remembered instead.", labels=["how"]
        )
        tokens.add_metric(["encoded"], counters.encoded_tokens)
        tokens.add_metric(["reused"], counters.reused_tokens)
        yield from (outcomes, tokens)
        if isinstance(self._tokeniser, RenderTokeniser):
            yield GaugeMetricFamily(
                "kvpull_epp_render_breakers_open",
                "Render back ends left alone because they fail.",
                value=self._tokeniser.open_breakers,
            )
        else:
            yield from self._local(self._tokeniser)

    def _local(self, tokeniser: LocalTokeniser) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "kvpull_epp_token_cache_bytes", "Memory of remembered token ids.", value=tokeniser.cache_bytes
        )
        cuts = GaugeMetricFamily(
            "kvpull_epp_token_cuts", "1: texts are cut there; all 0: encoded whole.", labels=["at"]
        )
        cuts.add_metric(["blanks"], float(tokeniser.rules.at_blanks))
        cuts.add_metric(["marks"], float(tokeniser.rules.at_marks))
        cuts.add_metric(["special_tokens"], float(bool(tokeniser.rules.tokens)))
        yield cuts
