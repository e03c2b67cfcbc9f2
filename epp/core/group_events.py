"""Which of an engine's cache groups an event is about, and stores of all groups but the main one.

The main group is the full-attention group whose blocks are the endpoint's records; the rules of the
others are in `window_groups`. Engines of one group may leave the number out.
"""

from __future__ import annotations

from epp.core.engine_blocks import EngineBlocks
from epp.core.event_content import are_plain, contents_of, proves_content
from epp.core.events import FULL_ATTENTION_KINDS, BlockRemoved, BlockStored
from epp.core.hashing import BlockHasher
from epp.core.index_limits import Tally
from epp.core.types import BlockKey
from epp.core.window_groups import WindowGroups


def is_of_main_group(blocks: EngineBlocks, event: BlockStored) -> bool:
    """Whether a store is of the main group. Mutates: learns the number of that group."""
    number = event.group_idx
    if event.group_kind not in FULL_ATTENTION_KINDS:
        return False
    if number is None or number == blocks.main_group:
        return True
    if blocks.main_group is not None or (blocks.groups is not None and number in blocks.groups):
        return False
    blocks.main_group = number
    return True


def keys_in_main_group(
    blocks: EngineBlocks, event: BlockStored, hasher: BlockHasher, parent_key: BlockKey | None
) -> list[BlockKey]:
    """Under which keys a store puts its blocks into the endpoint's records, as far as it proves them."""
    in_main_group = event.group_kind in FULL_ATTENTION_KINDS and event.group_idx == blocks.main_group
    if not in_main_group or event.block_size_tokens != blocks.block_size_tokens or not proves_content(event):
        return []
    keys: list[BlockKey] = []
    for content in contents_of(event) or ():
        if parent_key is None:
            break
        parent_key = hasher.next_key(parent_key, content)
        keys.append(parent_key)
    return keys


def is_removed_from_main_group(blocks: EngineBlocks, event: BlockRemoved) -> bool:
    """Removals name no kind. A number that was never heard of is another group's, unless the engine's
    stores have no numbers."""
    number, groups = event.group_idx, blocks.groups
    if number is None or number == blocks.main_group:
        return True
    return blocks.main_group is None and (groups is None or number not in groups)


def store_in_group(
    groups: WindowGroups,
    blocks: EngineBlocks,
    event: BlockStored,
    hasher: BlockHasher,
    parent_key: BlockKey | None,
    tally: Tally,
) -> None:
    """Mutates: one store of another group. `parent_key`: what its first block is chained to, as far as
    the main group knows. Blocks whose content the event does not prove go by their names."""
    number = event.group_idx
    if not groups.admit(event, blocks.main_group):
        tally.unsupported += len(event.hashes)
        return
    may_grow = not groups.account.refuses(blocks.own_bytes)
    if parent_key is None and event.parent is not None:
        parent_key = groups.key_of(number, hasher.name(event.parent))
    keys = _proven_keys(event, hasher, parent_key)
    names = hasher.names(event.hashes)
    if len(keys) == len(names) and groups.hold_all(number, names, keys, event.tier, may_grow):
        tally.windowed += len(names)
        return
    for at, name in enumerate(names):
        key = keys[at] if at < len(keys) else blocks.key_of(name)
        tally.count_grouped(groups.hold(number, name, key, event.tier, may_grow))


def _proven_keys(event: BlockStored, hasher: BlockHasher, parent_key: BlockKey | None) -> list[BlockKey]:
    """Keys of the blocks whose content the event proves, from the first one on."""
    contents = contents_of(event) if parent_key is not None and proves_content(event) else None
    if contents is None or parent_key is None:
        return []
    if are_plain(event):
        return hasher.chain(parent_key, b"".join(contents), event.block_size_tokens)
    keys: list[BlockKey] = []
    for content in contents:
        parent_key = hasher.next_key(parent_key, content)
        keys.append(parent_key)
    return keys
