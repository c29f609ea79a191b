"""Finds published models: a folder on this host, or a name on the Hugging Face Hub.

A model of the Hub is named as there, org/model, or org/model@revision with a branch, a tag or a
commit. Its files are downloaded into the Hub's cache (HF_HOME), from which later calls read them,
also without a network. An interrupted download is resumed. Credentials are those of `hf auth
login`, or HF_TOKEN.
"""

import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxpar.config import ConfigError
from jaxpar.config.command_line import as_called

#: Names of models on the Hub. A relative path of two parts has the same form.
NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)

#: Names without an organization that the Hub keeps for models of its first years.
FIRST_NAMES = {
    "distilgpt2": "distilbert/distilgpt2",
    **{
        name: f"openai-community/{name}"
        for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    },
}

#: Copies of the weights in other formats, beside the published ones.
LEFT_OUT = ("*/*", "consolidated*")


@dataclass(frozen=True)
class Snapshot:
    """The files of a model at one commit."""

    folder: Path
    name: str
    """org/model@commit; the path of a folder that was not downloaded."""

    def __str__(self) -> str:
        return self.name


def is_name(text: str) -> bool:
    """Return whether a text is the name of a model of the Hub, and no path on this host."""
    return named(text) is not None and not Path(text).exists()


def named(text: str) -> re.Match[str] | None:
    """Return the model and the revision that a text names, if it is a name of the Hub."""
    name, at, revision = text.partition("@")
    return NAME.fullmatch(FIRST_NAMES.get(name, name) + at + revision)


def find(text: str, option: str, files: Sequence[str], rule: str, fix: str) -> Snapshot:
    """Return the folder that `text` names, after downloading it if it is a name of the Hub.

    Args:     option: for errors. files: patterns of the files to download. rule, fix: of the error
              for a text that is neither a path nor a name.
    Raises:   ConfigError in one line: not found, not allowed, or not reachable.
    """
    if Path(text).exists():
        return Snapshot(Path(text), text)
    if text.startswith("runs/"):
        fix = as_called("use one of `python -m jaxpar.report --list runs`")
        raise ConfigError(option, text, "does not exist", fix)
    found = named(text)
    if found is None:
        raise ConfigError(option, text, rule, fix)
    folder = _download(found["model"], found["revision"], files, text, option)
    return Snapshot(folder, f"{found['model']}@{folder.name}")


def _download(
    model: str, revision: str | None, files: Sequence[str], text: str, option: str
) -> Path:
    with reaching(
        model, revision, text, option, f"is not a path on this host; on the Hub, {model}"
    ):
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model, revision=revision, allow_patterns=list(files), ignore_patterns=list(LEFT_OUT)
        )
    return Path(found)


@contextmanager
def reaching(
    name: str, revision: str | None, text: str, option: str, here: str, kind: str = "model"
) -> Iterator[None]:
    """Translate the errors of a call of huggingface_hub.

    Args:     name: of the model or dataset. text, option: what the user gave. here: the rule of the
              error, before the reason. kind: "model" or "dataset".
    Raises:   ConfigError in one line: not found, not allowed, or not reachable.
    """
    # Takes 0.3 s to import, and few runs need it.
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # failures are reported once, below
    page, fix = (
        f"https://huggingface.co/{name}",
        f"connect to the network and run `hf download {name}`",
    )
    if kind == "dataset":
        page = page.replace(name, f"datasets/{name}")
        command = f"hf download {name} --repo-type dataset --local-dir DIR"
        fix = f"run `{command}` where there is a network, and use {option} DIR"
    try:
        yield
    except errors.GatedRepoError as error:
        fix = f"accept its terms at {page}, and log in with `hf auth login`"
        raise ConfigError(option, text, f"{here} needs permission", fix) from error
    except errors.RevisionNotFoundError as error:
        fix = f"use a branch, a tag or a commit of the {kind}"
        raise ConfigError(option, text, f"{here} has no revision {revision!r}", fix) from error
    except errors.RepositoryNotFoundError as error:
        fix = f"correct the path or the name; for a private {kind}, log in with `hf auth login`"
        raise ConfigError(option, text, f"{here} does not exist, or is private", fix) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        rule = f"{here} cannot be reached, and the cache of this host does not have it"
        raise ConfigError(option, text, rule, f"correct the path, or {fix}") from error
    except (errors.HfHubHTTPError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        fix = "try again; files that are complete are not downloaded again"
        raise ConfigError(option, text, f"{here} cannot be downloaded: {why}", fix) from error
    except Exception as error:  # of the library's client, which differs by version
        if not type(error).__module__.startswith("http"):
            raise
        rule = f"{here} cannot be reached ({' '.join(str(error).split())[:200]})"
        raise ConfigError(option, text, rule, f"correct the path, or {fix}") from error


def answers(seconds: float = 5) -> bool:
    """Return whether the Hub answers, in any way, within some seconds. False if HF_HUB_OFFLINE."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(endpoint, timeout=seconds).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True
