"""A peer that is dead, mute, frozen, killed in the middle or not compatible costs a request time, never its
answer; and nothing a stranger sends costs the engine anything."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.conftest import SERVED_FAMILY
from tests.engine.pull_engines import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    PullEngine,
    fresh,
    processes_of,
    source_params,
    start_engines,
    until,
)
from tests.engine.reports import Reports

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def others(
    pair: tuple[PullEngine, PullEngine],
    models: dict[str, Path],
    peer_key_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, PullEngine]]:
    """A source that stops in the middle of every move of more than four blocks, and says a wrong checksum of
    every sixth block; and one with other weights."""
    root = tmp_path_factory.mktemp("others")
    shared = pair[0].process.log.parent
    tiers: dict[str, dict[str, object]] = {
        "victim": {"faults": ["hold_after_chunks=1"], "chunk_bytes": 4 * BLOCK_BYTES},
        "torn": {"faults": ["corrupt_block=5"]},
        "stranger": {"revision": "another"},
    }
    with start_engines(models[SERVED_FAMILY], root, shared / "site", peer_key_file, tiers) as engines:
        yield engines


def received(engine: PullEngine) -> float:
    return engine.metric("kvpull_pull_received_bytes_total")


def answers_as_before(asker: PullEngine, params: dict[str, object], blocks: int = 12) -> None:
    """The answer is the asker's own, and it is still there for others."""
    ids = fresh(blocks)
    before = received(asker)
    answer = asker.complete(ids, params=params)
    assert answer.tokens == asker.complete(ids).tokens
    assert received(asker) == before


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where `serve` gets every connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            held = []
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    serve(connection)
            for connection in held:
                connection.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
        thread.join(30)


def test_a_dead_source(source: PullEngine, source_reports: Reports) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    for attempt in ("dead-1", "dead-2"):
        answers_as_before(source, source_params("127.0.0.1", port, attempt))
        told = source_reports.of(attempt)
        assert (told.reason, told.received_bytes) == ("unreachable", 0)


def test_a_source_that_accepts_and_never_speaks(source: PullEngine, source_reports: Reports) -> None:
    with listening(lambda _: None) as port:
        answers_as_before(source, source_params("127.0.0.1", port, "mute"))
    assert source_reports.of("mute").reason in ("timeout", "unreachable")


def test_a_source_that_speaks_something_else(source: PullEngine, source_reports: Reports) -> None:
    def say(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 50)

    with listening(say) as port:
        answers_as_before(source, source_params("127.0.0.1", port, "http"))
    assert source_reports.of("http").reason == "refused_auth"  # it has not got the pool's key


def test_parameters_that_mean_nothing(source: PullEngine) -> None:
    for params in (
        {"remote_kv_source": "yes"},
        {"remote_kv_source": {"kv_request_id": 5, "remote_host": "127.0.0.1", "remote_port": 1}},
        {"remote_kv_source": {"kv_request_id": "x", "remote_host": "127.0.0.1", "remote_port": "99999"}},
        {"remote_prefiller": {"kv_request_id": "x"}, "remote_kv_source": {"kv_request_id": "x"}},
        {"remote_decoder": []},
    ):
        answers_as_before(source, params, blocks=2)
    assert source.metric("kvpull_sources_ignored_total", reason="malformed") >= 5


def test_whatever_a_stranger_sends(source: PullEngine, consumer: PullEngine) -> None:
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\x05\xff\xff\xff\xff\xff",
        b"\xff" * 4096,
        b"\0\0\0\x01\x80",
    ):
        with socket.create_connection(("127.0.0.1", source.p2p_port), timeout=60) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                while connection.recv(4096):
                    pass
    ids, before = fresh(12), received(consumer)
    source.complete(ids)
    consumer.complete(ids, params=consumer.pull_from(source))
    assert received(consumer) - before == 12 * BLOCK_BYTES
    until(lambda: source.metric("kvpull_handshakes_unfinished_total") >= 1)
    until(lambda: source.metric("kvpull_peer_refused_total", reason="auth") >= 4)


def test_an_engine_with_other_weights_is_refused_by_name(
    others: dict[str, PullEngine], consumer: PullEngine, reports: Reports
) -> None:
    stranger, ids = others["stranger"], fresh(12)
    stranger.complete(ids)
    before = received(consumer)
    assert len(consumer.complete(ids, params=consumer.pull_from(stranger, "other")).tokens) == 8
    assert reports.of("other").reason == "refused_identity"
    assert received(consumer) == before
    assert consumer.metric("kvpull_peer_refused_total", reason="revision") >= 1
    until(lambda: stranger.metric("kvpull_peer_refused_total", reason="revision") >= 1)


def test_a_block_with_a_wrong_checksum_is_not_used(
    others: dict[str, PullEngine], consumer: PullEngine, reports: Reports
) -> None:
    torn, ids, before = others["torn"], fresh(12), received(consumer)
    torn.complete(ids)
    own = torn.complete(ids)
    pulled = consumer.complete(ids, params=consumer.pull_from(torn, "torn"))
    told = reports.of("torn")
    assert (told.reason, told.received_tokens) == ("checksum", 5 * BLOCK_TOKENS)
    assert received(consumer) - before == 5 * BLOCK_BYTES
    assert pulled.cached == 5 * BLOCK_TOKENS
    assert pulled.tokens == own.tokens


def test_a_source_killed_in_the_middle_of_a_pull(
    others: dict[str, PullEngine], consumer: PullEngine, reports: Reports
) -> None:
    """Its bytes may still be on the way: what they would be written into is not reused before its time."""
    victim, ids, before = others["victim"], fresh(16), received(consumer)
    victim.complete(ids)
    own = victim.complete(ids)
    chunks = consumer.metric("kvpull_chunks_total", direction="in")
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(consumer.complete, ids, params=consumer.pull_from(victim, "killed"))
        until(lambda: consumer.metric("kvpull_chunks_total", direction="in") > chunks)
        for pid in processes_of(victim.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        answer = asked.result()
    assert answer.tokens == own.tokens
    assert reports.of("killed").reason == "disconnected"
    assert received(consumer) == before
    assert answer.cached == 0

    until(lambda: consumer.metric("kvpull_quarantined_slots") == 0)
    again = consumer.complete(ids)
    assert again.tokens == own.tokens


def test_the_tier_has_no_name(source: PullEngine) -> None:
    """So no kind of stop leaves a file in /dev/shm."""
    names = set()
    for pid in processes_of(source.process.pid):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                names.add(os.readlink(entry))
    tiers = {name for name in names if "vllm_offload" in name}
    assert tiers
    assert all(name.endswith(" (deleted)") for name in tiers)
