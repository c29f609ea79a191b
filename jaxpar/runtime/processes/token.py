"""The token of a run: a secret by which its hosts recognize one another.

It is in the file `.token` of the run's folder, which the first launcher creates and only its user
may read. Hosts that share no folder get it from a variable or a file that TOKEN or TOKEN_FILE
names. It is never sent: who has it proves that by HMAC-SHA256. This authenticates; it does not
encrypt.
"""

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.rules.paths import absolute
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.lock import create_in

#: Variables with the token itself, and with the path of a file that has it.
TOKEN, TOKEN_FILE = "JAXPAR_TOKEN", "JAXPAR_TOKEN_FILE"

#: The file of a run's folder. Hidden files stay out of object stores.
FILE = ".token"

#: Characters of a token, at least and at most.
LEAST, MOST = 16, 1024

#: How to make one.
_NEW = "python -c 'import secrets; print(secrets.token_hex())'"


@dataclass(frozen=True)
class RunToken:
    """A token."""

    secret: str = field(repr=False)
    file: Path | None = None
    """Where it is from; None for the variable TOKEN."""

    def sign(self, *texts: str) -> str:
        """Return the signature of some texts, as 64 hexadecimal digits."""
        content = b"".join(
            len(part).to_bytes(8, "big") + part for part in (t.encode() for t in texts)
        )
        return hmac.new(self.secret.encode(), content, hashlib.sha256).hexdigest()

    def has_signed(self, signature: str, *texts: str) -> bool:
        """Return whether a signature is that of these texts, in constant time."""
        return hmac.compare_digest(signature.encode(), self.sign(*texts).encode())

    def environment(self) -> dict[str, str]:
        """Return the variables by which processes of this host find it."""
        return {TOKEN_FILE: str(self.file)} if self.file else {TOKEN: self.secret}


def given_token(env: Mapping[str, str] = os.environ) -> RunToken | None:
    """Return the token that the variables name; None without any.

    Raises:   ConfigError for a file that cannot be read, or a text that is no token.
    """
    if env.get(TOKEN):
        return RunToken(_checked(TOKEN, "its value", env[TOKEN]))
    if not env.get(TOKEN_FILE):
        return None
    path = absolute(env[TOKEN_FILE])
    return RunToken(_checked(TOKEN_FILE, str(path), _read(TOKEN_FILE, path)), path)


def token_of(run_dir: Path, env: Mapping[str, str] = os.environ) -> RunToken:
    """Return the token of a run, for a launcher. Creates it if the run has none.

    Raises:   ConfigError as `given_token`, also for the file of the run's folder.
    """
    if (given := given_token(env)) is not None:
        return given
    path = absolute(run_dir) / FILE
    with create_in(run_dir):
        atomic.create(path, f"{secrets.token_hex(32)}\n".encode(), 0o600)
    return RunToken(_checked("run.dir", str(path), _read("run.dir", path)), path)


def _read(name: str, path: Path) -> str:
    """Raises:   ConfigError."""
    try:
        with open(path, "rb") as file:
            return file.read(MOST + 2).decode("ascii").strip()
    except OSError as error:
        rule, fix = f"cannot be read: {error.strerror}", f"make it readable, or set {TOKEN_FILE}"
        raise ConfigError(name, str(path), rule, fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(name, str(path), "is no token: it is not ASCII", f"use {_NEW}") from error


def _checked(name: str, where: str, text: str) -> str:
    """Raises:   ConfigError."""
    text = text.strip()
    if not LEAST <= len(text) <= MOST or not text.isascii() or not text.isprintable():
        rule = f"is no token: it must be {LEAST} to {MOST:,} printable characters"
        fix = f"delete the file while no launcher runs, or write {_NEW} into it"
        fix = f"set it to the output of {_NEW}" if name == TOKEN else fix
        raise ConfigError(name, where, rule, fix)
    return text
