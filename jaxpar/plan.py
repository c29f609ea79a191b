"""Plan a run before it starts: python -m jaxpar.plan CONFIG --gpus N --gpu NAME [options]

Lists every layout that the config allows on the GPUs (mesh, ZeRO stage, microbatches, remat
policy), predicts the memory and step time of each, and ranks them. It uses no GPU. docs/planning.md
explains the predictions and compares them with measurements.

Exit codes: 0 planned, 2 invalid input or no layout fits.
"""

from jaxpar import commands
from jaxpar.tools.planning import options as forms

OPTIONS = {
    "": forms.PlanOptions,
    "--goodput": forms.GoodputOptions,
    "--hardware": forms.HardwareOptions,
}


def main(options: forms.Options) -> int:
    """Answer, and return the exit code."""
    from jaxpar.tools.planning.command import plan

    return plan(options, commands.model_from, commands.with_vocabulary)


if __name__ == "__main__":
    commands.run(__name__)
