"""Where these tests run: in our double, or in the real cluster that `tests.kube.cluster` was told to use."""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster, NotMeant, chosen_kubeconfig, own_namespace
from tests.kube.rbac import ADMIN
from tests.kube.server import kube_server
from tests.kube.tls import write_certificate


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    try:
        chosen = chosen_kubeconfig(os.environ)
    except NotMeant as error:
        pytest.fail(str(error), pytrace=False)
    if chosen is not None:
        async with own_namespace(chosen, tmp_path) as cluster:
            yield cluster
        return
    authority, tls = write_certificate(tmp_path)
    async with kube_server(tls=tls, bookmark_every_s=1.0) as server:
        token = secrets.token_urlsafe(24)
        server.authority.tokens[token] = ADMIN
        path = server.write_kubeconfig(tmp_path / "admin", token=token, authority=authority)
        async with own_namespace(path, tmp_path) as cluster:
            yield cluster
