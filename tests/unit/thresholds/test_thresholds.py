"""PullThresholds: merge rule, refusals, link swap, last good kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from epp.core.errors import ConfigError
from epp.core.thresholds import EVERYWHERE, PullSettings, PullThresholds, Scope, everywhere
from epp.thresholds.directory_source import MAX_FILE_BYTES, MAX_FILES, DirectoryThresholds
from epp.thresholds.document import MAX_OVERRIDES, parse_document
from epp.thresholds.in_force import PULLS_OFF
from epp.thresholds.merge import MAX_SCOPES, MAX_WARNINGS, merge, merge_texts
from tests.unit.sidecar.hostile_yaml import HOSTILE

HEAD = "apiVersion: kvpull/v1alpha1\nkind: PullThresholds\n"


def delta(tokens: int, generation: int = 0) -> PullThresholds:
    return everywhere(PullSettings(min_cached_token_delta=tokens), generation)


def doc(**default: object) -> str:
    lines = "".join(f"\n    {name}: {value}" for name, value in default.items())
    return f"{HEAD}spec:\n  default: {lines or '{}'}\n"


FULL = """
spec:
  default:
    enabled: true
    minCachedTokenDelta: 2048
    requireVerified: false
    inflightAwareness: false
    maxInflightPulls: 8
    cost: {mode: cost, marginMs: 20}
  overrides:
  - match: {model: big, role: prefill, sourceClass: far}
    set: {minCachedTokenDelta: 8192, cost: {marginMs: 1.5}}
  - match: {sourceClass: far}
    set: {enabled: false}
"""


def test_parse() -> None:
    assert parse_document(HEAD + FULL, "t").rules == {
        EVERYWHERE: PullSettings(True, 2048, False, False, 8, "cost", 20),
        Scope("big", "prefill", "far"): PullSettings(min_cached_token_delta=8192, cost_margin_ms=1.5),
        Scope(None, None, "far"): PullSettings(enabled=False),
    }
    assert parse_document(doc(), "t").rules == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (doc(minCachedTokenDelta=-1), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta="lots"), r"t: spec.default.minCachedTokenDelta"),
        (doc(minCachedTokenDelta=10**30), r"t: spec.default.minCachedTokenDelta"),
        (doc(enabled="maybe"), r"t: spec.default.enabled"),
        (
            doc(minCachedTokens=1),
            r"t: spec.default.minCachedTokens: unknown field; allowed: cost, enabled, in",
        ),
        (doc(cost="{modes: cost}"), r"t: spec.default.cost.modes: unknown field; allowed: marginMs, mode"),
        (doc(cost="{marginMs: .inf}"), r"t: spec.default.cost.marginMs"),
        (doc(maxInflightPulls=-1), r"t: spec.default.maxInflightPulls"),
        (doc() + "  override: []", r"t: spec.override: unknown field; allowed: default, overrides"),
        (HEAD + "spec: {overrides: [{match: {}, set: {}}]}", r"t: spec.overrides.0.match: empty"),
        (
            HEAD + "spec: {overrides: [{match: {pool: x}, set: {}}]}",
            r"spec.overrides.0.match.pool: unknown field; allowed: model, role, sourceClass",
        ),
        (
            HEAD + "spec: {overrides: [{match: {role: a}, set: {}}, {match: {role: a}, set: {}}]}",
            r"t: spec.overrides.1.match: role=a is matched by spec.overrides.0",
        ),
        (doc().replace("v1alpha1", "v9"), "expected kvpull/v1alpha1"),
        ("spec: {", "not YAML"),
        ("", "document"),
    ],
)
def test_refusals_name_the_path(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_document(text, "t")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_yaml_is_a_config_error_that_names_the_document(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^z\.yaml: "):
        parse_document(text, "z.yaml")


def test_a_long_list_of_problems_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document("".join(f"f{i}: 1\n" for i in range(3000)), "t")
    assert str(caught.value).count("t: ") == 8


def test_documents_merge_by_name_and_conflicts_are_said() -> None:
    far = "  overrides:\n  - {match: {sourceClass: far}, set: {minCachedTokenDelta: %d}}\n"
    merged = merge_texts(
        (
            ("b.yaml", doc(minCachedTokenDelta=4096) + far % 9000),
            ("a.yaml", doc(minCachedTokenDelta=2048, enabled="true") + far % 8000),
            ("c.yaml", doc(requireVerified="true")),
        )
    )
    assert merged.rules == {
        EVERYWHERE: PullSettings(True, 4096, True),
        Scope(source_class="far"): PullSettings(min_cached_token_delta=9000),
    }
    assert merged.warnings == (
        "b.yaml: spec.default.minCachedTokenDelta: 4096 replaces 2048 of a.yaml",
        "b.yaml: spec.overrides.0.set.minCachedTokenDelta: 9000 replaces 8000 of a.yaml",
    )


def test_one_bad_document_refuses_them_all() -> None:
    with pytest.raises(ConfigError, match=r"^b\.yaml: spec\.default\.enabled"):
        merge_texts((("a.yaml", doc(enabled="true")), ("b.yaml", doc(enabled="perhaps"))))


def test_scopes_and_warnings_are_bounded() -> None:
    def overrides(first: int) -> str:
        rows = (
            f"{{match: {{model: m{n}}}, set: {{enabled: true}}}}" for n in range(first, first + MAX_OVERRIDES)
        )
        return HEAD + f"spec: {{overrides: [{', '.join(rows)}]}}"

    documents = [parse_document(overrides(n * MAX_OVERRIDES), f"{n}.yaml") for n in range(5)]
    with pytest.raises(ConfigError, match=f"{5 * MAX_OVERRIDES} scopes in all documents; {MAX_SCOPES}"):
        merge(documents)
    again = merge([documents[0], parse_document(overrides(0), "z.yaml")])
    assert len(again.warnings) == MAX_WARNINGS + 1
    assert again.warnings[-1] == f"{MAX_OVERRIDES - MAX_WARNINGS} more"


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
    assert seen == [delta(100, 1)]

    (tmp_path / "..next").symlink_to("v2")
    os.replace(tmp_path / "..next", tmp_path / "..data")
    await source.refresh()
    assert seen == [delta(100, 1), delta(200, 2)]
    assert (source.state.generation, source.state.rejected) == (2, None)

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300)[:-10])
    await source.refresh()
    assert source.state.thresholds == delta(200, 2)
    assert source.state.rejected is not None

    (tmp_path / "v2" / "thresholds.yaml").write_text(doc(minCachedTokenDelta=300))
    await source.refresh()
    assert (source.state.generation, source.state.rejected) == (3, None)
    assert seen == [delta(100, 1), delta(200, 2), delta(300, 3)]


async def test_a_missing_directory_is_said_and_recovered_from(tmp_path: Path) -> None:
    seen: list[PullThresholds] = []
    source = DirectoryThresholds(tmp_path / "absent", seen.append)
    await source.refresh()
    assert source.state.rejected is not None
    (tmp_path / "absent").mkdir()
    (tmp_path / "absent" / "a.yaml").write_text(doc(enabled="true"))
    await source.refresh()
    assert seen == [PULLS_OFF, everywhere(PullSettings(True), 1)], "off until something good was read"
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
    empty = PullThresholds({}, 1)
    assert seen == [PULLS_OFF, empty], "an empty directory leaves the producer's own value"
    assert (source.state.thresholds, source.state.rejected) == (empty, None)


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
        assert (source.state.thresholds, source.state.rejected) == (delta(100, 1), None)
    assert seen == [delta(100, 1)]


@pytest.mark.timeout(20)
async def test_only_regular_files_are_documents(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "z.yaml")
    (tmp_path / "y.yaml").mkdir()
    (tmp_path / "x.yaml").symlink_to("/dev/zero")
    (tmp_path / "a.yaml").write_text(doc(minCachedTokenDelta=100))
    source = DirectoryThresholds(tmp_path, lambda _: None)
    await source.refresh()
    assert (source.state.thresholds, source.state.rejected) == (delta(100, 1), None)


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
    assert source.state.thresholds == PULLS_OFF
    assert "ZeroDivisionError" in str(source.state.rejected)
    assert [r.exc_info is not None for r in caplog.records] == [True, True], "the value, and switching off"
    broken = False
    await source.refresh()
    assert seen == [delta(100, 1)]
    assert source.state.rejected is None


async def test_several_volumes_in_one_directory(tmp_path: Path) -> None:
    """Each ConfigMap is a sub-directory of its own, swapped on its own."""
    for team, tokens in (("team-b", 200), ("team-a", 100)):
        (tmp_path / team / "..v1").mkdir(parents=True)
        (tmp_path / team / "..v1" / "t.yaml").write_text(doc(minCachedTokenDelta=tokens))
        (tmp_path / team / "..data").symlink_to("..v1")
        (tmp_path / team / "t.yaml").symlink_to("..data/t.yaml")
    source = DirectoryThresholds(tmp_path, lambda _: None)
    await source.refresh()
    assert source.state.documents == ("team-a/t.yaml", "team-b/t.yaml")
    assert source.state.thresholds == delta(200, 1)
    assert source.state.warnings == (
        "team-b/t.yaml: spec.default.minCachedTokenDelta: 200 replaces 100 of team-a/t.yaml",
    )
    (tmp_path / "team-b" / "t.yaml").unlink()
    (tmp_path / "team-b" / "t.yaml").symlink_to("..data/gone.yaml")
    await source.refresh()
    assert source.state.thresholds == delta(200, 1), "last good"
    assert source.state.warnings, "and what is said of it"
    assert source.state.rejected is not None


async def test_no_generation_is_half_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is swapped after the first of two files was read."""
    for version, tokens in (("..v1", 100), ("..v2", 200)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "a.yaml").write_text(doc(minCachedTokenDelta=tokens))
        (tmp_path / version / "b.yaml").write_text(doc(maxInflightPulls=tokens))
    (tmp_path / "..data").symlink_to("..v1")
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    read: list[str] = []

    def swap_after_the_first(path: Path, *, max_bytes: int) -> str:
        text = Path(path).read_text()
        read.append(Path(path).name)
        if len(read) == 1:
            (tmp_path / "..next").symlink_to("..v2")
            os.replace(tmp_path / "..next", tmp_path / "..data")
        return text

    monkeypatch.setattr("epp.thresholds.directory_source.read_text", swap_after_the_first)
    seen: list[PullThresholds] = []
    await DirectoryThresholds(tmp_path, seen.append).refresh()
    assert read == ["a.yaml", "b.yaml", "a.yaml", "b.yaml"]
    assert seen == [everywhere(PullSettings(min_cached_token_delta=200, max_inflight_pulls=200), 1)]


def _mounted_over(file: Path) -> dict[str, str]:
    return {os.path.realpath(file): "/pods/x/volumes/kubernetes.io~configmap/t/..v1/t.yaml"}


async def test_a_frozen_mount_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(doc(minCachedTokenDelta=100))
    mounts = _mounted_over(tmp_path / "t.yaml")
    seen: list[PullThresholds] = []
    source = DirectoryThresholds(tmp_path, seen.append, lambda: mounts)
    await source.refresh()
    assert seen == [PULLS_OFF]
    assert "t.yaml is a mount of its own (subPath)" in str(source.state.rejected)
    mounts.clear()
    await source.refresh()
    assert seen == [PULLS_OFF, delta(100, 1)]
