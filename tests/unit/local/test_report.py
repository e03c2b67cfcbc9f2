"""The table and the JSON hold the same fields; a row with a problem is never 'as expected'."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

from deploy.local import report
from deploy.local.scenario.row import AS_EXPECTED, UNEXPECTED, Check, Findings, Row

_ROW = Row(
    number=3,
    title="owner busy",
    destination="engine-b",
    prefill="",
    source="engine-a",
    reason="pull",
    prompt_tokens=49_200,
    cached_tokens=49_152,
    pulled_tokens=49_152,
    bytes_received=100_663_296,
    bytes_served=100_663_296,
    ttft_ms=301.4,
    expected="pulled from the owner",
)
_WRONG = replace(_ROW, number=4, problems=("pulled tokens is 3, expected 0",))


def test_verdict_follows_from_problems() -> None:
    assert _ROW.verdict == AS_EXPECTED
    assert _WRONG.verdict == UNEXPECTED


def test_plain_table_is_aligned_and_has_no_control_codes() -> None:
    text = report.plain_table([_ROW, _WRONG])
    assert "\x1b" not in text
    header, *lines = text.splitlines()
    ends = header.index("bytes in") + len("bytes in")
    assert [line[:ends].split()[-1] for line in lines] == ["100,663,296"] * 2
    assert all(word in lines[1] for word in ("engine-b", "engine-a", "pull", UNEXPECTED))


def test_result_names_every_problem_and_the_row_it_belongs_to() -> None:
    stream = io.StringIO()
    check = Check("wrong seed", "refused", "zero matches", ("nothing was refused",))
    report.Reporter(stream).result([_ROW, _WRONG], [check])
    text = stream.getvalue()
    assert "2 of 3 did not come out as expected" in text
    assert "row 4: pulled tokens is 3, expected 0" in text
    assert "wrong seed: nothing was refused" in text


def test_json_has_the_rows_with_their_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "out" / "demo.json"
    report.write_json(path, [_ROW, _WRONG], [])
    loaded = json.loads(path.read_text())
    assert [row["verdict"] for row in loaded["rows"]] == [AS_EXPECTED, UNEXPECTED]
    assert loaded["rows"][0]["bytes_served"] == 100_663_296
    assert loaded["rows"][1]["problems"] == ["pulled tokens is 3, expected 0"]
    assert list(tmp_path.joinpath("out").iterdir()) == [path]


def test_findings_say_what_was_seen_and_what_was_expected() -> None:
    findings = Findings()
    findings.equal("pulled tokens", 16, 16)
    findings.one_of("reason", "pull", ("no_claim", "destination_unknown"))
    findings.between("share", 0.5, 0.1, 0.3)
    assert findings.as_tuple == (
        "reason is pull, expected no_claim or destination_unknown",
        "share is 0.5, expected 0.1 to 0.3",
    )
