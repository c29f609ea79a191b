"""Our scores through EleutherAI's Evaluation Harness, on a tiny task, against the plain model."""

import functools
import http.server
import json
import threading
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.checkpoint.loading import restore_params
from jaxpar.checkpoint.saved import saved_config
from jaxpar.commands import call
from jaxpar.config import ConfigError
from jaxpar.convert.hf.exporting import open_export, to_hf
from jaxpar.data.tokenizer import load_tokenizer
from jaxpar.inference import evaluate as inference_evaluate
from jaxpar.inference.generation import config_for_sampling
from jaxpar.inference.load import load
from jaxpar.model.plain import decoder
from jaxpar.runtime import hub
from jaxpar.sharding.mesh import make_mesh

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
target_delimiter: ""
"""

CHOICES = """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""

WRITING = """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{written}}"
generation_kwargs: {until: [".", ","], max_gen_toks: 24}
metric_list: [{metric: exact_match, ignore_punctuation: false}]
"""

WHOLE = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{start}}"
metric_list: [{metric: bits_per_byte}]
"""

VERSE = "the cat sat on the mat, and the dog sat on the log.\n"
QUESTIONS = [
    ("the cat sat on the", [" dog", " mat"], 1, " mat"),
    ("the cat sat on the mat, and the dog sat on the", [" log.", " cat,"], 0, " log"),
    ("the cat sat on the mat, and the", [" dog sat", " cat sat"], 0, " dog sat on the log"),
]
DOCUMENTS = [
    {
        "start": text[:20],  # within a window
        "text": VERSE + text,
        "choices": choices,
        "answer": answer,
        "written": written,
    }
    for text, choices, answer, written in QUESTIONS
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "data.json"
    data.write_text("".join(json.dumps(d) + "\n" for d in DOCUMENTS))
    for name, kind in {"choices": CHOICES, "writing": WRITING, "whole": WHOLE}.items():
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data) + kind)
    return folder


@pytest.fixture(autouse=True)
def no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def results(model: Path, tasks: Path, capsys, *flags: str) -> dict:
    output = tasks / "results.json"
    names = ["choices", "writing", "whole"]
    args = ["--tasks", *names, "--include-path", str(tasks), "--output", str(output), *flags]
    call("evaluate", [str(model), *args])
    assert "|choices|" in capsys.readouterr().out
    return json.loads(output.read_text())["results"]


def log_probabilities(run: Path, text: str) -> np.ndarray:
    """Of each byte of a text after the end of a text, by the plain model."""
    cfg = config_for_sampling(saved_config(run))
    mesh = make_mesh(cfg.parallel, jax.devices()[:1])
    params = restore_params(run, cfg, mesh)
    tokenizer = load_tokenizer(cfg.data.path)
    ids = jnp.asarray([[tokenizer.eos_id, *tokenizer.encode(text)]])
    place, ones = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
    scores = jax.nn.log_softmax(decoder.logits_of(params, ids, place, ones, cfg.model))
    return np.asarray(jnp.take_along_axis(scores[0, :-1], ids[0, 1:, None], axis=-1)[:, 0])


@pytest.mark.slow
def test_a_run_and_its_export_score_alike(finished, tasks, capsys, tmp_path):
    of_run = results(finished, tasks, capsys)
    assert of_run["choices"]["acc,none"] == 1.0
    assert of_run["writing"]["exact_match,none"] == 1.0
    texts = [document["start"] for document in DOCUMENTS]
    nats = -sum(log_probabilities(finished, text).sum() for text in texts)
    wanted = nats / np.log(2) / sum(map(len, texts))
    assert of_run["whole"]["bits_per_byte,none"] == pytest.approx(wanted, rel=1e-4)

    to_hf(open_export(finished), tmp_path / "export", print, tolerance=None)
    of_export = results(tmp_path / "export", tasks, capsys, "--tensor", "2", "--batch-size", "2")
    for task, scores in of_run.items():
        for metric, value in scores.items():
            if isinstance(value, float):
                assert of_export[task][metric] == pytest.approx(value, rel=1e-4), (task, metric)


@pytest.mark.slow
def test_long_texts_are_scored_by_their_latest_tokens(finished):
    # Not above: tests for GPUs are collected with it, also where there is no lm_eval.
    from jaxpar.inference.lm_eval import HarnessModel

    model = HarnessModel(load(str(finished), None, 1, print), 2)
    text = "the dog sat on the log.\\nthe cat sat on the mat" * 3
    ids = model.tok_encode(text)
    ((score, _),) = model._loglikelihood_tokens([(None, ids[:-4], ids[-4:])])
    ((short, _),) = model._loglikelihood_tokens([(None, ids[-33:-4], ids[-4:])])
    assert len(ids) > 33 and score == pytest.approx(short, abs=1e-5)


class Request(NamedTuple):
    """A request of the harness to write text."""

    args: tuple[str, dict]


@pytest.mark.slow  # quicker: test_harness_model.py
def test_texts_are_written_alike_in_batches_of_any_size(finished):
    """Contexts of many lengths, with other stops and limits; sampled ones depend on no other."""
    from jaxpar.inference.lm_eval import HarnessModel

    asked = [
        Request((text[:n], how))
        for text, n in [(VERSE, 50), ("", 0), ("the dog", 7), (VERSE, 20), ("the cat sat on", 14)]
        for how in (
            {"until": [".", ","], "max_gen_toks": 24},
            {"until": "sat", "max_gen_toks": 24, "do_sample": False, "temperature": 1.0},
            {"max_gen_toks": 3},
            {"until": ["g"], "max_gen_toks": 20, "do_sample": True, "temperature": 0.8, "top_k": 5},
        )
    ]
    model = load(str(finished), None, 1, print)
    alone, five = (HarnessModel(model, n).generate_until(asked, True) for n in (1, 5))
    assert alone == five
    assert any(alone) and not any("sat" in text for text in alone[1::4])
    assert not any("." in text or "," in text for text in alone[::4])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tasks", "no_such_task"], "no_such_task: is not a task of the harness|is not a task"),
        (["--tasks", "choices", "--include-path", "nowhere"], "is not a folder"),
        (["--tasks", "choices", "--batch-size", "0"], "must be at least 1"),
        (["--tasks", "choices", "--limit", "0"], "--limit = 0: must be at least 1"),
        (["--tasks", "choices", "--num-fewshot", "-1"], "--num-fewshot = -1: must not be negative"),
        (["--tasks", "choices", "--output", "nowhere/x.json"], "needs the folder nowhere, which"),
        (["--tasks", "choices", "--output", "."], r"--output = '\.': is a folder, not a file"),
    ],
)
def test_what_cannot_be_scored(finished, monkeypatch, flags, said):
    import lm_eval.tasks

    # Without the harness's own tasks, 14,000 files, which take ten seconds to read.
    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    with pytest.raises(ConfigError, match=said):
        call("evaluate", [str(finished), *flags])


def test_a_file_is_checked_by_the_process_that_writes_it(monkeypatch):
    """The others may be on hosts where its folder is not there."""
    options = inference_evaluate.EvaluateOptions(
        run="run", tasks=("choices",), output="nowhere/x.json"
    )
    for name, value in (("COORDINATOR_ADDRESS", "127.0.0.1:9"), ("NUM_PROCESSES", "2")):
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    inference_evaluate.check(options)
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    with pytest.raises(
        ConfigError, match=r"--output = .*needs the folder nowhere, which does not exist"
    ):
        inference_evaluate.check(options)


def test_data_that_cannot_be_loaded_is_one_line(finished, tmp_path, monkeypatch):
    import lm_eval.tasks

    own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", own)
    task = TASK.format(name="far", data=tmp_path / "not_here.json") + CHOICES
    (tmp_path / "far.yaml").write_text(task)
    with pytest.raises(ConfigError, match=r"^--tasks = .far.: cannot be loaded, with its data: F"):
        call("evaluate", [str(finished), "--tasks", "far", "--include-path", str(tmp_path)])


@pytest.mark.waits
def test_whether_the_hub_answers(monkeypatch):
    """An error is an answer. Nobody waits for one if HF_HUB_OFFLINE is set."""

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(503)

        def log_message(self, *_):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert hub.answers(60)
        finally:
            server.shutdown()
            thread.join()
    assert not hub.answers(60)  # nothing listens there any more
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("urllib.request.urlopen", None)
    assert not hub.answers()
