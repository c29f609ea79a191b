"""Signatures of what is in a store that strangers may reach.

JAX's service serves everybody who reaches its port. So each launcher signs what it writes with the
run's token, and passes over what is not signed. The signature is also part of the key: a stranger
cannot occupy the key of an entry that is written once.
"""

from collections.abc import Mapping

from jaxpar.config.printable import printable
from jaxpar.runtime.messages import warn
from jaxpar.runtime.processes.token import TOKEN_FILE, RunToken

#: Most entries that are named as passed over: a stranger could write any number of them.
MAX_WARNINGS = 20


class PassedOver:
    """Warns of each entry that is passed over, once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def __call__(self, key: str, why: str) -> None:
        if key in self._warned or len(self._warned) >= MAX_WARNINGS:
            return
        self._warned.add(key)
        name = printable("/".join(key.split("/")[:2]))[:100]
        warn(f"the entry {name} of the rendezvous is passed over: {why}")


class Signatures:
    """Those of one run's entries, with its token."""

    def __init__(self, run: str, token: RunToken):
        """Args:     run: names the run, as other runs may use the same store."""
        self._run, self._token, self._pass_over = run, token, PassedOver()

    def signed(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return texts as they are in the store, by their keys there."""
        sign = self._token.sign
        return {
            f"{key}/{sign('key', self._run, key)}": f"{sign('text', self._run, key, text)} {text}"
            for key, text in texts.items()
        }

    def verified(self, stored: Mapping[str, str]) -> dict[str, str]:
        """Return the texts of the store that have been signed with the run's token."""
        texts, has_signed = {}, self._token.has_signed
        for place, signed in stored.items():
            key, _, of_key = place.rpartition("/")
            signature, _, text = signed.partition(" ")
            if has_signed(of_key, "key", self._run, key) and has_signed(
                signature, "text", self._run, key, text
            ):
                texts[key] = text
            else:
                why = "it is not signed with this run's token; if it is from a host of this run, "
                self._pass_over(place, f"{why}give all hosts the same {TOKEN_FILE}")
        return texts
