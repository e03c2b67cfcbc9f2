"""The memory of token ids: bounded in bytes, oldest out first, keyed by text and by how it is encoded."""

from __future__ import annotations

import threading
import tracemalloc

from epp.request.token_cache import ENTRY_OVERHEAD_BYTES, TokenCache


def test_the_least_recently_used_leaves_first_and_bytes_are_bounded() -> None:
    cache = TokenCache(3 * (ENTRY_OVERHEAD_BYTES + 8))
    a, b, c, d = (cache.digest(text, False) for text in (b"a", b"b", b"c", b"d"))
    for digest in (a, b, c):
        cache.put(digest, digest[:8])
    assert cache.get(a) == a[:8]
    cache.put(d, d[:8])
    assert (cache.get(b), cache.get(a), cache.get(d)) == (None, a[:8], d[:8])
    assert len(cache) == 3
    assert cache.size_bytes == 3 * (ENTRY_OVERHEAD_BYTES + 8)


def test_an_entry_larger_than_the_cache_is_not_kept_and_drops_nothing() -> None:
    cache = TokenCache(2 * ENTRY_OVERHEAD_BYTES)
    small, large = cache.digest(b"small", False), cache.digest(b"large", False)
    cache.put(small, b"ids!")
    cache.put(large, bytes(4 * ENTRY_OVERHEAD_BYTES))
    assert cache.get(small) == b"ids!"
    assert cache.get(large) is None


def test_a_text_with_and_without_special_tokens_are_two_entries() -> None:
    cache = TokenCache()
    assert cache.digest(b"text", False) != cache.digest(b"text", True)
    assert cache.digest(b"text", False) == cache.digest(b"text", False)


def test_digests_are_of_one_process_only() -> None:
    """Nobody outside can name an entry, so nobody can prepare one."""
    assert TokenCache().digest(b"text", False) != TokenCache().digest(b"text", False)


def test_nothing_is_kept_where_nothing_may_be() -> None:
    cache = TokenCache(0)
    cache.put(cache.digest(b"a", False), b"")
    assert len(cache) == cache.size_bytes == 0


def test_threads_keep_the_size_true() -> None:
    cache = TokenCache(50 * (ENTRY_OVERHEAD_BYTES + 4))
    digests = [cache.digest(bytes([n]), False) for n in range(100)]

    def work() -> None:
        for digest in digests * 20:
            if cache.get(digest) is None:
                cache.put(digest, digest[:4])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.size_bytes == len(cache) * (ENTRY_OVERHEAD_BYTES + 4)
    assert len(cache) == 50


def test_the_bound_is_one_of_memory_for_the_smallest_entries_too() -> None:
    """A hostile client's best: texts of one token each, never the same twice."""
    cache = TokenCache(1 << 20)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20_000):
            cache.put(cache.digest(number.to_bytes(4), False), number.to_bytes(4))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache) < 4_000  # most had to go
    assert after - before <= cache.size_bytes <= 1 << 20
