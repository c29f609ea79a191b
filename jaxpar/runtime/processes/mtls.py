"""The certificates with which processes and their coordinator recognize each other.

JAX reads four variables (jax 0.11.2, `jax.distributed.initialize`): JAX_MTLS_CERT_FILE,
JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE and JAX_MTLS_PEER_URI_PREFIX. It ends the process without a
message of its own if one of the files is missing, or waits for a peer that it refuses. So the files
are checked before anything starts. This module imports no JAX: launchers and their services use it.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxpar.config import ConfigError

#: Variables of files, by the argument of JAX's service and client.
FILES = {
    "mtls_cert_file": "JAX_MTLS_CERT_FILE",
    "mtls_key_file": "JAX_MTLS_KEY_FILE",
    "mtls_ca_file": "JAX_MTLS_CA_FILE",
}
URI_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"

#: How each file begins, after text that PEM allows before.
BEGINS = {
    "mtls_cert_file": ("CERTIFICATE",),
    "mtls_key_file": ("PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"),
    "mtls_ca_file": ("CERTIFICATE",),
}


def arguments(env: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the arguments of JAX's coordination service and client; none without certificates.

    Raises:   ConfigError if only some variables are set, for a file that cannot be read or is not
              PEM, for a key that others may read, and for a prefix that does not end with "/".
    """
    missing = [name for name in FILES.values() if not env.get(name)]
    prefix = env.get(URI_PREFIX, "")
    if len(missing) == len(FILES) and not prefix:
        return {}
    if missing:
        there = [name for name in (*FILES.values(), URI_PREFIX) if env.get(name)]
        rule, fix = f"needs {' and '.join(missing)} too", "set all three files, or none"
        raise ConfigError(there[0], env[there[0]], rule, fix)
    for argument, name in FILES.items():
        _check(name, Path(env[name]), BEGINS[argument], secret=argument == "mtls_key_file")
    if prefix and not prefix.endswith("/"):
        rule = "must end with '/', since it would also admit names that only begin alike"
        raise ConfigError(URI_PREFIX, prefix, rule, f"{URI_PREFIX}={prefix}/")
    found = {argument: env[name] for argument, name in FILES.items()}
    return found | ({"mtls_peer_uri_prefix": prefix} if prefix else {})


def _check(name: str, file: Path, begins: tuple[str, ...], *, secret: bool) -> None:
    try:
        text = file.read_bytes()
        mode = stat.S_IMODE(file.stat().st_mode)
    except OSError as error:
        fix = "name a file that this user can read"
        raise ConfigError(name, str(file), f"cannot be read ({error.strerror})", fix) from None
    if not any(f"-----BEGIN {kind}-----".encode() in text for kind in begins):
        fix = "name a PEM file, as openssl writes it"
        raise ConfigError(name, str(file), f"has no PEM block {begins[0]}", fix)
    if secret and mode & (stat.S_IRWXO | stat.S_IWGRP):
        rule = f"is a private key that others may use (mode {mode:o})"
        raise ConfigError(name, str(file), rule, f"chmod 600 {file}")
