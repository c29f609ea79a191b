"""The certificate of a config: what `python -m jaxpar.certify` found, and where it still applies.

A run keeps it as RUN/certificate.json. It applies to the config, the sources, the versions, the
driver, the GPU and the flags with which it was made; `reasons_against` names what has changed.
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import math
import platform
import resource
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec

import jaxpar
from jaxpar.config import Config, ConfigError, replace
from jaxpar.config import values as own_values
from jaxpar.config.declared import Misshapen, Name, convert, to_builtins
from jaxpar.config.fields import field_types
from jaxpar.config.json_reader import read_json_object
from jaxpar.config.layers import FIELD, flat_values
from jaxpar.config.names import CONFIG_MODULE
from jaxpar.config.serialize import value_text
from jaxpar.config.validate import resolve
from jaxpar.runtime import provenance
from jaxpar.runtime.gpus import visible, xla_flags

#: The file in the folder of a run.
CERTIFICATE_FILE = "certificate.json"

#: Most results and sources of a certificate, and most characters of a text in it.
MAX_RESULTS, MAX_TEXT = 100_000, 10_000

#: The check that compares kernels with their references at the run's own shapes: a run that is
#: certified does not test them again.
KERNELS = "kernels"

#: Fields, and sections, that no step reads: what a run logs, and where its files and its processes
#: are.
NO_STEP_READS = (
    *("train.log_every", "metrics.tensorboard", "metrics.wandb", "metrics.mlflow", "metrics.gpus"),
    *("metrics.prometheus_port", "metrics.prometheus_address", "metrics.sinks"),
    *("run.record_routing", "run.verbose", "profile", "evaluation"),
    *("run.dir", "run.store", "run.compilation_cache", "run.cpu_devices", "checkpoint", "cluster"),
    *("data.path", "data.cache_dir", "data.cache_gib", "data.prefetch", "data.tokenize_workers"),
)

#: Those that a certificate does not depend on: how long a run is and its learning rate, too.
FREE = (
    *("train.num_steps", "train.num_tokens", "train.num_epochs", "train.early_stop_patience"),
    *("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.warmup_fraction"),
    *("optimizer.decay_steps", "optimizer.min_lr_ratio"),
    *NO_STEP_READS,
)

#: Environment variables that change what is computed, beside the XLA flags.
VARIABLES = (
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "NVIDIA_TF32_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
)

type _Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
type _ByName = Annotated[dict[Name, _Text], msgspec.Meta(max_length=MAX_RESULTS)]


@dataclass(frozen=True)
class Result:
    """One comparison.

    Args:
        check: name of the check.
        mesh: where it ran; "" if on no mesh of its own.
        what: what is compared, the same in every run: "gradient".
        where: the worst of what is compared, such as the name of a parameter. "" if there is only
            one.
        distance: between the two; 0 for equal bits.
        tolerance: largest distance that passes.
        not_run: why it was not run; "" if it was.
        detail: after a failure, the first wrong tensor, layer and direction, and the smallest mesh
            that shows it.
    """

    check: Name
    mesh: Name
    what: _Text
    distance: float = 0.0
    tolerance: float = 0.0
    not_run: _Text = ""
    where: _Text = ""
    detail: _Text = ""

    def __post_init__(self) -> None:
        # Checks compute with numpy, whose numbers JSON does not take.
        for name in ("distance", "tolerance"):
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def passed(self) -> bool:
        """Whether the distance is within the tolerance. A NaN is not."""
        return bool(self.not_run) or (
            math.isfinite(self.distance) and self.distance <= self.tolerance
        )

    def __str__(self) -> str:
        at = f"{self.mesh or self.check}: {self.what}"
        if self.not_run:
            return f"{at}: {self.not_run}"
        named = f" of {self.where}" if self.where else ""
        off = f"{at}{named} is off by {self.distance:.1e}, allowed {self.tolerance:.1e}"
        return f"{off} ({self.detail})" if self.detail else off


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What a result depends on beside the config.

    Args:
        gpu, driver: of NVIDIA; "" on CPU devices.
        flags: XLA flags of the user, without their dashes, and `VARIABLES`. Those that jaxpar sets
            follow from the config, the GPU and the sources.
        commit: of a checkout, for the reader: sources are compared.
        sources: SHA-256 by package of jaxpar, and by file or module of a user's code.
    """

    python: Name
    jax: Name
    jaxlib: Name
    jaxpar: Name
    gpu: Name
    driver: Name
    flags: _ByName
    commit: Name
    sources: _ByName


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was compared, how it ended, and where. The content of the file.

    Args:
        name: CONFIG, as it was named.
        date: in UTC, ISO 8601.
        config: as asked for, with every field.
        cpu_seconds: that it took.
    """

    name: Name
    date: Name
    conditions: Conditions
    config: dict[str, Any]
    results: Annotated[tuple[Result, ...], msgspec.Meta(max_length=MAX_RESULTS)]
    cpu_seconds: float

    @classmethod
    def of(
        cls, name: str, cfg: Config, conditions: Conditions, results: Iterable[Result]
    ) -> "Certificate":
        """Make the certificate of this process's work.

        Args:     conditions: when it began.
        """
        return cls(
            name=name,
            date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}",
            conditions=conditions,
            config=json.loads(json.dumps(own_values.to_values(cfg))),
            results=tuple(results),
            cpu_seconds=round(_cpu_seconds(), 1),
        )

    @property
    def failed(self) -> list[Result]:
        """The results beyond their tolerance."""
        return [result for result in self.results if not result.passed]

    @property
    def not_run(self) -> list[Result]:
        """What was left out."""
        return [result for result in self.results if result.not_run]

    def has(self, check: str) -> bool:
        """Whether a check ran, and passed wherever it ran."""
        of_check = [r for r in self.results if r.check == check and not r.not_run]
        return bool(of_check) and all(result.passed for result in of_check)

    def __str__(self) -> str:
        ran = len(self.results) - len(self.not_run)
        left = f", {len(self.not_run)} not run" if self.not_run else ""
        passed = ran - len(self.failed)
        return f"of {self.date[:10]}: {passed} of {ran} comparisons passed{left}"


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


# ---------------------------------------------------------------------------------------- its file


def to_values(certificate: Certificate) -> dict[str, Any]:
    """Return a certificate as JSON's types. A distance that is no number is None."""
    values = to_builtins(certificate)
    for result in values["results"]:
        if not math.isfinite(result["distance"]):
            result["distance"] = None
    return values


def read_certificate(source: Path | bytes) -> Certificate:
    """Read a certificate.

    Raises:   UnreadableJson for another form or version; OSError.
    """
    what = "it" if isinstance(source, bytes) else str(source)
    values = read_json_object(source, what=what)
    results = values.get("results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, dict) and result.get("distance", 0.0) is None:
            result["distance"] = math.inf
    found = convert(Certificate, values, what)
    if not all(isinstance(section, dict | None) for section in found.config.values()):
        raise Misshapen(f"{what} has another form: config has a section that is no object")
    return found


# ------------------------------------------------------------------------------- what it depends on


def conditions_of(cfg: Config) -> Conditions:
    """Return the conditions of a run of a config in this process. Starts no backend."""
    on_gpu = visible.gpu_is_present() and not cfg.run.cpu_devices
    gpu, driver = visible.gpu_and_driver() if on_gpu else ("", "")
    return Conditions(
        **provenance.libraries(),
        python=platform.python_version(),
        gpu=gpu,
        driver=driver,
        flags=_flags(),
        commit=provenance.checked_out_commit(),
        sources=dict(_package_sources()) | _own_sources(cfg),
    )


#: XLA flags that change no number, as they begin.
_WITHOUT_NUMBERS = ("xla_dump", "xla_force_host_platform_device_count")


def _flags() -> dict[str, str]:
    flags = xla_flags.flags_of_user() | xla_flags.variables_of_user(VARIABLES)
    return {n: flags[n] for n in sorted(flags) if not n.startswith(_WITHOUT_NUMBERS)}


@functools.cache
def _package_sources() -> Mapping[str, str]:
    """Return the digest of each package of jaxpar but `tools`, which trains nothing."""
    root = Path(jaxpar.__file__).parent
    files: dict[str, list[Path]] = {}
    for file in sorted(root.rglob("*")):
        first, *rest = file.relative_to(root).parts
        if file.is_file() and first not in ("tools", "configs") and "__pycache__" not in rest:
            files.setdefault(f"jaxpar/{first}" if rest else "jaxpar", []).append(file)
    return {name: _digest(those) for name, those in files.items()}


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _own_sources(cfg: Config) -> dict[str, str]:
    """Return the digest of each file of a user's classes and functions, and of what it imports."""
    left, found = list(_modules_of(replace(cfg, **{"metrics.sinks": ()}))), dict[str, str]()
    while left:
        module = left.pop()
        file = Path(getattr(module, "__file__", None) or "")
        named = module.__name__.startswith((CONFIG_MODULE, "__main__"))
        name = file.name if named else module.__name__
        if _is_ours(module) or not file.is_file() or name in found:
            continue
        found[name] = _digest([file])
        beside = module.__name__.partition(".")[0]
        for one in vars(module).values():
            other = one if isinstance(one, ModuleType) else _module_of(one)
            if other is not None and (
                other.__name__.partition(".")[0] == beside or not _is_installed(other)
            ):
                left.append(other)
    return dict(sorted(found.items()))


def _modules_of(node: Any) -> Iterator[ModuleType]:
    """Yield the modules of the classes and the functions of a config."""
    if isinstance(node, tuple):
        for one in dict.fromkeys(node):
            yield from _modules_of(one)
    elif dataclasses.is_dataclass(node) and not isinstance(node, type):
        yield from (m for cls in type(node).__mro__ if (m := _module_of(cls)) is not None)
        for field in dataclasses.fields(node):
            yield from _modules_of(getattr(node, field.name))
    elif callable(node) and (module := _module_of(node)) is not None:
        yield module


def _module_of(value: Any) -> ModuleType | None:
    name = getattr(value, "__module__", None)
    return sys.modules.get(name) if isinstance(name, str) else None


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] == "jaxpar"


def _is_installed(module: ModuleType) -> bool:
    """Whether a module is of Python, or of a package that was installed."""
    file = getattr(module, "__file__", None)
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return file is None or any(Path(file).is_relative_to(place) for place in places)


# ------------------------------------------------------------------------------ where it applies


def reasons_against(
    certificate: Certificate, cfg: Config, now: Conditions, devices: int | None = None
) -> list[str]:
    """Say why a certificate does not apply to a run of a config; nothing if it does.

    Args:     cfg: of the run. now: `conditions_of` it. devices: of the run, with which fields are
              compared that follow from them; None: as they are.
    """
    reasons = []
    if bad := certificate.failed:
        reasons.append(f"it failed: {bad[0]}")
    elif not len(certificate.results) > len(certificate.not_run):
        reasons.append("it compares nothing")
    then = certificate.conditions
    for name, what in COMPARED.items():
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            reasons.append(f"{what} is {after or 'none'}, was {before or 'none'}")
    for name, before, after in _changes(then.flags, now.flags):
        reasons.append(f"flag {name} is {_told(after)}, was {_told(before)}")
    for name, before, after in _changes(then.sources, now.sources):
        how = "is new" if before is None else "is gone" if after is None else "has changed"
        reasons.append(f"the source of {name} {how}")
    for path, before, after in _changes_of_config(certificate.config, cfg, devices):
        new, old = (value_text(path, _told(value)) for value in (after, before))
        reasons.append(f"{path} is {new}, was {old}")
    return reasons


#: The conditions that are compared as they are.
COMPARED = {"jax": "JAX", "jaxlib": "jaxlib", "driver": "the driver", "gpu": "the GPU"}


def _told(value: Any) -> Any:
    return "not set" if value is None else value


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name):
            yield name, then.get(name), now.get(name)


def is_in(path: str, places: Iterable[str]) -> bool:
    """Whether a field is one of some fields and sections."""
    return any(path == place or path.startswith(f"{place}.") for place in places)


def _changes_of_config(
    then: dict[str, Any], cfg: Config, devices: int | None
) -> list[tuple[str, Any, Any]]:
    """Return the fields that differ and matter: path, value then, value now."""
    now = flat_values(json.loads(json.dumps(own_values.to_values(cfg))))
    found = [change for change in _changes(flat_values(then), now) if not is_in(change[0], FREE)]
    can_be_set = field_types().keys() - {FIELD, *own_values.FIELDS}
    plain = {
        path: before
        for path, before, _ in found
        if path in can_be_set and not isinstance(before, list | dict)
    }
    if not plain or devices is None:
        return found
    try:  # what follows from the devices is alike if it does from the values then
        as_then = resolve(replace(cfg, **plain), devices)
        resolved = own_values.to_values(resolve(cfg, devices))
    except (ConfigError, TypeError, ValueError):
        return found
    before, after = flat_values(own_values.to_values(as_then)), flat_values(resolved)
    return [
        change
        for change in found
        if change[0] not in plain or before.get(change[0]) != after.get(change[0])
    ]
