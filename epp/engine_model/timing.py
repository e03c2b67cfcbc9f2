"""How long an engine step takes: chunked prefill (linear + quadratic in context) and decode.

Fitted to published tables of single endpoints by `simulator.calibration`, which says where each value
comes from: crossover tables (gpt-oss-120b, Llama-3.1-8B and GLM-5.2-FP8 on H200, within 7.1%) and, for
gpt-oss-120b, decode times; other decode values are assumed within what the hardware can do. Used by the
emulated engine (real time) and by the simulator (virtual time), so that both speak of the same machine. Pure
arithmetic: no clock, no sleeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`new_tokens` of one prompt computed in one step, after `context_tokens` that exist already."""

    new_tokens: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class EngineTiming:
    """Parameters of one model on one machine.

    A step costs `chunk_ms` if it prefills anything, else `decode_step_ms`; then every prefilled
    token costs `token_us` plus `context_ns` for each token before it; then every decoding sequence costs
    `decode_sequence_ms` plus `decode_context_ns` for each token of its context.

    A mixture of experts also reads, in every decode step, the experts that its sequences chose: each of
    `experts` (in all layers together) takes `expert_ms`, and `n` sequences that choose `experts_per_token`
    each need `experts * (1 - (1 - experts_per_token / experts) ** n)` of them. Prefill reads all anyway.

    Of an expert-parallel instance, each rank's device computes a share of the experts for all ranks: a
    prefilled token of another rank costs it `shared_token_us` over the number of ranks (`token_us` is of a
    rank whose peers are idle).
    """

    chunk_tokens: int  # token budget of a step: the longest prefill chunk
    chunk_ms: float
    token_us: float
    context_ns: float
    decode_step_ms: float
    decode_sequence_ms: float
    decode_context_ns: float
    expert_ms: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    shared_token_us: float = 0.0

    def decode_fixed_ms(self, sequences: int) -> float:
        """Cost of a decode step that does not depend on contexts."""
        experts_ms = self.expert_ms * self.experts_read(sequences)
        return self.decode_step_ms + experts_ms + sequences * self.decode_sequence_ms

    def experts_read(self, sequences: int) -> float:
        """Experts that so many decoding sequences are expected to need; 0 for a dense model."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** sequences)

    def prefill_ms(self, chunk: PrefillChunk) -> float:
        """Cost of a chunk without the fixed part of its step."""
        mean_context = chunk.context_tokens + chunk.new_tokens / 2
        return chunk.new_tokens * (self.token_us * 1e-3 + self.context_ns * 1e-6 * mean_context)

    def step_ms(self, prefills: Sequence[PrefillChunk], decode_contexts: Iterable[int]) -> float:
        """Duration of one step; 0 for an empty one."""
        decoding = 0
        total_ms = 0.0
        for context_tokens in decode_contexts:
            decoding += 1
            total_ms += self.decode_sequence_ms + self.decode_context_ns * 1e-6 * context_tokens
        for chunk in prefills:
            total_ms += self.prefill_ms(chunk)
        step_ms = self.decode_step_ms + self.expert_ms * self.experts_read(decoding) if decoding else 0.0
        return max(self.chunk_ms if prefills else 0.0, step_ms) + total_ms

    def chunks(self, prompt_tokens: int, cached_tokens: int = 0) -> Iterable[PrefillChunk]:
        """The steps that compute a prompt on an idle engine, given its cached prefix."""
        for start in range(cached_tokens, prompt_tokens, self.chunk_tokens):
            yield PrefillChunk(min(self.chunk_tokens, prompt_tokens - start), start)

    def recompute_ms(self, prompt_tokens: int, cached_tokens: int = 0) -> float:
        """Time to compute what is missing of a prompt on an idle engine."""
        return sum(self.step_ms((chunk,), ()) for chunk in self.chunks(prompt_tokens, cached_tokens))


PRESETS = {
    "gpt-oss-120b": EngineTiming(
        chunk_tokens=8192,
        chunk_ms=27.0,
        token_us=24.54,
        context_ns=0.497,
        decode_step_ms=7.031,
        decode_sequence_ms=0.02889,
        decode_context_ns=9.2,
        expert_ms=0.12,
        experts=128,
        experts_per_token=4,
    ),
    "glm-5.2": EngineTiming(
        chunk_tokens=8192,
        chunk_ms=286.05,
        token_us=91.51,
        context_ns=0.6557,
        decode_step_ms=20.0,  # not published: chosen
        decode_sequence_ms=0.5,  # not published: chosen
        decode_context_ns=24.1,  # 92.6 KB a token at 80% of 4.8 TB/s
        shared_token_us=45.3,  # 5,541 tokens/s a rank where all prefill, 7,400 alone
    ),
    "llama-3.1-8b": EngineTiming(
        chunk_tokens=8192,
        chunk_ms=7.446,
        token_us=21.2,
        context_ns=1.136,
        decode_step_ms=4.18,
        decode_sequence_ms=0.05,
        decode_context_ns=34.1,
    ),
}
