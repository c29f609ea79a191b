"""Keeps a run's folder while it trains: its lock, config.json, manifest.json, and the first lines.

Someone may delete the folder, or files in it, while the run writes there.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxpar.components.model import in_words as in_words_of_layers
from jaxpar.config.lists.recorded_steps import bytes_of_a_step
from jaxpar.config.lists.step_sizes import in_words, step_sizes
from jaxpar.config.serialize import to_json as text_of
from jaxpar.config.values import class_name
from jaxpar.data.skips import SKIPPED_FILE
from jaxpar.model.flops import num_adapter_params, num_params
from jaxpar.model.mup import in_words as in_words_of_mup
from jaxpar.monitoring.certificate import CERTIFICATE_FILE, conditions_of, to_values
from jaxpar.monitoring.routing import file_of
from jaxpar.optimizer.schedules import shortened
from jaxpar.prediction.startup import alignment_hints
from jaxpar.runtime import provenance, watchdog
from jaxpar.runtime.files import append, atomic
from jaxpar.runtime.files.lock import RunLock, RunLocked
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.terminal import warn
from jaxpar.sharding.mesh import describe
from jaxpar.training import initial_weights
from jaxpar.training.chosen import to_json as chosen_to_json
from jaxpar.training.run import Run

if TYPE_CHECKING:
    from jaxpar.stores.lease import Lease


class RunRecords:
    """The lock of a run folder, and the files that are written once. Empty but in process 0."""

    def __init__(self, folder: Path, lock: RunLock | None = None, lease: "Lease | None" = None):
        """Args:     lease: on the run's store, if it has one."""
        self._folder, self._texts = folder, dict[Path, str]()
        self._lock, self._lease = lock, lease

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder, and remember its text.

        Raises:   OSError that names the file, for example when the disk is full.
        """
        path = self._folder / name
        atomic.write(path, text.encode())
        self._texts[path] = text

    def check_lock(self, at_once: bool = False) -> None:
        """Check that this process may still write the folder. Args and Raises as `RunLock.check`.

        After RunLocked, nothing more is appended to files of the folder.
        """
        if self._lock is None:
            return
        try:
            self._lock.check(at_once)
            if self._lease is not None:
                self._lease.check()
        except RunLocked:
            append.abandon(self._folder)
            watchdog.without_last_words()
            raise

    def before_save(self) -> None:
        """Check the lock at once, then write the files again that were deleted."""
        self.check_lock(at_once=True)
        self._write_missing()

    def _write_missing(self) -> None:
        """Write the files again that were deleted, with a warning."""
        missing = [path for path in self._texts if not path.is_file()]
        for path in missing:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic.write(path, self._texts[path].encode())
            except OSError as error:
                how = f"and cannot be written again: {error.strerror}"
            else:
                how = "it was written again"
            warn(f"{path} was deleted during the run; {how}")


def write(
    run: Run,
    environment: list[str],
    show: Callable[[str], None] = log,
    records: RunRecords | None = None,
) -> None:
    """Make the run folder, write config.json and manifest.json, and print a summary of the run.

    Only process 0 does this.

    Args:     environment: flags and variables that were set, each as "name=value". show: prints
              the summary. records: writes the files, and remembers them.
    Raises:   OSError that names the file, for example when the disk is full.
    """
    if jax.process_index() != 0:
        return
    run.dir.mkdir(parents=True, exist_ok=True)
    records = records or RunRecords(run.dir)
    records.write("config.json", text_of(run.cfg))
    manifest = provenance.versions() | {
        "commit": provenance.checked_out_commit(),
        "conditions": dataclasses.asdict(conditions_of(run.cfg)),
        "mesh": describe(run.mesh),
        "parameters": num_params(run.cfg.model),
        "adapters": num_adapter_params(run.cfg.model, run.cfg.lora),
        "attention": run.attention,
        "execution": list(run.execution.in_words()),
        "environment": environment,
        "asked": dict(run.asked),
    }
    replicas = diloco = ""
    if run.cfg.diloco:
        from jaxpar.step.diloco.sent import in_words as in_words_of_diloco

        diloco = in_words_of_diloco(run.cfg)
    if run.cfg.parallel.replica > 1 and not run.cfg.diloco:
        from jaxpar.prediction.communication import in_words_of_sums, sent_over_replicas

        replicas = in_words_of_sums(run.cfg)
        manifest["bytes_sent_over_replica"] = sent_over_replicas(run.cfg)
    if run.origin is not None:
        manifest["initial_weights"] = str(run.origin)
        initial_weights.keep_files(run.origin, run.dir)
    if run.weights_from:
        manifest["weights_from"] = chosen_to_json(run.weights_from)
    if (found := run.certified) is not None:
        manifest["certificate"] = {"no_longer_applies": list(found.reasons)}
        records.write(CERTIFICATE_FILE, json.dumps(to_values(found.certificate), indent=2) + "\n")
    if steps := sorted(set(run.cfg.run.record_routing)):
        manifest["recorded_routing"] = {
            "files": [file_of(step) for step in steps],
            "bytes_of_each_uncompressed": bytes_of_a_step(run.cfg),
        }
    records.write("manifest.json", json.dumps(manifest, indent=2) + "\n")
    cfg, size = run.cfg, num_adapter_params(run.cfg.model, run.cfg.lora)
    adapters = f"{size:,} parameters of adapters"
    adapters += f", rank {cfg.lora.rank} on {', '.join(cfg.lora.targets)}" if cfg.lora else ""
    hints = alignment_hints(cfg) if jax.default_backend() == "gpu" else []  # sizes slow on GPUs
    kinds = {layer.name for layer in cfg.model.layers}
    rows = [
        ("model", f"{num_params(cfg.model):,} parameters, {cfg.compute.dtype}"),
        ("layers", in_words_of_layers(cfg.model.layers) if len(kinds) > 1 else ""),
        ("trained", adapters if size else ""),
        ("mup", in_words_of_mup(cfg.model)),
        ("diloco", diloco),
        ("replicas", replicas),
        ("devices", f"{manifest['device']}, mesh {manifest['mesh']}"),
        ("attention", run.attention),
        ("execution", "; ".join(run.execution.in_words()) if cfg.run.verbose else ""),
        ("data", _data(run)),
        ("sizes", _sizes(run)),
        ("skipped", left_out(run)),
        ("warm-up", shortened(cfg.optimizer, cfg.train.num_steps)),
        *(("hint", line) for line in hints),
        ("certified", str(found) if found is not None else ""),
        ("run", str(run.dir)),
        *(("set", item) for item in environment if cfg.run.verbose),
    ]
    show("\n".join(f"{name:<11}{text}" for name, text in rows if text))


def _data(run: Run) -> str:
    """Describe each source in one line, with its number of epochs by the end of the run."""
    if own := run.cfg.data.source:
        return f"batches of {class_name(own)}"
    sources, epochs = run.loader.sources, run.loader.epochs(run.cfg.train.num_steps)
    total = sum(source.weight for source in sources)
    lines = [
        f"{source.dataset.name}, {source.dataset.num_tokens:,} tokens"
        + (f", {source.weight / total:.2%} of the sequences" if len(sources) > 1 else "")
        + f", {epochs[source.dataset.name]:.3g} epochs"
        for source in sources
    ]
    for stage in run.cfg.data.mixture_schedule:
        parts = ", ".join(f"{weight / sum(stage.weights):.2%}" for weight in stage.weights)
        lines.append(f"after step {stage.step:,}: {parts} of the sequences")
    return "\n           ".join(lines)


def _sizes(run: Run) -> str:
    """Describe the sizes of the steps, if they change."""
    found = step_sizes(run.cfg).sizes
    words = [in_words(run.config_of(size.rows, size.length)) for size in found]
    later = zip(found[1:], words[1:], strict=True)
    lines = words[:1] + [f"after step {size.step:,}: {text}" for size, text in later]
    return "\n           ".join(lines) if len(found) > 1 else ""


def left_out(run: Run) -> str:
    """Describe the batches to skip, and which file lists them: unexpected in a new run."""
    skipped, file = run.loader.skipped, run.dir / SKIPPED_FILE
    if not skipped.ranges:
        return ""
    source = file if file.is_file() else f"the checkpoint of step {run.first_step}"
    fresh = "; this run starts from scratch: delete the file to train on them"
    return f"{skipped}, listed in {source}{fresh * (run.first_step is None)}"
