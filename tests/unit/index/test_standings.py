"""What a view remembers of itself between decisions is what it would say anew, whatever happens to it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_plugin.identity import EndpointId
from epp.core.adoption import AdoptionRefused
from epp.core.cache_view import CacheView
from epp.core.events import BlockStored, EventBatch
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import CacheTier, EngineBlockHash, PrefixMatch, SchedulingRequest

A, B = EndpointId("a"), EndpointId("b")
TOKENS = list(range(12))
REQUEST = SchedulingRequest("r", token_ids=TOKENS)


def batch(group: int | None) -> EventBatch:
    """A whole prompt; with a group of which nothing else is known, no claim can be made."""
    hashes = tuple(EngineBlockHash(n + 1) for n in range(3))
    return EventBatch(
        (
            BlockStored(
                CacheTier.DEVICE,
                hashes,
                None,
                TOKENS,
                4,
                has_extra_keys=True,
                group_kind="full_attention" if group is None else "unheard_of",
                group_idx=group,
            ),
        )
    )


def match(view: CacheView, endpoint: EndpointId) -> PrefixMatch:
    return view.match(REQUEST, [endpoint])[endpoint]


OPS = ("connect", "disconnect", "replay_ok", "replay_failed", "live", "replayed", "undecodable", "odd_group")
OPS += ("distrust", "missed", "readd", "adopt")
Op = tuple[str, int]
ops = st.lists(
    st.tuples(
        st.sampled_from(OPS),
        st.integers(0, 3),
    ),
    max_size=14,
)


def perform(view: CacheView, name: str, seq: int) -> None:
    if name == "connect":
        view.on_connect(A, 0.0)
    elif name == "disconnect":
        view.on_disconnect(A, 0.0)
    elif name in ("replay_ok", "replay_failed"):
        view.on_replay_end(A, name == "replay_ok", 0.0)
    elif name in ("live", "replayed"):
        view.on_batch(A, seq, batch(None), 0.0, replayed=name == "replayed")
    elif name == "undecodable":
        view.on_batch(A, seq, None, 0.0)
    elif name == "odd_group":
        view.on_batch(A, seq, batch(1), 0.0)
    elif name == "distrust":
        view.distrust(A)
    elif name == "missed":
        for _ in range(3):
            view.note_pull(A, missed=True)
    elif name == "readd":
        view.remove_endpoint(A)
        view.add_endpoint(A, has_replay=seq != 0)
    else:
        exported = view.export(B)
        assert exported is not None
        try:
            view.adopt(A, exported)
        except AdoptionRefused:
            return


@settings(max_examples=300)
@given(ops)
def test_a_remembered_standing_is_the_true_one(sequence: list[Op]) -> None:
    view = CacheView(PythonPrefixIndex(bytes(16)))
    for endpoint in (A, B):
        view.add_endpoint(endpoint, has_replay=True)
        view.on_connect(endpoint, 0.0)
    view.on_replay_end(B, True, 0.0)
    view.on_batch(B, 0, batch(None), 0.0)
    for name, seq in sequence:
        perform(view, name, seq)
        found, stats = match(view, A), view.stats(A)
        assert found.state is view.state(A)
        assert found.known_empty_start == stats.known_empty_start
        assert found.block_size_tokens == stats.index.block_size_tokens
        if not found.state.has_claim:
            assert found.cached_tokens == 0
