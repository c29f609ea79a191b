"""Check whether this machine is fit for training: python -m jaxpar.doctor [options]

Reads versions, environment, GPUs, links and host. Verifies the result of every collective on every
mesh axis. Measures collectives, pairs of devices, matmuls and copies. Ends with a checklist of
findings and remedies. It changes nothing on the machine. docs/troubleshooting.md explains each
line.

Sections, for --only: versions and environment variables; hardware as the driver and the kernel
report it; collectives, are their results correct; bandwidth of collectives; latency of small ones,
by NCCL and by XLA; links, each pair of devices; compute, matmuls and copies.

Several processes join as in jaxpar.train, from the same environment variables, or with
--cluster.coordinator HOST:PORT --cluster.num-processes N --cluster.process-id I. Exit codes: 0
nothing failed (there may be warnings), 1 a check failed, 2 invalid options, 124 a section did not
end in time.
"""

from jaxpar import commands
from jaxpar.tools.doctor.options import DoctorOptions

OPTIONS = DoctorOptions


def main(options: DoctorOptions) -> int:
    """Examine the machine, and return the exit code."""
    from jaxpar.tools.doctor.command import examine

    return examine(options)


if __name__ == "__main__":
    commands.run(__name__)
