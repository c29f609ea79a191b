"""The commands of the package, as `jaxpar --help` lists them."""

#: The commands and their descriptions. `jaxpar NAME` is `python -m jaxpar.NAME`.
GROUPS = {
    "start": {
        "quickstart": "prepare text, train a small model on it and sample from it",
        "doctor": "check whether this machine is ready for training",
    },
    "prepare": {
        "data": "tokenize text and chats into datasets; inspect and convert them",
        "plan": "predict the memory and speed of every layout of a config, without a GPU",
        "convert": "import and export published models and adapters",
    },
    "train": {
        "train": "train a model, or resume a run",
        "distill": "keep what a teacher says of the training data, for a distillation",
        "sweep": "train at every point of a grid, and rank the runs",
        "launch": "train with several processes on this host, and restart them on a failure",
    },
    "use a model": {
        "sample": "generate text with the model of a run",
        "chat": "talk with the model of a run in the terminal",
        "evaluate": "score the model of a run on text and on tasks",
    },
    "look at a run": {
        "runs": "list runs, the best one first",
        "report": "write an HTML report of one or more runs",
        "checkpoint": "list, verify and compare checkpoints; branch a run",
        "profile": "show where the time and memory of a step go",
        "replay": "repeat a step of a run and compare it bit by bit",
    },
    "check jaxpar": {
        "verify": "compare meshes with the reference model on one device",
        "mup": "check that activations do not grow with the width of a model",
        "bench": "measure training on this machine, and compare measurements",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
