"""Prepare, convert and inspect datasets of tokens, for `data.path`: python -m jaxpar.data"""

from typing import Any

from jaxpar import commands
from jaxpar.config.schema.features import objectives
from jaxpar.data import options as forms

_OF_OBJECTIVES = {k: v for cls in objectives().values() for k, v in cls.data_commands().items()}

OPTIONS = {
    "prepare": forms.PrepareOptions,
    "prepare-chat": forms.PrepareChatOptions,
    "prepare-pairs": forms.PreparePairsOptions,
    "reframe": forms.ReframeOptions,
    "convert": forms.ConvertOptions,
    "inspect": forms.InspectOptions,
    **{name: options for name, (options, _) in _OF_OBJECTIVES.items()},
}


def main(options: Any) -> None:
    """Run a subcommand, and print what it did."""
    work = {kind: run for kind, run in _OF_OBJECTIVES.values()}.get(type(options))
    if work is not None:
        from jaxpar.runtime.processes import rendezvous

        cfg, _ = rendezvous.join(options.config.checked(commands.model_from))
        work(cfg)
        return
    from jaxpar.data.command import run

    print(run(options))


if __name__ == "__main__":
    commands.run(__name__)
