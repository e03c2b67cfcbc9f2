"""PullThresholds: merge rule, refusals, link swap, last good kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epp.core.errors import ConfigError
from epp.core.thresholds import NO_THRESHOLDS, PullThresholds
from epp.thresholds.directory_source import (
    MAX_FILE_BYTES,
    MAX_FILES,
    PULLS_OFF,
    DirectoryThresholds,
    ThresholdState,
)
from epp.thresholds.document import merge, parse_thresholds
from tests.unit.sidecar.hostile_yaml import HOSTILE


def doc(**default: object) -> str:
    lines = "".join(f"\n    {name}: {value}" for name, value in default.items())
    return f"apiVersion: kvpull/v1alpha1\nkind: PullThresholds\nspec:\n  default: {lines or '{}'}\n"


def test_parse() -> None:
    assert parse_thresholds(doc(enabled="false", minCachedTokenDelta=2048), "t") == PullThresholds(
        False, 2048
    )
    assert parse_thresholds(doc(), "t") == NO_THRESHOLDS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (doc(minCachedTokenDelta=-1), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta="lots"), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta=10**30), r"t: spec.default.minCachedTokenDelta"),
        (doc(enabled="maybe"), r"t: spec.default.enabled"),
        (doc(minCachedTokens=1), r"t: spec.default.minCachedTokens"),
        (doc().replace("v1alpha1", "v9"), "expected kvpull/v1alpha1"),
        ("spec: {", "not YAML"),
        ("", "document"),
    ],
)
def test_refusals_name_the_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_thresholds(text, "t")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_a_config_error_that_names_the_document(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^z\.yaml: "):
        parse_thresholds(text, "z.yaml")


def test_a_long_list_of_problems_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_thresholds("".join(f"f{i}: 1\n" for i in range(3000)), "t")
    assert str(caught.value).count("t: ") == 8


def test_a_later_document_wins_field_by_field() -> None:
    merged = merge([PullThresholds(True, 2048), PullThresholds(min_cached_token_delta=4096), NO_THRESHOLDS])
    assert merged == PullThresholds(True, 4096)


async def test_link_swap_is_seen_and_bad_content_keeps_the_last_good(tmp_path: Path) -> None:
    """S-G05: a ConfigMap volume is replaced by swapping the ..data link."""
    seen: list[PullThresholds] = []
    for name, text in (("v1", doc(minCachedTokenDelta=100)), ("v2", doc(minCachedTokenDelta=200))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thresholds.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("v1")
    mount = tmp_path / "mount"
    mount.mkdir()
    (mount / "thresholds.yaml").symlink_to("../..data/thresholds.yaml")

    source = DirectoryThresholds(mount, seen.append)
    await source.refresh()
    await source.refresh()
    assert [t.min_cached_token_delta for t in seen] == [100]

    (tmp_path / "..next").symlink_to("v2")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    await source.refresh()
    assert [t.min_cached_token_delta for t in seen] == [100, 200]
    assert (source.state.generation, source.state.rejected) == (2, None)

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300)[:-10])
    await source.refresh()
    assert source.state.thresholds.min_cached_token_delta == 200
    assert source.state.generation == 2
    assert source.state.rejected is not None

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300))
    await source.refresh()
    assert (source.state.generation, source.state.rejected) == (3, None)
    assert [t.min_cached_token_delta for t in seen] == [100, 200, 300]


async def test_a_missing_directory_is_said_and_recovered_from(tmp_path: Path) -> None:
    seen: list[PullThresholds] = []
    source = DirectoryThresholds(tmp_path / "absent", seen.append)
    await source.refresh()
    assert source.state.rejected is not None
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "a.yaml").write_text(doc(enabled="true"))
    await source.refresh()
    assert seen == [PULLS_OFF, PullThresholds(True)], "off until something good was read"
    assert source.state.rejected is None


async def test_pulls_stay_off_while_nothing_good_was_ever_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[PullThresholds] = []
    source = DirectoryThresholds(tmp_path, seen.append)
    (tmp_path / "a.yaml").write_text("spec: {")
    await source.refresh()
    (tmp_path / "a.yaml").write_text(doc(minCachedTokenDelta=0))
    await source.refresh()
    await source.refresh()
    assert seen == [PULLS_OFF]
    assert source.state.thresholds == PULLS_OFF
    assert "minCachedTokenDelta" in str(source.state.rejected)
    assert len(caplog.records) == 2, "each reason once"
    (tmp_path / "a.yaml").unlink()
    await source.refresh()
    assert seen == [PULLS_OFF, NO_THRESHOLDS], "an empty directory leaves the producer's own value"
    assert source.state == ThresholdState(NO_THRESHOLDS, 1, None)


async def test_the_accepted_content_back_again_is_no_longer_rejected(tmp_path: Path) -> None:
    seen: list[PullThresholds] = []
    directory = tmp_path / "thr"
    directory.mkdir()
    (directory / "a.yaml").write_text(doc(minCachedTokenDelta=100))
    source = DirectoryThresholds(directory, seen.append)
    await source.refresh()
    for spoil, restore in (
        (lambda: directory.rename(tmp_path / "away"), lambda: (tmp_path / "away").rename(directory)),
        (lambda: (directory / "b.yaml").write_text("["), lambda: (directory / "b.yaml").unlink()),
        (lambda: (directory / "b.yaml").symlink_to("absent"), lambda: (directory / "b.yaml").unlink()),
    ):
        spoil()
        await source.refresh()
        assert source.state.rejected is not None
        restore()
        await source.refresh()
        assert source.state == ThresholdState(PullThresholds(min_cached_token_delta=100), 1, None)
    assert seen == [PullThresholds(min_cached_token_delta=100)]


@pytest.mark.timeout(20)
async def test_only_regular_files_are_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "z.yaml")
    (tmp_path / "y.yaml").mkdir()
    (tmp_path / "x.yaml").symlink_to("/dev/zero")
    (tmp_path / "a.yaml").write_text(doc(minCachedTokenDelta=100))
    source = DirectoryThresholds(tmp_path, lambda _: None)
    await source.refresh()
    assert source.state == ThresholdState(PullThresholds(min_cached_token_delta=100), 1, None)


async def test_content_over_a_limit_is_refused(tmp_path: Path) -> None:
    source = DirectoryThresholds(tmp_path, lambda _: None)
    (tmp_path / "a.yaml").write_text(doc() + "#" * MAX_FILE_BYTES)
    await source.refresh()
    assert f"a.yaml: larger than {MAX_FILE_BYTES} bytes" in str(source.state.rejected)
    for number in range(MAX_FILES + 1):
        (tmp_path / f"{number}.yaml").write_text("")
    await source.refresh()
    assert "documents; " in str(source.state.rejected)


async def test_not_utf8_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe")
    source = DirectoryThresholds(tmp_path, lambda _: None)
    await source.refresh()
    assert "a.yaml: not UTF-8" in str(source.state.rejected)


async def test_no_failure_ends_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A callback that fails is logged with its traceback once, and asked again until it takes the value."""
    broken = True
    seen: list[PullThresholds] = []

    def take(thresholds: PullThresholds) -> None:
        if broken:
            raise ZeroDivisionError("not today")
        seen.append(thresholds)

    (tmp_path / "a.yaml").write_text(doc(minCachedTokenDelta=100))
    source = DirectoryThresholds(tmp_path, take)
    await source.refresh()
    await source.refresh()
    assert source.state == ThresholdState(PULLS_OFF, 0, source.state.rejected)
    assert "ZeroDivisionError" in str(source.state.rejected)
    assert [r.exc_info is not None for r in caplog.records] == [True, True], "the value, and switching off"
    broken = False
    await source.refresh()
    assert seen == [PullThresholds(min_cached_token_delta=100)]
    assert source.state.rejected is None
