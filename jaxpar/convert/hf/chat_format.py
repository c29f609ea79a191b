"""How a model converses: the tokens that end its texts, and its chat template, as Jinja.

They are in the files that came with published weights, or follow from the template that
`python -m jaxpar.data prepare-chat` tokenized the run's conversations with.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxpar.checkpoint.saved import CARRIED
from jaxpar.config import Config, ConfigError
from jaxpar.config.json_reader import read_json_object
from jaxpar.data.prepare.chat import ASSISTANT, EOS, TEMPLATES, ChatEncoder, Special
from jaxpar.data.sources import chat_template
from jaxpar.data.tokenizer import Tokenizer

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"

#: The special tokens that templates name, as in tokenizer_config.json.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatFormat(NamedTuple):
    """How a model converses."""

    ends: frozenset[int]
    """Ids that end a text: the end of text, and the end of a turn."""
    template: str | None = None
    """The chat template, Jinja. None: the model has none."""
    specials: Mapping[str, str] = {}
    """The texts of special tokens by name, for the template."""
    sampling: Mapping[str, Any] = {}
    """Defaults of sampling in generation_config.json."""


#: The format of a model that does not converse.
PLAIN = ChatFormat(frozenset())


def of_folder(folder: Path, tokenizer: Tokenizer) -> ChatFormat:
    """Read the format from the files that came with published weights.

    Raises:   ConfigError that names a file that cannot be read, and the value that is wrong.
    """
    about = _about(folder / TOKENIZER_CONFIG)
    generation = _about(folder / GENERATION_CONFIG)
    ends = _ids(generation.get("eos_token_id"), folder / GENERATION_CONFIG)
    named = {name: _text(about.get(name)) for name in SPECIAL_NAMES}
    specials = {name: text for name, text in named.items() if text is not None}
    template = carried_template(folder)
    known = {"eos_token": tokenizer.eos_token} | specials
    return ChatFormat(frozenset({int(tokenizer.eos_id), *ends}), template, known, generation)


def of_run(run_dir: str | Path, cfg: Config, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of a run: of its files, with the ends of the conversations it learned.

    Raises:   ConfigError as `of_folder`.
    """
    kept = Path(run_dir) / CARRIED
    carried = of_folder(kept, tokenizer) if kept.is_dir() else of_data("", tokenizer)
    learned = of_data(learned_template(run_dir, cfg), tokenizer)
    template = carried.template if carried.template is not None else learned.template
    return carried._replace(ends=carried.ends | learned.ends, template=template)


def learned_template(run_dir: str | Path, cfg: Config) -> str:
    """Return the template of a run's conversations; empty without, or if the data is missing."""
    if is_imported(run_dir, cfg):
        return ""
    try:
        return chat_template(cfg)
    except ConfigError:
        return ""


def is_imported(run_dir: str | Path, cfg: Config) -> bool:
    """Return whether a run has only published weights, and no training of its own."""
    return (Path(run_dir) / CARRIED).is_dir() and not cfg.run.init_from


def of_data(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format of conversations with a template of `prepare-chat`.

    Args:     name: of the template. Empty, or without its tokens in the tokenizer: the end of text.
    """
    specials = {"eos_token": tokenizer.eos_token}
    if not name or not ChatEncoder.fits(name, tokenizer):
        return ChatFormat(frozenset({int(tokenizer.eos_id)}), None, specials)
    ends = frozenset({ChatEncoder(name, tokenizer).end_id, int(tokenizer.eos_id)})
    return ChatFormat(ends, jinja(name, tokenizer.eos_token), specials)


def jinja(name: str, eos_token: str) -> str:
    """Return a template of `prepare-chat` as `transformers` renders it: the text it tokenizes.

    Args:     eos_token: text of the tokenizer's end of text.
    """
    used = TEMPLATES[name]

    def of(part: str, role: str) -> str:
        """Return an expression of a piece. Args:     role: the expression of the role."""
        if isinstance(part, Special):
            return _literal(eos_token if part == EOS else part)
        pieces = re.split("({role})", part)
        return " + ".join(role if p == "{role}" else _literal(p) for p in pieces if p)

    def put(*expressions: str) -> str:
        return "{{ " + " + ".join(expressions) + " }}"

    ours = [of(part, "message['role']") for part in used.head]
    answer = [of(part, _literal(ASSISTANT)) for part in used.head]
    text = "(message['content'] | trim)" if used.strip else "message['content']"
    ends = [of(part, "") for part in (used.end, *used.tail)]
    begin = "".join(put(of(part, "")) for part in used.begin)
    every = "{% for message in messages %}" + put(*ours, text, *ends) + "{% endfor %}"
    return f"{begin}{every}{{% if add_generation_prompt %}}{put(*answer)}{{% endif %}}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def carried_template(folder: Path) -> str | None:
    """Return the template of a published folder, which has it in one of three files."""
    if (folder / TEMPLATE_FILE).is_file():
        return (folder / TEMPLATE_FILE).read_text("utf-8")
    found = _about(folder / "chat_template.json").get("chat_template")
    found = found or _about(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _about(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        # `transformers` writes int(1e30) for a maximum length that is not known.
        return read_json_object(file, max_digits=40)
    except (OSError, ValueError) as error:
        rule = f"has a {file.name} that cannot be read ({error})"
        raise ConfigError("RUN", str(file.parent), rule, "copy that of the model there") from error


def _ids(found: Any, file: Path) -> list[int]:
    """Return the ids of ends: none, one, or several."""
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        rule = f"has eos_token_id {found!r} in {file.name}, neither an id nor a list of ids"
        raise ConfigError("RUN", str(file.parent), rule, "copy that of the model there")
    return ids


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is given as a string or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
