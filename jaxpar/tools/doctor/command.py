"""The work of `python -m jaxpar.doctor`."""

import json
import os
import sys
from pathlib import Path

from jaxpar.config import replace
from jaxpar.runtime import exit_codes, terminal
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.gpus.numa import bind_process
from jaxpar.runtime.processes import connecting, peers, rendezvous
from jaxpar.runtime.processes.networks.choosing import between_hosts
from jaxpar.tools.doctor import examination, facts, showing
from jaxpar.tools.doctor.meshes import mesh_for
from jaxpar.tools.doctor.options import DoctorOptions
from jaxpar.tools.doctor.progress import SectionProgress

#: Columns that the tables need, even if the output is not a terminal.
MIN_WIDTH = 118


def examine(options: DoctorOptions) -> int:
    """Run the sections, print findings and remedies, and return the exit code."""
    own, was_set = begin(options)
    width = max(terminal.console().width, MIN_WIDTH)
    console = terminal.console(highlight=False, width=width, quiet=peers.rank() != 0)
    progress = SectionProgress(options.seconds)
    with progress.section("start"):
        own = facts.with_devices(own, peers.rank(), bool(options.config.asked().run.cpu_devices))
        examined = examination.Examination(options, own, was_set, progress, console.print)
    if examined.works and "collectives" in options.sections:
        mesh_for(options.axes, sum(len(f.devices) for f in examined.facts))
    examined.run()
    found = examined.findings()
    console.print(showing.checklist(found))
    console.print(showing.summary(found, sum(progress.seconds.values())))
    record = examined.record()
    if options.json and peers.rank() == 0:
        atomic.write(Path(options.json), (json.dumps(record, indent=2) + "\n").encode())
        console.print(f"written: {options.json}")
    sys.stdout.flush()
    return exit_codes.EXIT_ERROR if record["verdict"] == "fail" else exit_codes.EXIT_OK


def begin(options: DoctorOptions) -> tuple[facts.HostFacts, list[str]]:
    """Join the other processes and set what JAX reads at startup, as training does.

    Returns:  this process's facts so far, and what was set in its environment.
    Raises:   ConfigError if process 0 cannot write --json; the errors of `connecting.connect`.
    """
    cfg = options.config.asked()
    place = rendezvous.detect(cfg, os.environ)
    if options.json and (place is None or place.process_id == 0):
        # The others write nothing, and may run on other hosts.
        check_file("--json", options.json, "doctor.json", in_existing_folder=True)
    share = connecting.local_gpus(place) if place else None
    was_set = bind_process(share=share)
    coordinator = place.host if place else ""
    started = facts.StartedAs(network=cfg.cluster.network, coordinator=coordinator, share=share)
    own = facts.of_the_host(dict(os.environ), started=started)  # before anything is set here
    if visible.gpu_is_present():  # NVLink multicast stays off, whatever the user has set
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        was_set.append("NCCL_NVLS_ENABLE=0")
    # The flags for 8-bit matmuls include one that spares minutes of autotuning.
    flags = replace(cfg, **{"model.matmul_dtype": "float8", "run.compilation_cache": ""})
    number = place.num_processes if place else 1
    was_set += runtime.start(flags, number, needs_devices=False)  # missing devices are a finding
    if place is not None:
        seconds = cfg.cluster.connect_seconds
        peers.log(f"cluster    {connecting.connect(place, seconds)}")
        was_set += between_hosts(cfg.cluster.network, place.host, seconds, peers.log)
    return own, was_set
