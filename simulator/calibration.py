"""Models from committed inputs: crossover and decode tables are fitted, the rest is published or assumed.

Only crossover tables (one pair of endpoints, one request) and decode tables (one endpoint) are ever fitted.
No fleet table is read here, so what the fleets do is a prediction. Every value keeps its origin.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from epp.core.errors import ConfigError
from epp.engine_model.profile import MAX_NETWORK_BYTES_PER_S, ModelProfile, TransferTiming
from epp.engine_model.timing import EngineTiming, PrefillChunk

DATA = Path(__file__).parent / "data"
FITTED, PUBLISHED, ASSUMED = "fitted", "published", "assumed"
STACK = "stack_ms"  # the part of `decode_step_ms` that the decode table's engine alone does not take
_EXPERTS = ("experts", "experts_per_token")
TAIL_TOKENS = 64  # of a prompt whose prefix is pulled: one block is always computed


@dataclass(frozen=True, slots=True)
class Value:
    """One parameter and where it comes from."""

    name: str
    value: float
    origin: str
    source: str


@dataclass(frozen=True, slots=True)
class CrossoverPoint:
    prefix_tokens: int
    recompute_ms: float
    pull_ms: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One endpoint that does nothing but decode: `streams` at once, each of `context_tokens` on the mean."""

    streams: int
    context_tokens: int
    token_ms: float


@dataclass(frozen=True, slots=True)
class CalibratedModel:
    """A profile with the origin of each value, and the tables that it was fitted to (none: all assumed)."""

    profile: ModelProfile
    values: tuple[Value, ...]
    points: tuple[CrossoverPoint, ...]
    source: str
    decode_points: tuple[DecodePoint, ...] = ()
    decode_source: str = ""


def model_names() -> list[str]:
    return sorted(path.stem for path in (DATA / "models").glob("*.json"))


@lru_cache(maxsize=16)
def load_model(name: str) -> CalibratedModel:
    """A committed model, or a file of the same form by its path.

    Raises:
        ConfigError: there is none, or it lacks something.
    """
    path = Path(name) if name.endswith(".json") else DATA / "models" / f"{name}.json"
    if not path.exists():
        raise ConfigError(f"no model {name!r}; there are {', '.join(model_names())}, or give a .json file")
    try:
        return read_model(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error


def read_model(raw: Mapping[str, Any]) -> CalibratedModel:
    """From the parsed file: what it does not give is fitted to its crossover points."""
    crossover = raw["crossover"]
    points = tuple(CrossoverPoint(*row) for row in crossover["points"]) if crossover else ()
    given = {n: Value(n, **v) for part in ("timing", "transfer") for n, v in raw[part].items()}
    kv = Value("kv_bytes_per_token", **raw["kv_bytes_per_token"])
    if crossover:
        chunk_tokens = int(crossover["chunk_tokens"])
        given["chunk_tokens"] = Value("chunk_tokens", chunk_tokens, ASSUMED, "vLLM's default budget on H200")
        fitted = fit_recompute(points, chunk_tokens)
        given |= {n: Value(n, v, FITTED, crossover["source"]) for n, v in fitted.items()}
        given |= decode_values(raw.get("decode"), given)
        pull = fit_pull(points, _timing(given), kv.value)
        given |= {n: Value(n, v, FITTED, crossover["source"]) for n, v in pull.items()}
    expert = [Value("expert_bytes", **raw["expert_bytes"])] if "expert_bytes" in raw else []
    profile = ModelProfile(
        raw["name"],
        kv.value,
        _timing(given),
        _transfer(given),
        int(raw["devices"]),
        expert_bytes=expert[0].value if expert else 0.0,
    )
    values, decode = (kv, *expert, *given.values()), raw.get("decode")
    return CalibratedModel(
        profile,
        values,
        points,
        crossover["source"] if crossover else "",
        _decode_points(decode) if decode else (),
        decode["source"] if decode else "",
    )


def _timing(values: dict[str, Value]) -> EngineTiming:
    numbers: dict[str, Any] = {n: v.value for n, v in values.items() if n in EngineTiming.__slots__}
    whole = {n: int(v) for n, v in numbers.items() if n in ("chunk_tokens", "experts", "experts_per_token")}
    return EngineTiming(**numbers | whole)


def _transfer(values: dict[str, Value]) -> TransferTiming:
    return TransferTiming(**{n: v.value for n, v in values.items() if n in TransferTiming.__slots__})


# --- fits ---------------------------------------------------------------------------------------------
def fit_recompute(points: Sequence[CrossoverPoint], chunk_tokens: int) -> dict[str, float]:
    """`chunk_ms`, `token_us` and `context_ns` of the least relative error; none is negative."""
    rows = [
        (math.ceil(n / chunk_tokens), n * 1e-3, n * n / 2 * 1e-6) for n in (p.prefix_tokens for p in points)
    ]
    chunk_ms, token_us, context_ns = fit_relative(rows, [p.recompute_ms for p in points])
    return {"chunk_ms": chunk_ms, "token_us": token_us, "context_ns": context_ns}


def fit_pull(
    points: Sequence[CrossoverPoint], timing: EngineTiming, kv_bytes_per_token: float
) -> dict[str, float]:
    """`floor_s` and `stream_bytes_per_s`; what the tail's step takes is not part of them. A slope beyond the
    hardware is held at the hardware's."""
    steps = [timing.step_ms((PrefillChunk(TAIL_TOKENS, p.prefix_tokens),), ()) for p in points]
    least_ms = kv_bytes_per_token / MAX_NETWORK_BYTES_PER_S * 1e3  # a token
    left = [p.pull_ms - step - p.prefix_tokens * least_ms for p, step in zip(points, steps, strict=True)]
    rows = [(1.0, float(p.prefix_tokens)) for p in points]
    floor_ms, token_ms = fit_relative(rows, left, [p.pull_ms for p in points])
    return {
        "floor_s": floor_ms * 1e-3,
        "stream_bytes_per_s": kv_bytes_per_token / (token_ms + least_ms) * 1e3,
    }


def _decode_points(decode: Mapping[str, Any]) -> tuple[DecodePoint, ...]:
    return tuple(DecodePoint(*row) for row in decode["points"])


def decode_values(decode: Mapping[str, Any] | None, given: Mapping[str, Value]) -> dict[str, Value]:
    """What decoding costs beside its contexts (`decode_context_ns` is given): how it grows with the streams
    from the table; where a lone stream on the published stack was timed, the fixed part from that."""
    if decode is None:
        return {}
    context_ns = given["decode_context_ns"].value
    read = EngineTiming(1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, *[int(given[n].value) for n in _EXPERTS])
    points = _decode_points(decode)
    rows = [(1.0, read.experts_read(p.streams), float(p.streams)) for p in points]
    wanted = [p.token_ms - p.streams * p.context_tokens * context_ns * 1e-6 for p in points]
    step_ms, expert_ms, sequence_ms = fit_relative(rows, wanted, [p.token_ms for p in points])
    source = decode["source"]
    found = [("expert_ms", expert_ms, source), ("decode_sequence_ms", sequence_ms, source)]
    if lone := decode.get("lone_stream"):
        others_ms = expert_ms * read.experts_read(1) + sequence_ms
        whole_ms = lone["token_ms"] - others_ms - lone["context_tokens"] * context_ns * 1e-6
        found += [(STACK, whole_ms - step_ms, lone["source"]), ("decode_step_ms", whole_ms, lone["source"])]
    else:
        found += [("decode_step_ms", step_ms, source)]
    return {name: Value(name, value, FITTED, where) for name, value, where in found}


def fit_relative(
    rows: Sequence[Sequence[float]], wanted: Sequence[float], scale: Sequence[float] | None = None
) -> list[float]:
    """Coefficients, none negative, of the least squared error relative to `scale` (absent: `wanted`)."""
    sizes = wanted if scale is None else scale
    scaled = [[x / size for x in row] for row, size in zip(rows, sizes, strict=True)]
    target = [y / size for y, size in zip(wanted, sizes, strict=True)]
    width = len(rows[0])
    best: tuple[float, list[float]] | None = None
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(range(width), n) for n in range(1, width + 1)
    ):
        solved = _solve([[row[i] for i in chosen] for row in scaled], target)
        if solved is None or min(solved) < 0:
            continue
        found = [0.0] * width
        for i, value in zip(chosen, solved, strict=True):
            found[i] = value
        error = sum(
            (sum(a * b for a, b in zip(row, found, strict=True)) - y) ** 2
            for row, y in zip(scaled, target, strict=True)
        )
        if best is None or error < best[0]:
            best = (error, found)
    if best is None:
        raise ValueError("no coefficients without a negative one fit")
    return best[1]


def _solve(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float] | None:
    """Normal equations by elimination; None: the columns depend on each other."""
    width = len(rows[0])
    matrix = [[sum(r[i] * r[j] for r in rows) for j in range(width)] for i in range(width)]
    right = [sum(r[i] * y for r, y in zip(rows, target, strict=True)) for i in range(width)]
    scales = [math.sqrt(matrix[i][i]) or 1.0 for i in range(width)]
    matrix = [[matrix[i][j] / scales[i] / scales[j] for j in range(width)] for i in range(width)]
    right = [right[i] / scales[i] for i in range(width)]
    for i in range(width):
        pivot = max(range(i, width), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        right[i], right[pivot] = right[pivot], right[i]
        for k in range(i + 1, width):
            factor = matrix[k][i] / matrix[i][i]
            matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
            right[k] -= factor * right[i]
    found = [0.0] * width
    for i in reversed(range(width)):
        found[i] = (right[i] - sum(matrix[i][j] * found[j] for j in range(i + 1, width))) / matrix[i][i]
    return [value / scales[i] for i, value in enumerate(found)]
