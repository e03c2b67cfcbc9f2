"""What can go wrong in the core, each with the HTTP status and the stable reason a client sees.

Missing cache data is never an error here: it means "no match".
"""

from __future__ import annotations


class PickerError(Exception):
    """Root of all errors of the picker; `status` and `reason` are what the gateway answers with."""

    status: int = 500
    reason: str = "internal"


class NoEndpoints(PickerError):
    """The pool is empty, nothing is ready, or no endpoint is in the subset."""

    status = 503
    reason = "rejected-no-endpoints"


class Saturated(PickerError):
    """There is no room for this request, nor to let it wait."""

    status = 429
    reason = "rejected-saturated"


class WaitedTooLong(PickerError):
    """Its time to wait is over, and the pool still has no room."""

    status = 429
    reason = "rejected-ttl-expired"


class BadRequest(PickerError):
    """The request cannot be parsed. The message never echoes the prompt."""

    status = 400
    reason = "bad-request"


class BodyTooLarge(PickerError):
    """It has to be changed on its way, and is too large to be read."""

    status = 413
    reason = "payload-too-large"


class UnsupportedBody(PickerError):
    """It has to be changed on its way, and is of a kind that cannot be."""

    status = 415
    reason = "unsupported-body"


class NotCached(PickerError):
    """The client wants an answer from cache or none (`Prefer: if-available`), and no cache has it."""

    status = 412
    reason = "not-cached"


class ConfigError(ValueError):
    """A configuration that must not start; the message names the path and what is allowed."""
