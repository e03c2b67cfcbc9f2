"""What can go wrong between us and an API server. One sentence each, without tokens or object contents."""

from __future__ import annotations

import re

_USER = re.compile(r'User "([^"]{1,300})"')
_SERVICE_ACCOUNT = "system:serviceaccount:"


class KubeError(Exception):
    """Root. `retry_after_s` is what the server asked for, 0 for nothing."""

    retry_after_s = 0.0


class AccessError(KubeError):
    """There is no API server that we could talk to: no configuration, or one that cannot be used."""


class Unreachable(KubeError):
    """No answer, a broken connection, or one on which nothing has arrived for too long."""


class Malformed(KubeError):
    """An answer that is not what an API server says."""


class ApiFailure(KubeError):
    """An answer with a status of 400 or more."""

    def __init__(self, sentence: str, code: int, *, retry_after_s: float = 0.0) -> None:
        super().__init__(sentence)
        self.code = code
        self.retry_after_s = retry_after_s


class Expired(ApiFailure):
    """410: the revision or the continue token is no longer known; list again."""


class Unauthorised(ApiFailure):
    """401: the credentials are not, or no longer, accepted."""


class Denied(ApiFailure):
    """403: a rule is missing. The sentence names verb, resource, namespace and who was refused."""


_BY_CODE: dict[int, type[ApiFailure]] = {401: Unauthorised, 403: Denied, 410: Expired}


def failure(
    code: int,
    message: str,
    *,
    verb: str,
    resource: str,
    namespace: str,
    version: str = "",
    retry_after_s: float = 0.0,
) -> ApiFailure:
    """The error for a status. `resource`: `pods` or `leases.coordination.k8s.io`; `version`: `v1`."""
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    if code == 403:
        sentence = (
            f"{_who(message)} may not {verb} {resource} {where}: grant it by a Role and a RoleBinding there"
        )
    elif code == 404 and verb in ("list", "watch"):
        kind = f"{version} of this kind (is its CRD installed, in that version?)"
        sentence = f"{verb} {resource} {where}: the server does not serve {kind}"
    else:
        sentence = f"{verb} {resource} {where}: {code} {message[:200]}"
    return _BY_CODE.get(code, ApiFailure)(sentence, code, retry_after_s=retry_after_s)


def _who(message: str) -> str:
    found = _USER.search(message)
    if found is None:
        return "this process"
    user = found[1]
    if user.startswith(_SERVICE_ACCOUNT):
        return f"ServiceAccount {user.removeprefix(_SERVICE_ACCOUNT).replace(':', '/', 1)}"
    return f"user {user}"
