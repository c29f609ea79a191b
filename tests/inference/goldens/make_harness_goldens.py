"""What the Evaluation Harness's own Hugging Face model makes of tests/inference/harness.py.

    python tests/inference/goldens/make_harness_goldens.py

Needs torch, transformers and lm_eval, and nothing of jaxpar; writes harness.json: for a tokenizer
with and without a beginning of text, log probabilities of continuations and of whole texts, greedy
texts, one request at a time, and conversations as prompts.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

ROOT = Path(__file__).resolve().parents[3]


def request(kind: str, *arguments):
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def results(h, begins: bool) -> dict:
    """The results of one model."""
    with tempfile.TemporaryDirectory() as folder:
        h.write_model(Path(folder), begins)
        model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    pairs = [request("loglikelihood", *pair) for pair in h.PAIRS]
    whole = [request("loglikelihood_rolling", text) for text in h.WHOLE]
    return {
        "max_length": model.max_length,
        "prefix": model.prefix_token_id,
        "pairs": [(float(s), bool(g)) for s, g in model.loglikelihood(pairs)],
        "whole": [float(score) for score in model.loglikelihood_rolling(whole)],
        "texts": [
            model.generate_until([request("generate_until", context, dict(how))])[0]
            for context, how in h.WRITING
        ],
        "chats": [model.apply_chat_template(chat, answer) for chat, answer in h.CHATS],
    }


def main() -> None:
    sys.path.insert(0, str(ROOT))
    h = importlib.import_module("tests.inference.harness")
    found = {"begins" if begins else "plain": results(h, begins) for begins in (False, True)}
    found["arguments"] = [dict(normalize_gen_kwargs(how)) for how in h.ARGUMENTS]
    file = Path(__file__).with_name("harness.json")
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
