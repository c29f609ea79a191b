"""Convert models: python -m jaxpar.convert from-hf, from-... DIR RUN; to-hf, to-... RUN OUT."""

from jaxpar import commands
from jaxpar.convert import options as forms

OPTIONS = {
    "from-hf": forms.FromHf,
    "from-peft": forms.FromPeft,
    "from-megatron": forms.FromMegatron,
    "to-hf": forms.ToHf,
    "to-peft": forms.ToPeft,
    "to-torch": forms.ToTorch,
}


def main(options: forms.Options) -> int:
    """Convert, check, and report. Returns the exit code."""
    from jaxpar.convert.command import convert

    return convert(options)


if __name__ == "__main__":
    commands.run(__name__)
