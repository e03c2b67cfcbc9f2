"""Salts in the events of an engine: as keyed digests where it has the pool key, in clear where not. Either
way the picker finds the tenant's blocks, and only those."""

from __future__ import annotations

import pytest

from engine_plugin.identity import EndpointId
from engine_plugin.salt import published_salt
from epp.core.cache_view import CacheView
from epp.core.prefix_index import PythonPrefixIndex
from epp.core.types import SchedulingRequest
from epp.kvevents.codec import decode_batch
from tests.integration.engine.event_stream import Subscriber, events_of
from tests.integration.engine.rig import BLOCK, StartEngine, prompt_ids

A = EndpointId("a")
KEY = b"pool key of 16 bytes and more"
SALT = "tenant-canary"


@pytest.mark.parametrize("key", [None, KEY])
async def test_salted_blocks_are_found_by_their_salt_only(
    start_engine: StartEngine, key: bytes | None
) -> None:
    engine = await start_engine(salt_key=key)
    prompt = prompt_ids(4 * BLOCK)
    await engine.complete(prompt, cache_salt=SALT)
    subscriber = Subscriber(engine)
    await subscriber.ask_replay(0)
    batches = await subscriber.replayed()
    subscriber.close()
    told = published_salt(KEY, SALT) if key else SALT
    firsts = [e for _, raw in batches for e in events_of(raw) if e.get("extra_keys") and e["extra_keys"][0]]
    assert firsts
    assert all(event["extra_keys"][0] == [told] for event in firsts)
    assert any(SALT.encode() in raw for _, raw in batches) == (key is None)
    view = CacheView(PythonPrefixIndex(b"i" * 16), salt_key=KEY)
    view.add_endpoint(A, has_replay=False)
    for seq, raw in batches:
        view.on_batch(A, seq, decode_batch(raw), 0.0)
    for salt, blocks in ((SALT, 4), (None, 0), ("other", 0), (published_salt(KEY, SALT), 0)):
        request = SchedulingRequest("r", token_ids=prompt, cache_salt=salt)
        assert view.match(request, [A])[A].blocks == blocks, salt
