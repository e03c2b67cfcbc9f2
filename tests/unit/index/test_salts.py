"""Case S-C14 with published digests: a salt matches blocks published under it in either form, and nothing
else does."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from engine_plugin.identity import EndpointId
from engine_plugin.salt import PREFIX, published_salt, salt_forms
from epp.core.cache_view import CacheView
from epp.core.events import BlockStored, EventBatch
from epp.core.index_choice import IndexMaker
from epp.core.types import CacheTier, EngineBlockHash, SchedulingRequest

CLEAR, DIGEST, PLAIN, OTHER = (EndpointId(name) for name in ("clear", "digest", "plain", "other"))
KEY = b"0123456789abcdef-pool"
PROMPT = list(range(64))
SALT = "tenant-1"


def stored(salt: str | None, blocks: int) -> BlockStored:
    extra_keys = (None if salt is None else (salt,), *[None] * (blocks - 1))
    names = tuple(EngineBlockHash(i + 1) for i in range(blocks))
    return BlockStored(
        CacheTier.CPU, names, None, PROMPT[: 16 * blocks], 16, None, extra_keys, has_extra_keys=True
    )


def fleet(make_index: IndexMaker, key: bytes | None) -> CacheView:
    """One endpoint with salts in clear, one with digests, one without salt, one with another's."""
    view = CacheView(make_index(b"s" * 16), salt_key=key)
    held = {
        CLEAR: (SALT, 2),
        DIGEST: (published_salt(KEY, SALT), 3),
        PLAIN: (None, 4),
        OTHER: ("tenant-2", 1),
    }
    for endpoint, (salt, blocks) in held.items():
        view.add_endpoint(endpoint, has_replay=False)
        view.on_batch(endpoint, 0, EventBatch((stored(salt, blocks),)), 0.0)
    return view


def depths(view: CacheView, salt: str | None) -> list[int]:
    request = SchedulingRequest("r", token_ids=PROMPT, cache_salt=salt)
    found = view.match(request, [CLEAR, DIGEST, PLAIN, OTHER])
    assert all(match.blocks == match.cpu_blocks for match in found.values())
    return [match.blocks for match in found.values()]


def test_the_published_form_is_the_keyed_digest() -> None:
    expected = hmac.new(KEY, SALT.encode(), hashlib.sha256).hexdigest()
    assert published_salt(KEY, SALT) == f"hmac-sha256:{expected}"
    assert published_salt(KEY, "\udcff") != published_salt(KEY, "")


def test_with_the_pool_key_both_forms_match(make_index: IndexMaker) -> None:
    view = fleet(make_index, KEY)
    assert depths(view, SALT) == [2, 3, 0, 0]
    assert depths(view, None) == [0, 0, 4, 0]
    assert depths(view, "tenant-2") == [0, 0, 0, 1]
    assert depths(view, "tenant-3") == [0, 0, 0, 0]


@pytest.mark.parametrize("key", [None, b"another pool key of 16 bytes"])
def test_without_the_pool_key_digests_match_nothing(make_index: IndexMaker, key: bytes | None) -> None:
    view = fleet(make_index, key)
    assert depths(view, SALT) == [2, 0, 0, 0]


def test_a_client_cannot_ask_for_another_tenants_blocks_by_their_digest(make_index: IndexMaker) -> None:
    """Whoever can read the event stream knows the digests; they are no salts."""
    view = fleet(make_index, KEY)
    assert depths(view, published_salt(KEY, SALT)) == [0, 0, 0, 0]
    assert depths(fleet(make_index, None), published_salt(KEY, SALT)) == [0, 3, 0, 0]  # the control


def test_forms() -> None:
    assert salt_forms(None, SALT) == (SALT,)
    assert salt_forms(KEY, None) == (None,)
    assert salt_forms(KEY, SALT) == (SALT, published_salt(KEY, SALT))
    forged = PREFIX + "0" * 64
    assert salt_forms(KEY, forged) == (published_salt(KEY, forged),)
