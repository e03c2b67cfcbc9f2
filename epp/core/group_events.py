"""Which of an engine's cache groups an event is about, and stores of all groups but the main one.

The main group is the full-attention group whose blocks are the endpoint's records; the rules of the
others are in `window_groups`. Engines of one group may leave the number out.
"""

from __future__ import annotations

from epp.core.engine_blocks import EngineBlocks
from epp.core.event_content import contents_of, proves_content
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
    contents = contents_of(event) if proves_content(event) else None
    if parent_key is None and event.parent is not None:
        parent_key = groups.key_of(number, hasher.name(event.parent))
    keys: list[BlockKey] = []
    if contents is not None and parent_key is not None:
        for content in contents:
            parent_key = hasher.next_key(parent_key, content)
            keys.append(parent_key)
    for at, name in enumerate(hasher.names(event.hashes)):
        key = keys[at] if at < len(keys) else blocks.key_of(name)
        tally.count_grouped(groups.hold(number, name, key, event.tier))
