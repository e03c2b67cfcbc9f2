"""Refusals in the shape in which vLLM's OpenAI server answers them. Messages never echo prompts."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Answered as `{"error": {message, type, param, code}}` with `status`."""

    def __init__(
        self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param

    def as_json(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


def not_found(message: str, param: str | None = None) -> ApiError:
    return ApiError(message, status=404, kind="NotFoundError", param=param)


def unavailable(message: str) -> ApiError:
    return ApiError(message, status=503, kind="ServiceUnavailableError")
