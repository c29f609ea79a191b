"""Certificates of an authority that a test makes."""

import subprocess
from pathlib import Path

from jaxpar.runtime.processes import mtls


def make(folder: Path, name: str, alternative: str) -> dict[str, str]:
    """Make an authority and a certificate of it with openssl. Returns: JAX's variables.

    Args:     name: of the authority. alternative: the certificate's subjectAltName.
    """
    where = folder / name
    where.mkdir()

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=where, check=True, capture_output=True)

    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    openssl(*new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", f"/CN={name}")
    signed = [*new, "-keyout", "own.key", "-out", "own.pem", "-subj", "/CN=process"]
    signed += ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", f"subjectAltName={alternative}"]
    openssl(*signed)
    files = ("own.pem", "own.key", "ca.pem")
    (where / "own.key").chmod(0o600)
    return {
        variable: str(where / file)
        for variable, file in zip(mtls.FILES.values(), files, strict=True)
    }
