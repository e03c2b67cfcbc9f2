"""Which pickers are asked: every address behind a name, once."""

from __future__ import annotations

import argparse
import http.server
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from epp.ops import asking
from epp.ops.asking import ask_all, picker_urls

_REAL = socket.getaddrinfo


def named(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> None:
    """`replicas` -> replicas.test, with these addresses."""

    def resolve(host: str, port: int, *rest: Any, **more: Any) -> list[Any]:
        known = names.get(host.removesuffix(".test"))
        if known is None:
            return _REAL(host, port, *rest, **more)
        if not known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        family = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(family[":" in a], socket.SOCK_STREAM, 6, "", (a, port)) for a in known]

    monkeypatch.setattr(asking.socket, "getaddrinfo", resolve)


def test_a_name_with_several_addresses_is_several_pickers(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1", "fd00::2"]
    named(monkeypatch, replicas=both, six=["fd00::2", "fd00::1"], one=["10.0.0.9", "fd00::9"], none=[])
    assert picker_urls(["http://replicas.test:9090/"]) == ["http://10.0.0.1:9090", "http://10.0.0.2:9090"]
    assert picker_urls(["http://six.test:9090"]) == ["http://[fd00::1]:9090", "http://[fd00::2]:9090"]
    for url in (
        "http://one.test:9090",
        "http://none.test:9090",
        "https://replicas.test",
        "http://127.0.0.1:1",
    ):
        assert picker_urls([url]) == [url]
    assert picker_urls(["http://one.test:1", "http://replicas.test"]) == [
        "http://one.test:1",
        "http://10.0.0.1",
        "http://10.0.0.2",
    ]
    assert picker_urls(None) == [asking.DEFAULT_URL]


class _Replica(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        said = json.dumps({"host": self.server.server_address[0], "token": self.headers["authorization"]})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(said.encode())

    def log_message(self, *_: object) -> None:
        return None


def test_each_of_them_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = http.server.HTTPServer(("127.0.5.1", 0), _Replica)
    second = http.server.HTTPServer(("127.0.5.2", first.server_address[1]), _Replica)
    threads = [threading.Thread(target=server.serve_forever) for server in (first, second)]
    for thread in threads:
        thread.start()
    named(monkeypatch, replicas=["127.0.5.2", "127.0.5.1"])
    (tmp_path / "token").write_text("secret")
    url = f"http://replicas.test:{first.server_address[1]}"
    try:
        wanted = argparse.Namespace(
            url=[url], token_file=tmp_path / "token", timeout=30.0, ca_file=None, client_cert_dir=None
        )
        answers = list(ask_all(wanted, "/debug/kvpull/endpoints"))
    finally:
        for server, thread in zip((first, second), threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()
    assert [answer.body for answer in answers] == [
        {"host": host, "token": "Bearer secret"} for host in ("127.0.5.1", "127.0.5.2")
    ]
