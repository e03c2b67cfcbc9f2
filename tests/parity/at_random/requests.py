"""All shapes together, as cases of the corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tests.parity.at_random.chats import Chats
from tests.parity.at_random.messages import Messages
from tests.parity.at_random.responses import Responses
from tests.parity.at_random.values import Values
from tests.parity.chats import Fields
from tests.parity.corpus import CHAT, MODEL, Case, with_fixed_date
from tests.parity.others import COMPLETIONS, MESSAGES, RESPONSES


def random_cases(family: str, seed: str, count: int, images: tuple[Fields, ...] = ()) -> Iterator[Case]:
    """`count` requests for `family`. `images`, as parts of a chat, are put among what they say."""
    values = Values(f"{seed}/{family}")
    chats, responses = Chats(values, images), Responses(values, images)
    messages = Messages(values, images)
    shapes: tuple[tuple[str, Callable[[], Fields]], ...] = (
        *[(CHAT, chats.request)] * 6,
        (COMPLETIONS, lambda: _completion(values)),
        *[(RESPONSES, responses.request)] * 3,
        *[(MESSAGES, messages.request)] * 3,
    )
    for number in range(count):
        path, make = values.pick(*shapes)
        fields = {"model": MODEL, **with_fixed_date(family, path, make())}
        body = json.dumps(fields, ensure_ascii=values.chance(0.5)).encode()
        yield Case(family, f"random_{number}", path, body)


def _completion(values: Values) -> Fields:
    ids = values.ids()
    texts = values.some(values.text, 2, 1)
    fields: Fields = {"prompt": values.pick(values.text(), texts, ids, [ids, ids[:3]], [ids[0], "a"])}
    values.maybe(fields, 0.3, "add_special_tokens", lambda: values.pick(True, False))
    values.maybe(fields, 0.1, "echo", lambda: True)
    values.maybe(fields, 0.05, "suffix", lambda: values.pick("", None))
    return fields
