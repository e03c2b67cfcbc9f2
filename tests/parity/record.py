"""What a real vLLM said about the corpus, as committed in tests/data/parity, and the comparison.

One file a family: a first line with the digest of the family's files and of its requests (a record
of other ones proves nothing), then one line a request: its name, and the token ids or `refused`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.parity.corpus import Case

DIRECTORY: Final = Path(__file__).resolve().parents[1] / "data" / "parity"
REFUSED: Final = "refused"

# Requests with an answer that the router does not try to know, and why it says so; all others must match.
UNMATCHED: Final[Mapping[str, str]] = {
    "truncated": "truncated_prompt",
    "odd_truncated": "truncated_prompt",
    "odd_truncated_auto": "truncated_prompt",
    "odd_truncation": "truncated_prompt",
    "odd_flag_number": "flag_shape",
    "odd_flag_text": "flag_shape",
    "odd_bools": "prompt_shape",
    "odd_floats": "prompt_shape",
    "odd_strict_text": "tool_shape",
    "odd_web_search": "tools_shape",
    "odd_kwargs_tools": "template_kwargs",
    "odd_forwarded_tokens": "forwarded_tokens",
    "odd_no_thinking": "unwritable",  # by the render back end; the local one knows both
    "odd_no_tools": "unwritable",
}

Answer = list[int] | str  # the engine's token ids or REFUSED; the router's token ids or its reason


@dataclass(slots=True)
class Comparison:
    """Names of the requests, by what came out. `wrong`: other token ids; `unexpected`: the router has
    no ids, or another reason, where it should have them."""

    same: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def compare(engine: Mapping[str, Answer], router: Mapping[str, Answer]) -> Comparison:
    """Each answer of the engine against the router's. What the engine refuses it never caches, so
    whatever the router says of it is harmless."""
    found = Comparison()
    for key, theirs in engine.items():
        ours = router[key]
        if theirs == REFUSED:
            found.refused.append(key)
        elif theirs == ours:
            found.same.append(key)
        elif isinstance(ours, list):
            found.wrong.append(key)
        elif UNMATCHED.get(key.rsplit("/", 1)[-1]) == ours:
            found.unmatched.append(key)
        else:
            found.unexpected.append(f"{key}: {ours}")
    return found


def digest_of(directory: Path, cases: Sequence[Case]) -> str:
    """Of everything that an answer depends on: the family's files and the requests."""
    return digest_of_all([(directory, cases)])


def digest_of_all(families: Iterable[tuple[Path, Sequence[Case]]]) -> str:
    digest = hashlib.sha256()
    for directory, cases in families:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            digest.update((directory / name).read_bytes())
        for case in cases:
            digest.update(case.key.encode() + b"\0" + case.body + b"\0")
    return digest.hexdigest()[:16]


def write_record(family: str, digest: str, answers: Mapping[str, Answer]) -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    lines = [digest]
    for key, answer in answers.items():
        ids = answer if isinstance(answer, str) else " ".join(map(str, answer))
        lines.append(f"{key}\t{ids}")
    (DIRECTORY / f"{family}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_record(family: str) -> tuple[str, dict[str, Answer]]:
    """Digest and answers; raises `FileNotFoundError` for a family without a record."""
    first, *lines = (DIRECTORY / f"{family}.tsv").read_text(encoding="utf-8").splitlines()
    answers: dict[str, Answer] = {}
    for line in lines:
        key, _, ids = line.partition("\t")
        answers[key] = REFUSED if ids == REFUSED else [int(number) for number in ids.split()]
    return first, answers
