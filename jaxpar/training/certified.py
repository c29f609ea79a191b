"""The certificate of a run: made before its first step, read at its start.

Where it applies, self-tests of kernels that it has need not be repeated. Where it no longer does,
the run says why.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import Config, ConfigError, flag
from jaxpar.config.command_line import ConfigArguments
from jaxpar.config.json_reader import UnreadableJson
from jaxpar.monitoring.certificate import (
    CERTIFICATE_FILE,
    KERNELS,
    Certificate,
    conditions_of,
    read_certificate,
    reasons_against,
)
from jaxpar.runtime import exit_codes
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.processes import children, rendezvous
from jaxpar.runtime.processes.peers import log
from jaxpar.runtime.terminal import warn

#: Most reasons that a start lists.
_MOST = 4


class NotCertified(exit_codes.RunError):
    """The config does not compute what it says."""

    code = exit_codes.EXIT_NUMERICS


@dataclass(frozen=True)
class Certified:
    """A certificate, and why it does not apply to a run."""

    certificate: Certificate
    reasons: tuple[str, ...]

    @property
    def has_kernels(self) -> bool:
        """Whether the kernels of the run need no test."""
        return not self.reasons and self.certificate.has(KERNELS)

    def __str__(self) -> str:
        if not self.reasons:
            return f"{self.certificate}; applies"
        more = f", and {len(self.reasons) - _MOST} more" if len(self.reasons) > _MOST else ""
        why = "; ".join(self.reasons[:_MOST])
        return f"{self.certificate}; no longer applies: {why}{more}"


def certified(
    cfg: Config, folder: Path, named: str, devices: int | None = None
) -> Certified | None:
    """Read the certificate of a run; None without one.

    Args:     named: the file of `--certificate`; "" for that of the folder. devices: as in
              `reasons_against`.
    Raises:   ConfigError for a named file that cannot be read.
    """
    file = Path(named) if named else folder / CERTIFICATE_FILE
    if not named and not file.is_file():
        return None
    try:
        found = read_certificate(file)
    except (OSError, UnreadableJson) as error:
        if not named:
            warn(f"the certificate cannot be read: {error}")
            return None
        rule, fix = f"cannot be read: {error}", "use a file that python -m jaxpar.certify has made"
        raise ConfigError("--certificate", named, rule, fix) from error
    return Certified(found, tuple(reasons_against(found, cfg, conditions_of(cfg), devices)))


def _devices(cfg: Config) -> int:
    """Return the devices that a run of one process has, before JAX starts."""
    if cfg.run.cpu_devices or not visible.gpu_is_present():
        return cfg.run.cpu_devices or 1
    return visible.visible_gpus()


def certify_first(arguments: ConfigArguments, cfg: Config) -> None:
    """Certify a config in a process of its own, unless the certificate in its folder applies.

    Before JAX starts: the other process has the GPUs meanwhile. Writes RUN/certificate.json, also
    when the config fails.

    Args:     arguments: of `cfg`.
    Raises:   NotCertified if the config fails; ConfigError for one of several processes.
    """
    rendezvous.require_single_process("train --certify")
    folder = Path(cfg.run.dir)
    before = certified(cfg, folder, "", _devices(cfg))
    if before is not None and not before.reasons:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / CERTIFICATE_FILE
    file.unlink(missing_ok=True)  # it does not apply
    words = [arguments.name, *arguments.overrides, "--output", str(file)]
    if not arguments.base.model.vocab_size:  # it is that of the data
        words += [flag("model.vocab_size"), str(cfg.model.vocab_size)]
    log(f"certify    {arguments.name}, before the first step")
    child = children.start([sys.executable, "-m", "jaxpar.certify", *words], os.environ, None)
    try:
        code = child.wait()
    finally:
        child.end()
    if code == exit_codes.EXIT_OK:
        return
    if code == exit_codes.EXIT_CONFIG:
        fix = "train without --certify, or use options that certify can run"
        raise ConfigError("--certify", arguments.name, "cannot be certified, see above", fix)
    if not file.is_file():
        raise exit_codes.RunError(
            f"certify ended with code {code} before its last check, see above"
        )
    raise NotCertified(
        f"{arguments.name} is not certified, see above: a run would not compute what its config "
        f"says ({file}). Fix: use another option, or report the fault; train without --certify to "
        "train nevertheless"
    )
