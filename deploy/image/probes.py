"""Started containers, asked as a cluster asks them: probes, one placement, one request through the sidecar.

The picker speaks TLS with the certificate that it makes itself; the placement is a real ext-proc stream.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import ssl
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.image.container import Container, running, runtime_faults
from epp.extproc import wire

_HOST = "127.0.0.1"
_START_S = 120.0
_ASK_S = 30.0
_BODY = json.dumps({"model": "m", "prompt": "Where do I run?", "max_tokens": 1}).encode()
_ENDPOINT = f"{_HOST}:1"  # nobody is there; to be placed is enough
_CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: active-request-scorer}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
"""


class ProbeFailed(Exception):
    """A container that does not do what its pod relies on; the message ends with what it said."""


def probe_epp(root: Path, image: Mapping[str, Any]) -> list[str]:
    """Sentences of what was seen. Raises ProbeFailed."""
    serving, health, metrics = free_ports(3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "epp.yaml").write_text(_CONFIG)
        row = {"pod": "engine-a", "rank": 0, "host": _HOST, "serving_port": 1}
        (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": [row]}))
        arguments = ["--config-file=/etc/kvpull/epp.yaml", "--endpoints-file=/etc/kvpull/endpoints.yaml"]
        arguments += [f"--listen-host={_HOST}", f"--grpc-port={serving}", f"--grpc-health-port={health}"]
        arguments += [f"--metrics-port={metrics}", "--secure-serving=true", "--lame-duck=0s"]
        with started("kvpull-epp", root, image, arguments, folder) as container:
            begun = time.monotonic()
            wait("readiness", container, lambda: _serving(health, "readiness"))
            seen = [f"ready after {time.monotonic() - begun:.1f} s"]
            check(_serving(health, "liveness"), container, "liveness is not serving")
            check("compiled" in container.said(), container, "the index is not the compiled one")
            page = _get(f"http://{_HOST}:{metrics}/metrics")
            check(b"kvpull_epp_" in page, container, "no metrics")
            placed = _place(serving)
            check(placed == _ENDPOINT, container, f"placed at {placed!r}")
            for command in ("doctor", "calibrate", "size", "thresholds"):
                done = container.execute("kvpull", command, "--help")
                check(done.returncode == 0, container, f"kvpull {command}: {done.stderr[-300:]}")
            check_runtime(container)
            seen += [f"a request over TLS is placed; resident {resident_mib(container)} MiB"]
            return [*seen, *ends(container)]


def probe_sidecar(root: Path, image: Mapping[str, Any]) -> list[str]:
    """Sentences of what was seen. Raises ProbeFailed."""
    port, metrics = free_ports(2)
    with _engine() as engine, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        arguments = [f"--port={port}", f"--model-server-port={engine}", f"--metrics-port={metrics}"]
        arguments += [f"--listen-host={_HOST}", f"--model-server-host={_HOST}", "--secure-proxy=false"]
        arguments += ["--enable-ssrf-protection=false"]
        with started("kvpull-sidecar", root, image, arguments, folder) as container:
            begun = time.monotonic()
            wait("its port", container, lambda: b"ok" in _get(f"http://{_HOST}:{port}/health"))
            seen = [f"serves after {time.monotonic() - begun:.1f} s"]
            echoed = _get(f"http://{_HOST}:{port}/v1/completions", _BODY)
            check(json.loads(echoed) == json.loads(_BODY), container, f"the engine got {echoed!r}")
            page = _get(f"http://{_HOST}:{metrics}/metrics")
            check(b"kvpull_sidecar_" in page, container, "no metrics")
            check_runtime(container)
            seen += [f"a request reaches the engine; resident {resident_mib(container)} MiB"]
            return [*seen, *ends(container)]


def started(
    name: str, root: Path, image: Mapping[str, Any], arguments: list[str], folder: Path
) -> contextlib.AbstractContextManager[Container]:
    """With `folder` where a pod has its configuration."""
    return running(name, root, image, arguments, {"/etc/kvpull": folder})


def check(holds: bool, container: Container, sentence: str) -> None:
    """Raises ProbeFailed with the sentence unless it holds."""
    if not holds:
        raise ProbeFailed(f"{container.name}: {sentence}\n{container.said()[-3000:]}")


def wait(what: str, container: Container, holds: Callable[[], bool]) -> None:
    """Until it holds. Raises ProbeFailed: it ended before, or two minutes are over."""
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, grpc.RpcError):
            if holds():
                return
        check(container.process.poll() is None, container, f"ended before {what} was seen")
        time.sleep(0.1)
    check(False, container, f"{what} was not seen in {_START_S:g} s")


def check_runtime(container: Container) -> None:
    """User, capabilities, and a root that cannot be written."""
    check(not (faults := runtime_faults(container)), container, "; ".join(faults))


def resident_mib(container: Container) -> int:
    """Memory of its first process now."""
    text = Path(f"/proc/{container.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) >> 10


def ends(container: Container) -> list[str]:
    """It obeys SIGTERM."""
    begun = time.monotonic()
    status = container.stop()
    check(status == 0, container, f"SIGTERM ended it with {status}")
    return [f"SIGTERM ends it in {time.monotonic() - begun:.1f} s"]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind((_HOST, 0))
        return [int(found.getsockname()[1]) for found in sockets]


def _get(url: str, body: bytes | None = None) -> bytes:
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=_ASK_S) as answer:
        found: bytes = answer.read()
    return found


def _serving(port: int, service: str) -> bool:
    with grpc.insecure_channel(f"{_HOST}:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=_ASK_S)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _place(port: int) -> str:
    """Where the picker sends one request; the gateway's part is played here."""
    pem = ssl.get_server_certificate((_HOST, port)).encode()
    credentials = grpc.ssl_channel_credentials(pem)
    options = [("grpc.ssl_target_name_override", "localhost")]
    with grpc.secure_channel(f"{_HOST}:{port}", credentials, options=options) as channel:
        stream = channel.stream_stream(
            f"/{wire.SERVICE_NAME}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )(_request(), timeout=_ASK_S)
        for answer in stream:
            for header in answer.request_headers.response.header_mutation.set_headers:
                if header.header.key == wire.DESTINATION:
                    return str(header.header.raw_value.decode())
    return ""


def _request() -> Iterator[pb.ProcessingRequest]:
    head, body = pb.ProcessingRequest(), pb.ProcessingRequest()
    for name, value in ((":method", "POST"), (":path", "/v1/completions"), ("x-request-id", "probe")):
        header = head.request_headers.headers.headers.add()
        header.key, header.raw_value = name, value.encode()
    body.request_body.body, body.request_body.end_of_stream = _BODY, True
    yield from (head, body)


@contextlib.contextmanager
def _engine() -> Iterator[int]:
    """Answers every request with its body; yields the port."""
    server = http.server.ThreadingHTTPServer((_HOST, 0), _Echo)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""
