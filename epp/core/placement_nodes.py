"""The structure under `PlacementTree`: a path-compressed radix tree over chained block keys.

Keys are chained: equal keys at one position mean equal prefixes up to there, as surely as in the index
whose keys they are. So the common prefix of two key arrays is found by bisection, and a walk costs as
much as the path has nodes, not as the prompt has blocks.

It knows nodes, claims and holders, and keeps the counts; when claims begin and end is its owner's
business. It must not know the clock.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from engine_plugin.identity import EndpointId
from epp.core.block_table import require
from epp.core.hashing import PromptKeys


class Claim:
    """A prompt on an endpoint; `expires_at_s` and `placements` grow when it is placed there again. `node`
    is where the prompt ends, None once the claim has ended."""

    __slots__ = ("endpoint", "expires_at_s", "node", "placements")

    def __init__(self, endpoint: EndpointId, expires_at_s: float, node: Node) -> None:
        self.endpoint = endpoint
        self.expires_at_s = expires_at_s
        self.placements = 1
        self.node: Node | None = node


class Node:
    """An edge of at least one key, and what is true at its end; `depth` counts blocks from the root.

    A node has claims that end at it, or several children: any other is merged into its only child.
    `holders`: endpoints with a claim that ends here or below, and the latest expiry of those."""

    __slots__ = ("children", "depth", "ends", "holders", "keys", "parent")

    def __init__(self, parent: Node | None, keys: PromptKeys, depth: int) -> None:
        self.parent = parent
        self.keys = keys  # its own copy
        self.depth = depth
        self.children: dict[int, Node] = {}
        self.holders: dict[EndpointId, float] = {}
        self.ends: dict[EndpointId, Claim] = {}


class PlacementNodes:
    """All nodes and their number, blocks and holder entries; `held`: blocks of each endpoint. Methods say
    whether they mutate."""

    def __init__(self) -> None:
        self._root = Node(None, array("Q"), 0)
        self.count = self.blocks = self.holders = 0
        self.held: Counter[EndpointId] = Counter()

    def path(self, keys: PromptKeys) -> Iterator[tuple[Node, int]]:
        """Nodes that share blocks with the prompt, from the root on, each with the depth that is shared;
        only the last may be shared in part. Mutates nothing."""
        node, at, total = self._root, 0, len(keys)
        while at < total:
            child = node.children.get(keys[at])
            if child is None:
                return
            common = _common(child.keys, keys, at)
            yield child, at + common
            if common < len(child.keys):
                return
            node, at = child, child.depth

    def reach(self, keys: PromptKeys, endpoint: EndpointId, expires_at_s: float) -> list[Node]:
        """Mutates: make a path that ends exactly where the prompt ends, and note on all of it that
        `endpoint` holds it until then. The caller must end a claim at the last node."""
        made: list[Node] = []
        node, at, total = self._root, 0, len(keys)
        while at < total:
            child = node.children.get(keys[at])
            if child is None:
                child = self._add_leaf(node, keys[at:])
            else:
                common = _common(child.keys, keys, at)
                if common < len(child.keys):
                    child = self.split(child, common)
            self._raise(child, endpoint, expires_at_s)
            made.append(child)
            node, at = child, child.depth
        return made

    def _add_leaf(self, parent: Node, keys: PromptKeys) -> Node:
        leaf = parent.children[keys[0]] = Node(parent, keys, parent.depth + len(keys))
        self.blocks += len(keys)
        self.count += 1
        return leaf

    def split(self, node: Node, at: int) -> Node:
        """Mutates: put a node that takes the first `at` keys above `node`, which stays itself, as claims
        name it. The caller must give the new one a claim or a second child."""
        parent = node.parent
        assert parent is not None
        upper = parent.children[node.keys[0]] = Node(parent, node.keys[:at], parent.depth + at)
        upper.holders = dict(node.holders)
        node.keys = node.keys[at:]
        node.parent = upper
        upper.children[node.keys[0]] = node
        self.count += 1
        self.holders += len(upper.holders)
        return upper

    def _raise(self, node: Node, endpoint: EndpointId, expires_at_s: float) -> None:
        known = node.holders.get(endpoint)
        if known is None:
            self.holders += 1
            self.held[endpoint] += len(node.keys)
        if known is None or known < expires_at_s:
            node.holders[endpoint] = expires_at_s

    def release(self, node: Node, claim: Claim) -> None:
        """Mutates: `claim` ends at `node` no more. Corrects the holders from there up, as far as they
        change, and takes out nodes that became superfluous."""
        del node.ends[claim.endpoint]
        while node.parent is not None:
            parent = node.parent
            changed = self._lower(node, claim)
            self._tidy(node)
            if not changed:
                return
            node = parent

    def _lower(self, node: Node, claim: Claim) -> bool:
        """False: others of the endpoint's claims last as long. In a tree whose claims end in order of
        time that is seen without looking at the children."""
        known = node.holders[claim.endpoint]
        if known > claim.expires_at_s:
            return False
        best = _latest(node, claim.endpoint, known)
        if best is None:
            del node.holders[claim.endpoint]
            self.holders -= 1
            self._lose(claim.endpoint, len(node.keys))
        else:
            node.holders[claim.endpoint] = best
        return best != known

    def _tidy(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        if not node.holders:
            del parent.children[node.keys[0]]
            self.blocks -= len(node.keys)
            self.count -= 1
        elif not node.ends and len(node.children) == 1:
            (child,) = node.children.values()
            child.keys = node.keys + child.keys
            child.parent = parent
            parent.children[child.keys[0]] = child
            self.count -= 1
            self.holders -= len(node.holders)  # the child has the same

    def cut(self, node: Node, blocks: int) -> None:
        """Mutates: a leaf loses its last blocks; at least one has to stay."""
        for endpoint in node.holders:
            self._lose(endpoint, blocks)
        del node.keys[-blocks:]
        node.depth -= blocks
        self.blocks -= blocks

    def _lose(self, endpoint: EndpointId, blocks: int) -> None:
        self.held[endpoint] -= blocks
        if not self.held[endpoint]:
            del self.held[endpoint]

    def check_integrity(self) -> set[Claim]:
        """Recount everything; the claims that were found. Raises IndexCorrupt. Slow: for tests."""
        nodes: list[Node] = []
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            _check(node)
            nodes.append(node)
            stack.extend(node.children.values())
        require(self.blocks == sum(len(node.keys) for node in nodes), "the block count is off")
        require(self.count == len(nodes), "the node count is off")
        require(self.holders == sum(len(node.holders) for node in nodes), "the holder count is off")
        held: Counter[EndpointId] = Counter()
        for node in nodes:
            held.update(dict.fromkeys(node.holders, len(node.keys)))
        require(self.held == held, "the blocks of endpoints are off")
        return {claim for node in nodes for claim in node.ends.values()}


def _common(edge: PromptKeys, keys: PromptKeys, at: int) -> int:
    """How many keys of `edge` the prompt shares from position `at` on; the first is known to be."""
    span = min(len(edge), len(keys) - at)
    if edge[span - 1] == keys[at + span - 1]:
        return span
    low, high = 1, span - 1  # the first `low` keys are equal, key number `high` is not
    while low < high:
        middle = (low + high) // 2
        if edge[middle] == keys[at + middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _latest(node: Node, endpoint: EndpointId, enough: float) -> float | None:
    """Latest expiry of the endpoint's claims at or below `node`; stops looking at `enough`."""
    end = node.ends.get(endpoint)
    best = None if end is None else end.expires_at_s
    for child in node.children.values():
        if best == enough:
            break
        found = child.holders.get(endpoint)
        if found is not None and (best is None or found > best):
            best = found
    return best


def _check(node: Node) -> None:
    parent = node.parent
    assert parent is not None
    require(len(node.keys) > 0, "an edge is empty")
    require(parent.children.get(node.keys[0]) is node, "a child is not its parent's")
    require(node.depth == parent.depth + len(node.keys), "a depth is off")
    require(bool(node.ends) or len(node.children) > 1, "a node marks no difference")
    for endpoint, claim in node.ends.items():
        require(claim.node is node and claim.endpoint == endpoint, "a claim is not its node's")
    expected: dict[EndpointId, float] = {e: claim.expires_at_s for e, claim in node.ends.items()}
    for child in node.children.values():
        for endpoint, expires_at_s in child.holders.items():
            expected[endpoint] = max(expected.get(endpoint, expires_at_s), expires_at_s)
    require(expected == node.holders, "holders are off")
