"""Who may do what: tokens, Roles and their bindings, as the objects in the store say."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.kube import kinds
from tests.kube.status import ApiFault
from tests.kube.store import Store

ADMIN = "system:admin"


@dataclass(frozen=True)
class Access:
    """One thing that somebody wants to do."""

    verb: str
    group: str
    plural: str
    namespace: str
    name: str


class Authority:
    """Tokens that are known, and the rules their users have. Without a token everybody is the admin."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.tokens: dict[str, str] = {}
        self._issued_for: dict[str, tuple[str, str, str]] = {}  # token -> namespace, account, its uid
        self.anonymous = ""  # who asks without a token; "": nobody may (kubectl sends none over plain HTTP)

    def issue(self, namespace: str, account: str) -> str:
        """A new token of a ServiceAccount. From now on the server wants one of everybody."""
        token = secrets.token_urlsafe(24)
        self.tokens[token] = f"system:serviceaccount:{namespace}:{account}"
        if uid := self._uid(namespace, account):
            self._issued_for[token] = (namespace, account, uid)
        return token

    def _uid(self, namespace: str, account: str) -> str:
        found = self._store.table(kinds.SERVICE_ACCOUNTS.key).objects.get((namespace, account))
        return str(found["metadata"]["uid"]) if found else ""

    def user(self, authorization: str) -> str:
        """Raises ApiFault 401 for a token that is unknown, or no more."""
        if not self.tokens:
            return ADMIN
        if not authorization and self.anonymous:
            return self.anonymous
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        namespace, account, uid = self._issued_for.get(token, ("", "", ""))
        ended = bool(uid) and self._uid(namespace, account) != uid  # the account is gone, or is another one
        if scheme.lower() != "bearer" or token not in self.tokens or ended:
            raise ApiFault(401, "Unauthorized", "Unauthorized")
        return self.tokens[token]

    def check(self, user: str, access: Access) -> None:
        """Raises ApiFault 403 in an API server's words."""
        if user == ADMIN or any(_allows(rule, access) for rule in self._rules(user, access.namespace)):
            return
        qualified = f"{access.plural}.{access.group}" if access.group else access.plural
        where = f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
        raise ApiFault(
            403,
            "Forbidden",
            f'{qualified} is forbidden: User "{user}" cannot {access.verb} resource "{access.plural}" in API '
            f'group "{access.group}" {where}',
            details={"group": access.group, "kind": access.plural},
        )

    def _rules(self, user: str, namespace: str) -> Iterator[dict[str, Any]]:
        for binding in self._store.table(kinds.CLUSTER_ROLE_BINDINGS.key).objects.values():
            if _binds(binding, user):
                yield from self._of_role(binding, "")
        for (where, _), binding in self._store.table(kinds.ROLE_BINDINGS.key).objects.items():
            if where == namespace and _binds(binding, user):
                yield from self._of_role(binding, where)

    def _of_role(self, binding: dict[str, Any], namespace: str) -> Iterator[dict[str, Any]]:
        ref = binding["roleRef"]
        kind = kinds.CLUSTER_ROLES if ref["kind"] == "ClusterRole" else kinds.ROLES
        where = namespace if kind.namespaced else ""
        yield from self._store.table(kind.key).objects.get((where, ref["name"]), {}).get("rules") or ()


def _binds(binding: dict[str, Any], user: str) -> bool:
    for subject in binding.get("subjects") or ():
        if subject["kind"] == "ServiceAccount":
            name = f"system:serviceaccount:{subject.get('namespace')}:{subject['name']}"
        else:
            name = subject["name"]
        if name == user:
            return True
    return False


def _allows(rule: dict[str, Any], access: Access) -> bool:
    def has(field: str, value: str) -> bool:
        return bool({"*", value} & set(rule.get(field) or ()))

    names = rule.get("resourceNames")
    return (
        has("verbs", access.verb)
        and has("apiGroups", access.group)
        and has("resources", access.plural)
        and (not names or access.name in names)
    )
