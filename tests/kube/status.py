"""Failures as an API server words them: `Status` objects."""

from __future__ import annotations

from typing import Any


class ApiFault(Exception):
    """A request that ends with a Status object."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = dict(details or {})
        self.retry_after = retry_after
        if retry_after:
            self.details["retryAfterSeconds"] = retry_after

    def body(self) -> dict[str, Any]:
        """The Status object."""
        status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        status |= {"message": self.message, "reason": self.reason, "code": self.code}
        return status | ({"details": self.details} if self.details else {})


def expired(message: str) -> ApiFault:
    """410: the revision asked for is no longer known."""
    return ApiFault(410, "Expired", message)


def not_found(message: str = "the server could not find the requested resource") -> ApiFault:
    return ApiFault(404, "NotFound", message)


def bad_request(message: str) -> ApiFault:
    return ApiFault(400, "BadRequest", message)
