"""The cache salt that the gateway vouches for, in the place of the client's.

Why: engines take `cache_salt` from the body, so whoever knows another tenant's shares its cache. Where
`--cache-salt-header` names a header that the gateway sets from who the caller is, every body gets the salt
that follows from it; what the client wrote is gone, and the body that is matched is the body that is sent.
A body that may carry a salt and cannot be changed is refused: it must never pass as it came.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import orjson

from epp.core.errors import BadRequest, BodyTooLarge, UnsupportedBody
from epp.request.body import check_size, load_lenient
from epp.request.decode import content_encodings, decode_body
from epp.request.parse import has_prompts
from epp.request.prompts import NoPrompt, Reason
from epp.request.shapes.vllm_grpc import GRPC_PATHS
from sidecar.json_bytes import without_top_members

SALT_FIELD: Final = "cache_salt"
HEADER, MISSING, AMBIGUOUS = "header", "missing", "ambiguous"
_LOST: Final = "\ufffd"
INLINE_BYTES: Final = 8 << 10  # a larger body is changed in a thread: 2 ms where all of it is tiny values
_DOMAIN: Final = b"kvpull cache salt of a tenant\x00"
_OBJECT_START: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
# letters of a member's name can be written so, and so the name can hide
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[5-7]")
_WINDOW_BYTES: Final = 1 << 20  # searched at a time: the loop may want the interpreter
_OVERLAP_BYTES: Final = 16
_NAME: Final = SALT_FIELD.encode()
_MAX_ESCAPES: Final = 100_000  # in texts: passing over them is one call, 10 ms
_LEAVE_OUT: Final = "the body is too large for its cache_salt to be replaced; leave that field out"


@dataclass(frozen=True, slots=True)
class TrustedSalt:
    """`header` (lower case) names the tenant. With a pool `key` nobody else can compute a tenant's salt, so a
    request that gets past the picker cannot use it either."""

    header: str
    key: bytes | None = field(default=None, repr=False)

    def salt_of(self, values: Sequence[str]) -> tuple[str, str]:
        """The salt of a request with these `values` of the header, and where it is from. Without exactly one
        value nobody vouches for the caller: the salt is random, and shares nothing with anybody. Nor does one
        whose bytes are no UTF-8, of which some were lost."""
        if len(values) > 1 or any(_LOST in value for value in values):
            return secrets.token_hex(32), AMBIGUOUS
        tenant = values[0].strip() if values else ""
        if not tenant:
            return secrets.token_hex(32), MISSING
        digest = hmac.new(self.key or b"", _DOMAIN + tenant.encode(), hashlib.sha256)
        return digest.hexdigest(), HEADER


def salted_body(body: bytes, path: str, headers: Mapping[str, str], salt: str) -> bytes | None:
    """`body` with `salt` (letters and digits) as its only `cache_salt`, decoded where it was compressed;
    everything else stays as it was written. None: no JSON object, nor a path that wants one; it goes on as it
    came. Blocks for long bodies.

    Raises:
        BadRequest: broken JSON. No message shows the body.
        BodyTooLarge: too large to be read, and it may carry a salt of its own.
        UnsupportedBody: compressed in a way that is not read; a gRPC call, which cannot carry a salt.
    """
    if path.endswith(GRPC_PATHS):
        raise UnsupportedBody("calls of the engine's gRPC API cannot carry a cache salt")
    if not has_prompts(path) and not _may_be_json(headers):
        return None
    plain = _decoded(body, headers)
    try:
        check_size(plain)
    except NoPrompt:
        return _salted_unread(plain, salt)
    return _salted_read(plain, salt)


def _may_be_json(headers: Mapping[str, str]) -> bool:
    """Whether any engine might take it for JSON: of several types one reads the first, another the last."""
    return "json" in headers.get("content-type", "json").lower()


def _decoded(body: bytes, headers: Mapping[str, str]) -> bytes:
    encodings = content_encodings(headers.get("content-encoding", ""))
    if not encodings:
        return body
    try:
        return decode_body(body, encodings)
    except NoPrompt as reason:
        if reason.reason is Reason.DECODED_SIZE:
            raise BodyTooLarge("the compressed body is too large for its cache salt to be set") from None
        raise UnsupportedBody("the body's content-encoding cannot be read") from None


def _salted_read(body: bytes, salt: str) -> bytes | None:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return _salted_lenient(body, salt, error)
    if not isinstance(fields, dict):
        return None
    if SALT_FIELD in fields:
        if body.count(b"\\") > _MAX_ESCAPES:
            raise BodyTooLarge(_LEAVE_OUT)
        body = without_top_members(body, SALT_FIELD)
    return _inserted(body, salt)


def _salted_lenient(body: bytes, salt: str, strict_error: orjson.JSONDecodeError) -> bytes | None:
    """What only the engine's own parser reads (UTF-16, NaN, lone surrogates): its values, written anew."""
    try:
        fields = load_lenient(body, strict_error)
        return json.dumps(fields | {SALT_FIELD: salt}).encode() if isinstance(fields, dict) else None
    except NoPrompt as reason:
        if reason.reason is Reason.LENIENT_JSON_SIZE:
            raise BodyTooLarge("the body is too large for its cache salt to be set") from None
        raise BadRequest("the body is not JSON that can be read") from None
    except RecursionError:
        raise BadRequest("the body is not JSON that can be read") from None


def _salted_unread(body: bytes, salt: str) -> bytes:
    """Of a body that would stop the loop: nothing in it may be a salt's name, however it is written."""
    for start in range(0, len(body), _WINDOW_BYTES):
        end = start + _WINDOW_BYTES + _OVERLAP_BYTES
        if body.find(_NAME, start, end) >= 0 or _ESCAPED_LETTER.search(body, start, end):
            raise BodyTooLarge(_LEAVE_OUT)
    return _inserted(body, salt)


def _inserted(body: bytes, salt: str) -> bytes:
    """As the first member."""
    start = _OBJECT_START.match(body)
    following = b"" if start is None else body[start.end() : start.end() + 1]
    if start is None or following in (b"\0", b""):  # another encoding than UTF-8
        raise BodyTooLarge("the body is too large for its cache salt to be set")
    comma = b"" if following == b"}" else b","
    member = f'"{SALT_FIELD}":"{salt}"'.encode()
    return b"".join((body[: start.end()], member, comma, memoryview(body)[start.end() :]))
