"""Writes one ConfigMap at the API server, for where there is no kubectl: a Job in the cluster.

Keys of the ConfigMap that are not written stay. It never deletes, and never retries a conflict: two who
write one threshold document at the same time should hear of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from sidecar.pool_watch.access import KubeAccess
from sidecar.pool_watch.errors import ApiFailure, Malformed
from sidecar.pool_watch.resources import CONFIG_MAPS, Call

_NOT_FOUND: Final = 404


async def write_config_map(access: KubeAccess, manifest: Mapping[str, Any]) -> str:
    """Create it, or put its data into the one that is there; `created` or `changed`.

    Raises:
        KubeError: a right is missing, somebody else was writing, or the server is away.
    """
    name = str(manifest["metadata"]["name"])
    namespace = str(manifest["metadata"].get("namespace") or access.namespace)
    try:
        raw = await access.read(Call("get", CONFIG_MAPS, namespace, name))
    except ApiFailure as error:
        if error.code != _NOT_FOUND:
            raise
        await access.read(Call("create", CONFIG_MAPS, namespace, body=manifest))
        return "created"
    try:
        found = msgspec.json.decode(raw)
        body = {**found, "data": {**(found.get("data") or {}), **manifest["data"]}}
    except (msgspec.DecodeError, TypeError, AttributeError) as error:
        raise Malformed(f"get {CONFIG_MAPS.qualified}: the answer is not a ConfigMap") from error
    await access.read(Call("update", CONFIG_MAPS, namespace, name, body=body))
    return "changed"
