"""Renders a conversation by a model's chat template, as `transformers` does."""

import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from jaxpar.config import ConfigError

#: Marks the end of a message that is continued, while the template renders it.
_END = "CONTINUE_FINAL_MESSAGE_TAG "


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    specials: Mapping[str, str],
    *,
    answer: bool = True,
) -> str:
    """Return the text of a conversation.

    If the template refuses the conversation, it is rendered without the system's messages, as the
    Evaluation Harness does.

    Args:     template: Jinja. specials: texts of special tokens by name. answer: add the beginning
              of the assistant's answer; otherwise the last message is left open.
    Raises:   ConfigError if the template cannot be rendered.
    """
    make = _compiled(template)
    try:
        return _render(make, messages, specials, answer)
    except jinja2.TemplateError:
        rest = [message for message in messages if message["role"] != "system"]
    try:
        return _render(make, rest, specials, answer)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        rule = f"cannot render a conversation: {error}"
        fix = "use the template that was published with the model"
        raise ConfigError("chat_template", template[:40], rule, fix) from error


def _render(
    make: Callable[..., str],
    messages: Sequence[Mapping[str, Any]],
    specials: Mapping[str, str],
    answer: bool,
) -> str:
    chat, more = [dict(message) for message in messages], dict(specials)
    if not answer:
        chat[-1]["content"] += _END
    text = make(messages=chat, tools=None, documents=None, add_generation_prompt=answer, **more)
    if answer:
        return text
    at = text.rindex(_END.strip())
    return text[:at] if text[at:].startswith(_END) else text[:at].rstrip()


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Callable[..., str]:
    """Compile a template in the environment that published templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render
    except jinja2.TemplateError as error:
        fix = "use the template that was published with the model"
        raise ConfigError("chat_template", template[:40], f"is not Jinja: {error}", fix) from error


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | how))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
