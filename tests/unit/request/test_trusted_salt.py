"""S-H03: the salt that the gateway vouches for is the only one in a body, whatever the client wrote."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.core.errors import BadRequest, BodyTooLarge, UnsupportedBody
from epp.request.body import MAX_PARSED_BYTES
from epp.request.trusted_salt import AMBIGUOUS, HEADER, MISSING, TrustedSalt, salted_body

SALT = "0123abcd"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MEMBER = b'"cache_salt":"0123abcd"'


def salted(body: bytes, path: str = CHAT, **headers: str) -> bytes | None:
    given_headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return salted_body(body, path, JSON | given_headers, SALT)


def pairs(body: bytes | None) -> list[tuple[str, Any]]:
    """Members as they stand, duplicates too."""
    assert body is not None
    found: list[tuple[str, Any]] = json.loads(body, object_pairs_hook=list)
    return found


# --- whose salt -----------------------------------------------------------------------------------
def test_a_tenant_has_one_salt_and_no_other_tenant_has_it() -> None:
    trusted = TrustedSalt("x-tenant")
    acme, source = trusted.salt_of(["acme"])
    assert source == HEADER
    assert acme == TrustedSalt("x-other-header").salt_of([" acme "])[0]
    assert acme != trusted.salt_of(["acme2"])[0]
    assert len(acme) == 64
    assert acme.isalnum()  # an engine refuses "/", "@" and more than 128 letters, tenants may have them
    assert trusted.salt_of(["team/a@b" * 100])[0].isalnum()


def test_with_a_key_nobody_else_can_compute_it() -> None:
    keyed = {TrustedSalt("h", key).salt_of(["acme"])[0] for key in (None, b"k" * 32, b"l" * 32)}
    assert len(keyed) == 3
    assert TrustedSalt("h", b"k" * 32).salt_of(["acme"])[0] in keyed  # replicas agree
    assert "acme" not in "".join(keyed)
    assert b"k" * 32 not in repr(TrustedSalt("h", b"k" * 32)).encode()


@pytest.mark.parametrize(
    ("values", "source"),
    [
        ([], MISSING),
        ([""], MISSING),
        (["  "], MISSING),
        (["acme", "acme"], AMBIGUOUS),
        (["", "acme"], AMBIGUOUS),
        ([b"caf\xe9".decode("utf-8", "replace")], AMBIGUOUS),  # or another letter: nobody knows,
    ],
)
def test_without_one_word_of_the_gateway_a_request_shares_with_nobody(values: list[str], source: str) -> None:
    trusted = TrustedSalt("x-tenant")
    salts = {trusted.salt_of(values) for _ in range(8)}
    assert len(salts) == 8
    assert {came_from for _, came_from in salts} == {source}
    assert trusted.salt_of(["acme"])[0] not in {salt for salt, _ in salts}


# --- where it goes --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": 1.10}', b"{" + MEMBER + b',"a": 1.10}'),
        (b" {\n }", b" {\n " + MEMBER + b"}"),
        (b'{"cache_salt": "theirs"}', b"{" + MEMBER + b"}"),
        (b'{"a": 1, "cache_salt": null, "b": 2}', b"{" + MEMBER + b',"a": 1, "b": 2}'),
        (b'{"cache_salt":"x","a":[1e2],"cache_salt":["y"]}', b"{" + MEMBER + b',"a":[1e2]}'),
        (b'{"cache\\u005fsalt": "theirs", "a": 1}', b"{" + MEMBER + b',"a": 1}'),
        (b'{"\\u0063\\u0061che_s\\u0061lt": "theirs"}', b"{" + MEMBER + b"}"),
        (b'{"m": {"cache_salt": "a tool\'s"}}', b"{" + MEMBER + b',"m": {"cache_salt": "a tool\'s"}}'),
        (
            b'{"cache_salt":1,"m":[{"cache_salt":2}],"s":"\\"cache_salt\\":3"}',
            b"{" + MEMBER + b',"m":[{"cache_salt":2}],"s":"\\"cache_salt\\":3"}',
        ),
    ],
)
def test_it_is_the_only_one_and_the_rest_stays_as_it_was_written(body: bytes, expected: bytes) -> None:
    assert salted(body) == expected


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["cache_salt", "a", '"', "\\", "ä"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.lists(st.tuples(st.sampled_from(["cache_salt", "messages", "", "ü"]), JSON_VALUES), max_size=6),
    st.booleans(),
)
def test_any_object_keeps_its_other_members_in_order(
    members: list[tuple[str, Any]], ascii_only: bool
) -> None:
    texts = [f"{json.dumps(key)} :{json.dumps(value, ensure_ascii=ascii_only)}" for key, value in members]
    found = pairs(salted(("{" + " , ".join(texts) + " }").encode("utf-8", "surrogatepass")))
    assert found[0] == ("cache_salt", SALT)
    again = json.loads("{" + ",".join(texts) + "}", object_pairs_hook=list)
    assert found[1:] == [pair for pair in again if pair[0] != "cache_salt"]


@pytest.mark.parametrize(
    "body",
    [
        '{"cache_salt": "theirs", "a": 36893488147419103232}'.encode("utf-16"),
        '{"cache_salt": "theirs", "a": 36893488147419103232}'.encode("utf-32-le"),
        b'\xef\xbb\xbf{"cache_salt": "theirs", "a": 36893488147419103232}',
        b'{"cache_salt": "theirs", "a": 36893488147419103232, "b": NaN}',
        b'{"cache_salt": "theirs", "a": 36893488147419103232, "b": "\\ud800"}',
    ],
)
def test_what_only_the_engines_parser_reads_is_written_anew_with_its_values(body: bytes) -> None:
    found = json.loads(salted(body) or b"")
    before = json.loads(body)
    assert found["cache_salt"] == SALT
    assert found["a"] == 36893488147419103232
    assert json.dumps(found | {"cache_salt": 0}) == json.dumps(before | {"cache_salt": 0})


@pytest.mark.parametrize("stack", ["gzip", "gzip, gzip"])
def test_a_compressed_body_goes_on_decoded(stack: str) -> None:
    body = b'{"cache_salt": "theirs", "a": 1}'
    for _ in stack.split(","):
        body = gzip.compress(body)
    assert salted(body, content_encoding=stack) == b"{" + MEMBER + b',"a": 1}'


# --- what may not pass ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "encoding", "error"),
    [
        (gzip.compress(b"{}")[:-9], "gzip", UnsupportedBody),
        (zlib.compress(b"{}"), "deflate", UnsupportedBody),
        (gzip.compress(gzip.compress(gzip.compress(b"{}"))), "gzip,gzip,gzip", UnsupportedBody),
        (gzip.compress(b'{"a":"' + b"z" * (9 << 20) + b'"}'), "gzip", BodyTooLarge),
        (b'{"a":', "", BadRequest),
        (b'{"cache_salt":"theirs"} x', "", BadRequest),
        (b'{"a":' + b"[" * 5000, "", BadRequest),
        (b'{"cache_salt":"theirs","a":' + b"9" * 5000 + b"}", "", BadRequest),
        (b"\xff\xfe\xff", "", BadRequest),
    ],
)
def test_what_cannot_be_changed_is_refused(body: bytes, encoding: str, error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        salted(body, content_encoding=encoding)
    assert "theirs" not in str(refused.value)


def test_a_body_too_large_to_be_read_is_changed_if_it_brings_no_salt_and_refused_otherwise() -> None:
    text = b'"a":"' + b"z" * MAX_PARSED_BYTES + b'"}'
    for start in (b"{", b" \n{ "):
        found = salted(start + text)
        assert found == start + MEMBER + b"," + text
        assert orjson.loads(found)["cache_salt"] == SALT
    ids = b'{"prompt":[' + b",".join([b"[1]"] * 60_000) + b"]}"  # small, and too dense
    assert orjson.loads(salted(ids, "/v1/completions") or b"")["cache_salt"] == SALT
    escapes = b'"a":"' + b"\\n" * 100_001 + b'"}'
    assert salted(b"{" + escapes) == b"{" + MEMBER + b"," + escapes
    for brought in (
        b'{"cache_salt":"theirs",' + text,
        b'{"cache\\u005fsalt":"theirs",' + text,
        b'{"\\u0063ache_salt":"theirs",' + text,
        text[:-1] + b',"cache_salt":"theirs"}',
        b'{"a":"' + b"z" * ((1 << 20) - 12) + b'","cache_salt":"theirs",' + text,  # across two windows
        ids[:-1] + b',"cache_salt":"theirs"}',
        b'{"cache_salt":"theirs","a":"' + b"\\n" * 100_001 + b'"}',
        (b'{"cache_salt":"theirs",' + text).decode().encode("utf-16"),
        (b'{"cache_salt":"theirs",' + text).decode().encode("utf-16-le"),
        (b'{"cache_salt":"theirs",' + text).decode().encode("utf-16-be"),
        b'\xef\xbb\xbf{"cache_salt":"theirs",' + text,
    ):
        with pytest.raises(BodyTooLarge) as refused:
            salted(brought)
        assert "theirs" not in str(refused.value)


def test_a_grpc_call_cannot_carry_one() -> None:
    with pytest.raises(UnsupportedBody):
        salted(b"\x00\x00\x00\x00\x00", "/vllm.grpc.engine.VllmEngine/Generate")


# --- what is left alone ---------------------------------------------------------------------------
@pytest.mark.parametrize("body", [b"[1, 2]", b'"text"', b"7", b"null"])
def test_what_is_no_object_has_no_salt(body: bytes) -> None:
    assert salted(body) is None


def test_other_paths_are_changed_where_they_say_json_and_left_alone_where_not() -> None:
    body = b'{"cache_salt":"theirs","input":"x"}'
    assert salted(body, "/v1/embeddings") == b"{" + MEMBER + b',"input":"x"}'
    for kind in ("multipart/form-data; boundary=x", "audio/wav", "application/octet-stream"):
        assert salted(body, "/v1/audio/transcriptions", content_type=kind) is None
    for kind in (
        "application/json,text/plain",
        "text/plain,application/json",
        "application/x+json; a=b",
        "Json",
    ):
        assert salted(body, "/v1/embeddings", content_type=kind) == b"{" + MEMBER + b',"input":"x"}'
    assert salted_body(body, "/v1/embeddings", {}, SALT) == b"{" + MEMBER + b',"input":"x"}'
    # an engine may read these whatever the type says
    assert salted(body, "/v1/completions", content_type="text/plain") == b"{" + MEMBER + b',"input":"x"}'


HOSTILE = st.sampled_from(
    [
        *(
            b"{",
            b"}",
            b'"',
            b":",
            b",",
            b"[",
            b"]",
            b"\\",
            b"\0",
            b" ",
            b"1",
            b"1e999",
            b"NaN",
            b"{}",
            b"\xc3",
        ),
        *(b"cache_salt", b'"cache_salt":"x"', b'"cache\\u005fsalt"', b"\\u005f", b'{"a":{'),
        *(b"\xef\xbb\xbf", b"\xff\xfe"),
    ]
)


@given(
    st.lists(HOSTILE, max_size=14).map(b"".join), st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32"])
)
def test_no_bytes_reach_an_engine_as_an_object_with_another_salt(raw: bytes, encoding: str) -> None:
    body = raw if encoding == "utf-8" else raw.decode("latin-1").encode(encoding)
    try:
        found = salted(body)
    except (BadRequest, BodyTooLarge):
        return
    read = json.loads(body if found is None else found)  # as the engine does
    assert (read.get("cache_salt") == SALT) if found is not None else not isinstance(read, dict)
