"""Prepare, convert and inspect datasets of tokens, for `data.path`: python -m jaxpar.data"""

from jaxpar import commands
from jaxpar.data import options as forms

OPTIONS = {
    "prepare": forms.PrepareOptions,
    "prepare-chat": forms.PrepareChatOptions,
    "prepare-pairs": forms.PreparePairsOptions,
    "reframe": forms.ReframeOptions,
    "convert": forms.ConvertOptions,
    "inspect": forms.InspectOptions,
    "teacher": forms.TeacherOptions,
}


def main(options: forms.Options | forms.TeacherOptions) -> None:
    """Run a subcommand, and print what it did."""
    if isinstance(options, forms.TeacherOptions):
        from jaxpar.runtime.processes import rendezvous
        from jaxpar.training.teacher_cache import keep

        cfg, _ = rendezvous.join(options.config.checked(commands.model_from))
        keep(cfg)
        return
    from jaxpar.data.command import run

    print(run(options))


if __name__ == "__main__":
    commands.run(__name__)
