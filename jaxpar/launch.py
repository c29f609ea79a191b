"""Run the processes of a training run: python -m jaxpar.launch -n N -- CONFIG

On GPUs, each process gets an equal share of CUDA_VISIBLE_DEVICES. Process 0 writes to the terminal,
the others to RUN/logs/rank-N.log. If one process fails, the launcher ends the others and restarts
all of them from the latest checkpoint. It does not restart after a config error (exit code 2),
after non-finite or spiking losses (17), if the same step fails twice with the same error, or after
--restarts restarts without a new checkpoint. The exit code is that of the run. SIGTERM, SIGHUP and
Ctrl-C are passed to every process: the run saves a checkpoint and ends with 75.

Several hosts: python -m jaxpar.launch --nodes MIN:MAX --rendezvous HOST:PORT [-n N] -- CONFIG,
started on each of them. When a host is lost, the others go on from the latest checkpoint; one that
comes back joins them. HOST serves the rendezvous, or another host does, which may then not be lost:
python -m jaxpar.launch --serve-rendezvous HOST:PORT
"""

from jaxpar import commands
from jaxpar.runtime.processes.launch_options import LaunchRun, ServeOptions

OPTIONS = {"": LaunchRun, "--serve-rendezvous": ServeOptions}


def main(options: LaunchRun | ServeOptions) -> int:
    """Launch the run, or serve the rendezvous, and return the exit code."""
    import os

    from jaxpar.memory_checkpoint.places import kept_in_memory
    from jaxpar.runtime.gpus import numa
    from jaxpar.runtime.processes import launch_options, launcher
    from jaxpar.runtime.signals import output_may_be_lost

    if isinstance(options, ServeOptions):
        return launcher.serve(options)
    if options.nodes or options.rendezvous:
        launch_options.check_hosts(options)
    args = launcher.arguments_of(options.config)
    cfg = options.config.checked(commands.model_from, commands.with_vocabulary)
    os.environ[numa.VARIABLE] = options.numa  # the processes inherit it
    with kept_in_memory(cfg) as memory, output_may_be_lost():
        return launcher.run(options, args, cfg, memory)


if __name__ == "__main__":
    commands.run(__name__)
