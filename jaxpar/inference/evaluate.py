"""Scores a model: its loss on text, and its results on tasks of the Evaluation Harness."""

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxpar.checkpoint.best import step_of
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config.errors import require_package
from jaxpar.config.lists.datasets import sources_of
from jaxpar.config.lists.step_sizes import without_schedules
from jaxpar.config.options import check_ranges
from jaxpar.data.formats.meta import SPLITS
from jaxpar.data.loader import Loader
from jaxpar.data.sources import check_tokenizers
from jaxpar.inference.follow import follow
from jaxpar.inference.load import LoadedModel, LoadedParams, load, load_params_of
from jaxpar.inference.options import EvaluateOptions
from jaxpar.monitoring.evaluations import Score
from jaxpar.runtime import hub
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.processes import peers, rendezvous
from jaxpar.runtime.stages import stage
from jaxpar.step.evaluating import mean_loss
from jaxpar.step.train_step import make_eval_step

# ------------------------------ Computes the cross entropy of a model on a split of a dataset


#: Fields whose value is the location of data.
PLACES = ("data.path", "data.held_out", "data.mixture")

#: An option of `jaxpar.train`, or of the preparation of data that exists already.
OF_TRAINING = re.compile(r"--[a-z]+\.[a-z]|--split")


def text_loss(
    model: LoadedParams,
    data: str | None,
    split: str,
    sequences: int | None,
    batch_size: int,
    log: Callable[[str], None] = peers.log,
) -> Score:
    """Compute the loss over the first sequences of a split, and log it.

    Args:     data: a dataset. None: that of the run. sequences: None for as many as in an
              evaluation of the run. batch_size: sequences at a time.
    Raises:   ConfigError for data that is missing or cannot be used.
    """
    cfg = without_schedules(_with_data(model, data, batch_size))
    loader = _open(cfg, model.mesh, split)
    there, known = sum(loader.sequences_per_epoch), model.cfg.evaluation.num_batches
    numbers = loader.first_sequences(sequences or known * model.cfg.train.global_batch_size)
    step = _eval_step(cfg, model.mesh, loader.max_documents)
    name = ", ".join(source.dataset.name for source in loader.sources)
    batches = contextlib.closing(loader.once(numbers))
    with stage(f"evaluating on {split} of {name}"), batches as some:
        loss = mean_loss(step, model.params, some)
    if loss is None:
        rule = f"has no labeled token in the first {len(numbers)} sequences of {split}"
        raise ConfigError("--data", name, rule, "use more --sequences, or other data")
    score = Score.of(loss, loader.bytes_per_token(numbers))
    what = f"{len(numbers):,} of {there:,} sequences of {cfg.data.seq_len} tokens"
    log(f"{split} loss {score}   {name}, {what}")
    return score


def _open(cfg: Config, mesh: Mesh, split: str) -> Loader:
    """Open a split. Raises:   ConfigError about --data, with a fix among this command's options."""
    try:
        return Loader(cfg, mesh, split)
    except ConfigError as error:
        fix = error.fix
        if OF_TRAINING.search(fix):
            others = [name for name in SPLITS if name != split and _opens(cfg, mesh, name)]
            fix = "use --data FOLDER with a dataset that `python -m jaxpar.data prepare` made"
            fix = f"use --split {others[-1]}" if others else fix
        value, rule = error.value, error.rule
        if error.field not in PLACES:
            value, rule = cfg.data.held_out or _paths(cfg), f"{error.field} = {value}: {rule}"
        raise ConfigError("--data", value, rule, fix) from error


def _opens(cfg: Config, mesh: Mesh, split: str) -> bool:
    try:
        Loader(cfg, mesh, split)
    except ConfigError:
        return False
    return True


def _paths(cfg: Config) -> str:
    return ", ".join(source.path for source in sources_of(cfg))


@functools.cache
def _eval_step(cfg: Config, mesh: Mesh, most: int) -> Any:
    """Return the evaluation step, which is compiled once for all checkpoints of a run."""
    return make_eval_step(cfg, mesh, most)


def _with_data(model: LoadedParams, data: str | None, batch_size: int) -> Config:
    """Return the model's config with this dataset and batch size."""
    values = {
        "train.global_batch_size": batch_size,
        "train.batch_schedule": (),
        "train.loss": None,
        "data.length_schedule": (),
    }
    if data is None:
        if model.step is None:
            rule = "is needed: a published model has no data of its own"
            raise ConfigError("--data", None, rule, "use --data FOLDER, made with its tokenizer")
        return replace(model.cfg, **values)
    if model.step is not None:
        check_tokenizers(model.cfg, "--data", data, [data])
    only = {"data.path": data, "data.mixture": (), "data.mixture_schedule": (), "data.held_out": ""}
    return replace(model.cfg, **values, **only)


def check(options: EvaluateOptions) -> None:
    """Raises:   ConfigError for an option that cannot work."""
    if options.tasks:
        require_package("lm-eval", "--tasks", ",".join(options.tasks))
    check_ranges(options)
    for name in ("data", "sequences"):
        value = getattr(options, name)
        if value is not None and options.split is None:
            raise ConfigError(f"--{name}", value, "needs --split", "use --split val")
    if not options.tasks and options.split is None:
        rule, fix = "there is nothing to evaluate", "use --tasks NAME, or --split val"
        raise ConfigError("--tasks", "", rule, fix)
    if options.include_path is not None and not Path(options.include_path).is_dir():
        fix = "use the folder with the tasks' YAML files"
        raise ConfigError("--include-path", options.include_path, "is not a folder", fix)
    for name, value in (("step", options.step), ("output", options.output)):
        if options.follow and value is not None:
            rule = "has no meaning with --follow, which evaluates every checkpoint"
            raise ConfigError(f"--{name}", value, rule, "remove the option")
    place = rendezvous.detect_peers()
    if options.output is not None and (place is None or place.process_id == 0):  # which writes it
        check_file("--output", options.output, "results.json", in_existing_folder=True)


def evaluate(options: EvaluateOptions, log: Callable[[str], None] = peers.log) -> dict[str, Any]:
    """Compute the loss, and run the tasks. Returns the results of the harness, with "text_loss".

    With `follow`, this is done for each checkpoint, and the last results are returned.

    Raises:   ConfigError for an unknown task, and as `check`, `text_loss` and `load`.
    """
    check(options)
    known = _task_manager(options) if options.tasks else None
    if not options.follow:
        step = step_of(options.run, options.step)
        return _evaluate(options, step, known, log)
    last: dict[str, Any] = {}

    def of_step(step: int) -> dict[str, Any]:
        last.update(_evaluate(options, step, known, log))
        return last

    follow(options.run, of_step, log, options.poll_seconds)
    return last


def _evaluate(
    options: EvaluateOptions, step: int | None, known: Any, log: Callable[[str], None]
) -> dict[str, Any]:
    """Evaluate a checkpoint. Args:     known: from `_task_manager`, with tasks."""
    results: dict[str, Any] = {}
    where = options.run, step, options.tensor
    if options.split is not None:
        loaded = load_params_of(*where, log, options.weights, options.code)
        how = options.data, options.split, options.sequences, options.batch_size
        score = text_loss(loaded, *how, log)
        results["text_loss"] = {"data": options.data, "split": options.split, **score._asdict()}
        del loaded
    if options.tasks:
        model = load(*where, log, weights=options.weights, code=options.code)
        results |= _on_tasks(options, model, known, log)
    if options.output is not None and peers.rank() == 0:
        text = json.dumps(results, indent=2, default=str)
        atomic.write(options.output, (text + "\n").encode())
    return results


def _on_tasks(
    options: EvaluateOptions, model: LoadedModel, known: Any, log: Callable[[str], None]
) -> dict[str, Any]:
    """Run the tasks of the harness."""
    import lm_eval
    import lm_eval.utils

    from jaxpar.inference.lm_eval import HarnessModel

    results = lm_eval.simple_evaluate(
        model=HarnessModel(model, options.batch_size, options.max_length),
        tasks=list(options.tasks),
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        system_instruction=options.system_instruction,
        task_manager=known,
        log_samples=False,
        bootstrap_iters=0,
    )
    log(lm_eval.utils.make_table(results))
    return results


def _task_manager(options: EvaluateOptions) -> Any:
    """Read the harness's tasks. Raises:   ConfigError for an unknown one."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not hub.answers():
        # Its libraries would try for a minute. They read the variable when they are imported.
        os.environ["HF_HUB_OFFLINE"] = "1"
    with stage("importing the Evaluation Harness and its list of tasks"):
        import lm_eval.tasks

        known = lm_eval.tasks.TaskManager(include_path=options.include_path)
    known.load = functools.partial(_load_tasks, known.load)
    missing = [name for name in options.tasks if name not in known.all_tasks]
    if missing:
        fix = "`lm_eval ls tasks` lists them; --include-path FOLDER adds your own"
        raise ConfigError("--tasks", ",".join(missing), "is not a task of the harness", fix)
    return known


def _load_tasks(load_tasks: Callable[[Any], Any], names: Any) -> Any:
    """Load tasks with their data. Raises:   ConfigError in one line about data that is missing."""
    try:
        return load_tasks(names)
    except MemoryError:
        raise
    except Exception as error:  # of `datasets`, `huggingface_hub`, or of a task's own code
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        rule = f"cannot be loaded, with its data: {why}"
        fix = "download its data on a host with a network, and copy the folder HF_HOME"
        fix += "; or use tasks of your own with --include-path"
        raise ConfigError("--tasks", ",".join(names), rule, fix) from error
