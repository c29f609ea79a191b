"""A tiny published chat model, and requests of the Evaluation Harness to it.

`goldens/make_harness_goldens.py` writes the same folder in another environment, for the harness's
own Hugging Face model.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers as t

from tests.convert import tiny

END, TURN, BEGIN, START = "<|end|>", "<|turn|>", "<|begin|>", "<|start|>"

#: As published: a system's message is refused, and texts are trimmed.
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}
{{ '<|start|>' + message['role'] + '
' + message['content'] | trim + '<|turn|>' }}
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""

LENGTH = 64


def write_model(folder: Path, begins: bool) -> Path:
    """Write a model of random weights, with two ends of text.

    Args:     begins: whether its tokenizer puts a beginning of text before each text.
    """
    values = tiny.MODELS["llama3"] | {"vocab_size": 260, "max_position_embeddings": LENGTH}
    values |= {"bos_token_id": 258, "eos_token_id": 256}
    values.pop("rope_scaling", None)
    tiny.write_folder(folder, values)
    letters = sorted(t.pre_tokenizers.ByteLevel.alphabet())
    words = t.Tokenizer(t.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = t.decoders.ByteLevel()
    words.add_special_tokens([END, TURN, BEGIN, START])
    if begins:
        words.post_processor = t.processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, 258)]
        )
    words.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": BEGIN}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    ends = {"eos_token_id": [257, 256], "bos_token_id": 258}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


SAID = "It was the best of times, it was the worst of times, "

#: (context, continuation). The fifth is longer than the model sees.
PAIRS = [
    ("the cat", " sat"),
    ("", " alone"),
    ("ends in spaces  ", "and goes on"),
    ("", f"{BEGIN}begun"),
    (SAID * 2, "it was"),
    (f"{BEGIN}begun", " once"),
    (f"a{END}b", f"c{TURN}"),
    ("é", "è"),
    ("a" * 30, "b" * 64),
    ((SAID * 2)[-44:], "bz"),  # without a beginning of text, the likeliest
]

#: Texts within and past a window.
WHOLE = ["the cat sat", "", SAID * 4, "ü" * 40, f"{BEGIN}begun", "a" * 64, "a" * 65, "a" * 129]

#: (context, generation_kwargs), without sampling.
WRITING: list[tuple[str, dict[str, Any]]] = [
    (context, how)
    for context in ("the cat", f"{BEGIN}begun{START}user", SAID * 2, "é")
    for how in (
        {"until": [], "max_gen_toks": 30},
        {"until": ["W", "^^", "d"], "max_gen_toks": 30},
        {"until": "?", "max_gen_toks": 20},
        {"until": [END, TURN], "max_gen_toks": 20},
        {"max_new_tokens": 9},
        {"max_tokens": 7, "max_new_tokens": 5},
        {"max_gen_toks": 3, "max_completion_tokens": 5},
        {"max_gen_toks": 12, "do_sample": False, "temperature": 2.0},
        {"max_gen_toks": 6, "temperature": 0, "num_beams": 1},
    )
]

#: Arguments, as `normalize_gen_kwargs` reads them.
ARGUMENTS: list[dict[str, Any]] = [
    {"until": "x", "max_new_tokens": 9},
    {"until": ["x"], "max_tokens": 8, "max_completion_tokens": 4},
    {"max_gen_toks": 7, "max_new_tokens": 9, "temperature": 0.5},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 5},
    {"do_sample": False, "temperature": 0.7},
    {},
]

#: (conversation, whether an answer follows).
CHATS: list[tuple[list[dict[str, str]], bool]] = [
    ([{"role": "user", "content": "hi "}], True),
    ([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], True),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is "}], False),
    ([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It is"}], False),
]
