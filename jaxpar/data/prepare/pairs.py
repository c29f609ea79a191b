"""Read pairs of responses, in the forms in which they are published.

A line has a chosen and a rejected response, each a text or a list of messages. The prompt is a
text, a list of messages, or what both responses begin with:

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", ...}], ...}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}
"""

from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.formats.compressed import bad_row, valid_text
from jaxpar.data.prepare.chat import ASSISTANT, ChatEncoder, Conversation, checked

SYSTEM = "system"

type Messages = list[dict[str, str]]


class Pair(NamedTuple):
    """A prompt and two responses to it."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def read_pair(fields: tuple[str, str, str], record: Any, where: str) -> Pair:
    """Return the pair of a line. The prompt is in it once, also if the responses have it too.

    Args:     fields: JSON fields of the prompt and of the chosen and the rejected response.
    Raises:   BadRow that names the line and what is wrong with it.
    """
    if not isinstance(record, dict):
        raise bad_row(where, "is not a JSON object", "use a pair per line")
    prompt, chosen, rejected = fields
    there = [_messages(record, field, ASSISTANT, where) for field in (chosen, rejected)]
    _check_answered(there, fields, where)
    asked = record.get(prompt) or None
    if asked is None or (isinstance(asked, str) and not asked.strip()):
        start = _common_start(*there)
        parts = [(of[:start], of[start:]) for of in there]
    else:
        _check_texts(record, fields, where)
        before, most = _messages(record, prompt, "user", where), _common_start(*there)
        parts = [
            _after(before, of, most, field, where)
            for of, field in zip(there, (chosen, rejected), strict=True)
        ]
    _check_answered([response for _, response in parts], fields, where)
    (before, first), (other, second) = parts
    if all(message["role"] == SYSTEM for message in before):
        what = "turn in" if asked else "field"
        rule = f"has no prompt: no {what} {prompt!r}, and the responses begin differently"
        raise bad_row(where, rule, "name the field with --prompt-field")
    if any(message["role"] == SYSTEM for message in first + second):
        raise bad_row(where, "has a system message after the prompt", "remove it")
    if not _same(before, other):
        rule = f"has other messages before the response in {chosen!r} than in {rejected!r}"
        raise bad_row(where, rule, "use pairs of responses to one prompt")
    if _same(first, second):
        raise bad_row(where, "has two responses that are the same", "remove the line")
    return Pair(before, first, second)


def _after(
    prompt: Messages, found: Messages, most: int, field: str, where: str
) -> tuple[Messages, Messages]:
    """Split messages after the prompt, which they may contain. Returns: prompt and response.

    The prompt may stand behind a system message, or be the last turn of the user.

    Args:     most: how many messages both responses begin with.
    Raises:   BadRow if the messages have other turns of the user or system before the response.
    """
    num_system = next((i for i, m in enumerate(prompt) if m["role"] != SYSTEM), len(prompt))
    system, turns = prompt[:num_system], prompt[num_system:]
    if not turns:
        return _with_system(system, found[:most], field, where), found[most:]
    for end in range(max(most, len(turns)), len(turns) - 1, -1):
        if _same(found[end - len(turns) : end], turns):
            return _with_system(system, found[:end], field, where), found[end:]
    asked = [message for message in turns if message["role"] == "user"][-1:]
    follows = found[0]["role"] != SYSTEM and found[0]["role"] != turns[-1]["role"]
    prefilled = found[0]["role"] == turns[-1]["role"] == ASSISTANT
    if any(_same([message], asked) for message in found) or not (follows or prefilled):
        rule = f"has a conversation in {field!r} that does not begin with the prompt"
        fix = "use the prompt as it is there, or leave out its field"
        raise bad_row(where, rule, fix)
    return prompt, found


def _with_system(system: Messages, found: Messages, field: str, where: str) -> Messages:
    """Return the beginning of a conversation with the system message of the prompt."""
    if not system or _same(found[: len(system)], system):
        return found
    if any(message["role"] == SYSTEM for message in found):
        rule = f"has another system message in {field!r} than in the prompt"
        raise bad_row(where, rule, "remove one of them")
    return system + found


def _check_answered(responses: list[Messages], fields: tuple[str, str, str], where: str) -> None:
    """Raise BadRow for a response without a message of the assistant."""
    for field, messages in zip(fields[1:], responses, strict=True):
        if not any(message["role"] == ASSISTANT for message in messages):
            rule = f"has no message of the assistant in {field!r} after the prompt"
            raise bad_row(where, rule, "remove the line")


def _check_texts(record: dict, fields: tuple[str, str, str], where: str) -> None:
    """Raise BadRow for texts that begin with the prompt: it would be there twice.

    A prompt of one word may be the first word of an answer.
    """
    prompt, *responses = (record.get(field) for field in fields)
    if not all(isinstance(text, str) for text in (prompt, *responses)):
        return
    begin = str(prompt).strip()
    if len(begin.split()) > 1 and all(str(text).lstrip().startswith(begin) for text in responses):
        rule = f"has the prompt again at the beginning of {fields[1]!r} and {fields[2]!r}"
        raise bad_row(where, rule, "remove it from the responses")


def _messages(record: dict, field: str, role: str, where: str) -> Messages:
    """Return a field as messages: its own, or one message of `role` with its text."""
    value = record.get(field)
    if isinstance(value, list):
        return checked(value, where, f"{field}: ")
    text = valid_text(value, where, f"field {field!r}", "use text or a list of messages")
    return [{"role": role, "content": text}]


def _same(a: Messages, b: Messages) -> bool:
    """Return whether messages have the same roles and texts, up to spaces at their ends."""
    key = lambda m: (m["role"], m["content"].strip())  # noqa: E731
    return len(a) == len(b) and all(key(x) == key(y) for x, y in zip(a, b, strict=True))


def _common_start(a: Messages, b: Messages) -> int:
    """Return with how many messages both begin, not counting the last message of either."""
    most = min(len(a), len(b)) - 1
    return next((i for i in range(most) if not _same([a[i]], [b[i]])), most)


def encode_pair(pair: Pair, encoder: ChatEncoder) -> tuple[Conversation, Conversation]:
    """Encode both conversations of a pair. Only the tokens of the responses are targets."""
    before = len(encoder.encode(pair.prompt).ids)

    def encoded(response: Messages) -> Conversation:
        ids, targets = encoder.encode(pair.prompt + response)
        return Conversation(ids, targets & (np.arange(len(ids)) >= before))

    return encoded(pair.chosen), encoded(pair.rejected)
