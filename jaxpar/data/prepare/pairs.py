"""Read pairs of responses, in the forms in which they are published.

A line has a chosen and a rejected response, each a text or a list of messages. The prompt is a
text, a list of messages, or what both responses begin with:

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    {"prompt": [{"role": "user", "content": "2 + 2?"}], "chosen": [{"role": "assistant", ...}], ...}
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], "rejected": [...]}
"""

from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.formats.readers import input_error, valid_text
from jaxpar.data.prepare.chat import ASSISTANT, ChatEncoder, Conversation, checked

type Messages = list[dict[str, str]]


class Pair(NamedTuple):
    """A prompt and two responses to it."""

    prompt: Messages
    chosen: Messages
    rejected: Messages


def read_pair(record: Any, fields: tuple[str, str, str], where: str) -> Pair:
    """Return the pair of a line.

    Args:     fields: JSON fields of the prompt and of the chosen and the rejected response.
    Raises:   ConfigError that names the line and what is wrong with it.
    """
    if not isinstance(record, dict):
        raise input_error(where, "is not a JSON object", "use a pair per line")
    prompt, chosen, rejected = fields
    there = [_messages(record, field, ASSISTANT, where) for field in (chosen, rejected)]
    if record.get(prompt) is None:
        before = _common_beginning(*there)
    else:
        before = _messages(record, prompt, "user", where)
    responses = [of[len(before) :] if of[: len(before)] == before else of for of in there]
    for field, messages in zip((chosen, rejected), responses, strict=True):
        if not any(message["role"] == ASSISTANT for message in messages):
            rule = f"has no message of the assistant in {field!r} after the prompt"
            raise input_error(where, rule, "remove the line")
    if not before:
        rule = f"has no prompt: no field {prompt!r}, and the responses begin differently"
        raise input_error(where, rule, "name the field with --prompt-field")
    if responses[0] == responses[1]:
        raise input_error(where, "has two responses that are the same", "remove the line")
    return Pair(before, *responses)


def _messages(record: dict, field: str, role: str, where: str) -> Messages:
    """Return a field as messages: its own, or one message of `role` with its text."""
    value = record.get(field)
    if isinstance(value, list):
        return checked(value, where, f"{field}: ")
    text = valid_text(value, where, f"field {field!r}", "use text or a list of messages")
    return [{"role": role, "content": text}]


def _common_beginning(a: Messages, b: Messages) -> Messages:
    """Return the messages with which both begin, without the last message of either."""
    most = min(len(a), len(b)) - 1
    same = next((i for i in range(most) if a[i] != b[i]), most)
    return a[:same]


def encode_pair(pair: Pair, encoder: ChatEncoder) -> tuple[Conversation, Conversation]:
    """Encode both conversations of a pair. Only the tokens of the responses are targets."""
    before = len(encoder.encode(pair.prompt).ids)

    def encoded(response: Messages) -> Conversation:
        ids, targets = encoder.encode(pair.prompt + response)
        return Conversation(ids, targets & (np.arange(len(ids)) >= before))

    return encoded(pair.chosen), encoded(pair.rejected)
