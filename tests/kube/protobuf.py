"""Bodies that typed Go clients (helm's release store) send as protobuf: Secrets, ConfigMaps, options.

Just enough of the wire format for these; everything else is refused, as by a server that lacks it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from tests.kube.status import ApiFault, bad_request

MAGIC = b"k8s\0"
_TEXTS = {1: "name", 2: "generateName", 3: "namespace", 5: "uid", 6: "resourceVersion"}
_MAPS = {11: "labels", 12: "annotations"}


def decode(body: bytes) -> dict[str, Any]:
    """The object in a `runtime.Unknown` envelope."""
    envelope = dict(_fields(body[len(MAGIC) :]))
    meta = dict(_fields(envelope[1]))
    kind = meta[2].decode()
    obj: dict[str, Any] = {"apiVersion": meta[1].decode(), "kind": kind}
    if kind == "DeleteOptions":
        return obj
    if kind == "Namespace":
        return obj | {"metadata": _meta(dict(_fields(envelope[2]))[1])}
    if kind not in ("Secret", "ConfigMap"):
        raise ApiFault(415, "UnsupportedMediaType", f"protobuf {kind} is not supported here; send JSON")
    return obj | _content(envelope[2], secret=kind == "Secret")


def _content(raw: bytes, *, secret: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"metadata": {}}
    for number, value in _fields(raw):
        if number == 1:
            found["metadata"] = _meta(value)
        elif number == 2:
            key, item = _entry(value)
            text = base64.b64encode(item).decode() if secret else item.decode()
            found.setdefault("data", {})[key] = text
        elif number == 3 and secret:
            found["type"] = value.decode()
    return found


def _meta(raw: bytes) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for number, value in _fields(raw):
        if number in _TEXTS and value:
            meta[_TEXTS[number]] = value.decode()
        elif number in _MAPS:
            key, item = _entry(value)
            meta.setdefault(_MAPS[number], {})[key] = item.decode()
    return meta


def _entry(raw: bytes) -> tuple[str, bytes]:
    pair = dict(_fields(raw))
    return pair.get(1, b"").decode(), pair.get(2, b"")


def _fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every field; numbers are of no interest and are skipped."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        match tag & 7:
            case 0:
                _, at = _varint(raw, at)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                size, at = _varint(raw, at)
                yield tag >> 3, raw[at : at + size]
                at += size
            case wire_type:
                raise bad_request(f"protobuf wire type {wire_type}")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
