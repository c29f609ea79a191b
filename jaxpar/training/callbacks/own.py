"""A user's callbacks in the list of a run, and what they ask for."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from jaxpar.checkpoint.saved import Saved
from jaxpar.config import Config, ConfigError
from jaxpar.config.json_reader import UnreadableJson, read_json_object
from jaxpar.config.values import fields_of, require_code
from jaxpar.monitoring.metric_names import METRICS
from jaxpar.runtime.exit_codes import RunError
from jaxpar.runtime.processes import peers
from jaxpar.sharding.batch import Batch
from jaxpar.training.callbacks.callback import Callback, Progress, Request, RunCallback

#: The field of the config with a user's callbacks.
FIELD = "train.callbacks"

#: Fewest steps between a request of one process and the step at which all follow it: a process is
#: at most one step ahead of another.
AHEAD = 3

#: Numbers the loops of this process, which all processes count alike.
_LOOPS = itertools.count()


def key_of(callback: Callback) -> str:
    """Return the key under which checkpoints have a callback's state."""
    return callback.key or type(callback).__name__


def given(cfg: Config) -> tuple[Callback, ...]:
    """Return a config's callbacks."""
    return cast(tuple[Callback, ...], cfg.train.callbacks)


def check(cfg: Config) -> None:
    """Check a config's callbacks.

    Raises:   ConfigError for two with one key, for a field that is no option, and for a value whose
              code is not loaded.
    """
    require_code(cfg)
    for one in cfg.train.callbacks:
        for field in fields_of(type(one)):
            try:
                json.dumps(value := getattr(one, field.name))
            except TypeError:
                rule = "is no option: config.json has numbers, texts, and tuples of them"
                fix = "keep it in what prepare() returns, or in the module"
                name = f"{FIELD}: {type(one).__name__}.{field.name}"
                raise ConfigError(name, value, rule, fix) from None
    keys = [key_of(one) for one in given(cfg)]
    for key in keys:
        if keys.count(key) > 1:
            rule = f"is the key of {keys.count(key)} callbacks, whose state a checkpoint has by key"
            raise ConfigError(FIELD, key, rule, f'give each its own: key="{key} 2"')


class OwnCallback(RunCallback):
    """A user's callback, with what it keeps during a run."""

    def __init__(self, callback: Callback, requests: "Requests", saved: str):
        """Args:     saved: what the checkpoint has of it, as JSON; "" for nothing."""
        self.callback, self.key = callback, key_of(callback)
        self._requests, self._saved, self._own = requests, saved, None

    def prepare(self, at: Progress) -> None:
        self._own = self.callback.prepare(at)
        if self._saved:
            try:
                saved = read_json_object(self._saved.encode(), what="its state", constants=True)
            except UnreadableJson as error:
                raise RunError(f"{FIELD}: {self.key}: {error}") from None
            self._own = self.callback.restore(at, self._own, saved)
        self.save(at)  # a state that is no JSON is refused now, not at the first checkpoint

    def before_step(self, at: Progress, batch: Batch) -> Batch:
        new = self.callback.before_step(at, self._own, batch)
        return batch if new is None else new

    def after_step(self, at: Progress) -> Progress:
        request = self._checked("after_step", self.callback.after_step(at, self._own))
        return at if request is None else self._requests.add(at, self.key, request)

    def evaluate(
        self, at: Progress, losses: Mapping[str, float | None]
    ) -> tuple[Progress, Mapping[str, Any]]:
        returned = self.callback.evaluate(at, self._own, losses)
        request = self._checked("evaluate", returned, losses)
        if request is None:
            return at, {}
        decided = Request(stop=request.stop, save=request.save)
        return self._requests.add(at, self.key, decided), request.metrics

    def save(self, at: Progress) -> str:
        state = self.callback.save(at, self._own)
        try:
            if not isinstance(state, dict):
                raise TypeError(f"a {type(state).__name__} is no dict")
            return json.dumps(state) if state else ""
        except (TypeError, ValueError) as error:
            fix = "keep numbers, texts, lists and dicts of them: float(x) for an array"
            raise RunError(f"{FIELD}: the state of {self.key}: {error}. Fix: {fix}") from None

    def close(self, at: Progress, error: BaseException | None) -> None:
        self.callback.close(at, self._own, error)

    def _checked(
        self, method: str, returned: Any, known: Mapping[str, Any] = MappingProxyType({})
    ) -> Request | None:
        """Raises:   ConfigError for what is no request; for a metric whose name is taken."""
        if returned is None:
            return None
        where = f"{FIELD}: {self.key}.{method}"
        if not isinstance(returned, Request):
            fix = 'return jaxpar.Request(stop="the reason")'
            raise ConfigError(where, returned, "must return a jaxpar.Request or None", fix)
        for name in returned.metrics:
            if name in known or name in METRICS or name == "step":
                fix = f'give it another name: "{self.key}_{name}"'
                raise ConfigError(where, name, "is the name of another metric", fix)
        return returned


class Requests(RunCallback):
    """What users' callbacks ask for. Comes after them in the list.

    One process follows a request at once. Of several, each publishes its requests to stop and to
    save with a step that is `AHEAD` of its own and a multiple of `train.log_every`; there, all
    processes read them. Metrics are those of process 0, which writes them.
    """

    def __init__(self, add: Callable[[Mapping[str, Any]], None]):
        """Args:     add: adds metrics to the record of the latest step."""
        self._add = add
        self._topic = f"callbacks {next(_LOOPS)}"
        self._published: list[tuple[int, str, bool]] = []

    def add(self, at: Progress, key: str, request: Request) -> Progress:
        """Return the progress with a request of a callback."""
        for name in request.metrics:
            if name in at.metrics or name in at.request.metrics:
                fix = f'give it another name: "{key}_{name}"'
                raise ConfigError(f"{FIELD}: {key}", name, "is the name of another metric", fix)
        stop = request.stop and f"{key}: {request.stop}"
        if peers.world_size() == 1:
            return at.asked(Request(stop=stop, save=request.save, metrics=request.metrics))
        if stop or request.save:
            every = at.config.train.log_every
            agreed = -(-(at.step + AHEAD) // every) * every
            waiting = [one for one in self._published if one[0] >= at.step]
            self._published = [*waiting, (agreed, stop, request.save)]
            peers.publish(self._topic, json.dumps(self._published))
        return at.asked(Request(metrics=request.metrics))

    def after_step(self, at: Progress) -> Progress:
        self._add(at.request.metrics)
        if peers.world_size() == 1 or at.step % at.config.train.log_every:
            return at
        for _, text in sorted(peers.read_published(self._topic).items()):
            for step, stop, save in json.loads(text):
                if step == at.step:
                    at = at.asked(Request(stop=stop, save=save))
        return at


def own_callbacks(
    cfg: Config, saved: Saved | None, add: Callable[[Mapping[str, Any]], None]
) -> list[RunCallback]:
    """Return a config's callbacks for the list of a run.

    Args:     saved: of the state that the run goes on from; None without one. add: as in
              `Requests`.
    """
    if not cfg.train.callbacks:
        return []
    requests, states = Requests(add), saved.callbacks if saved is not None else {}
    own = [OwnCallback(one, requests, states.get(key_of(one), "")) for one in given(cfg)]
    return [*own, requests]


def gone(cfg: Config, saved: Saved | None) -> list[str]:
    """Return a line for each callback whose state the checkpoint has, and which the run has not."""
    if saved is None:
        return []
    lost = sorted(set(saved.callbacks) - {key_of(one) for one in given(cfg)})
    return [f"callback   {key} is gone: its state of step {saved.step} is not used" for key in lost]


def states_of(callbacks: Sequence[RunCallback], at: Progress) -> dict[str, str]:
    """Return what a checkpoint has of callbacks: JSON by key."""
    return {one.key: text for one in callbacks if one.key and (text := one.save(at))}
