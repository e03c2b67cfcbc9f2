"""What can go wrong in the sidecar, each with the HTTP status and a stable reason.

One root, so that the request boundary turns every expected fault into one vLLM-shaped JSON answer
and anything else is a fault of ours. A peer's fault and our own are different types.
"""

from __future__ import annotations

from typing import Any

import orjson


class SidecarError(Exception):
    """Root of all expected faults of one request."""

    status = 500
    reason = "internal"
    type = "InternalServerError"

    def body(self) -> dict[str, Any]:
        """The answer in the form vLLM uses."""
        return {
            "object": "error",
            "message": str(self),
            "type": self.type,
            "param": None,
            "code": self.status,
        }


def json_body(error: SidecarError) -> bytes:
    """What the client gets."""
    return orjson.dumps(error.body())


class NotHttp(SidecarError):
    """What arrived is not a request in HTTP/1.1."""

    reason = "not_http"
    type = "BadRequestError"

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class RoutingRefused(SidecarError):
    """The prefill endpoint a header names is not one this sidecar may talk to."""

    status = 403
    reason = "routing_refused"
    type = "ForbiddenError"


class TargetInvalid(SidecarError):
    """The request target is not a path that can be passed on."""

    status = 400
    reason = "target_invalid"
    type = "BadRequestError"


class BodyInvalid(SidecarError):
    """The body has to be read here and is not JSON."""

    status = 400
    reason = "body_invalid"
    type = "BadRequestError"


class BodyEncoded(SidecarError):
    """The body has to be read here and is compressed."""

    status = 415
    reason = "body_encoded"
    type = "BadRequestError"


class BodyTooLarge(SidecarError):
    """The body has to be held in memory and is over the limit."""

    status = 413
    reason = "body_too_large"
    type = "BadRequestError"


class BodyTooSlow(SidecarError):
    """The client did not send its body in time."""

    status = 408
    reason = "body_too_slow"
    type = "BadRequestError"


class ShuttingDown(SidecarError):
    """This sidecar is about to end: the request belongs to another endpoint."""

    status = 503
    reason = "draining"
    type = "ServiceUnavailableError"


class UpstreamError(SidecarError):
    """An engine (own or remote) did not answer; nothing of an answer was received."""

    status = 502
    reason = "bad_gateway"
    type = "BadGatewayError"


class UpstreamUnreachable(UpstreamError):
    """No connection: refused, no route, or not established in time."""

    status = 503
    reason = "unreachable"
    type = "ServiceUnavailableError"


class UpstreamTimeout(UpstreamError):
    """Connected, but no answer within the deadline."""

    status = 504
    reason = "timeout"
    type = "GatewayTimeoutError"


class UpstreamDied(UpstreamError):
    """The connection ended before the answer began."""

    reason = "disconnected"


class UpstreamGarbage(UpstreamError):
    """What came back is not HTTP, or is more than may be held."""

    reason = "garbage"


class PrefillParamsInvalid(UpstreamError):
    """The prefill endpoint answered with kv_transfer_params that our engine must not follow."""

    reason = "params_invalid"

    def __init__(self, what: str) -> None:
        super().__init__(f"kv_transfer_params of the prefill endpoint's answer: {what}")


class StreamBroken(Exception):
    """An answer that had begun to reach the client ended early; no status can tell any more."""
