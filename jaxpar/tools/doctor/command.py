"""The work of `python -m jaxpar.doctor`."""

import dataclasses
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxpar.config import replace
from jaxpar.prediction.hardware import gpu_of_kind
from jaxpar.runtime import exit_codes, provenance, terminal
from jaxpar.runtime import start as runtime
from jaxpar.runtime.files import atomic
from jaxpar.runtime.files.outputs import check_file
from jaxpar.runtime.gpus import visible
from jaxpar.runtime.gpus.numa import bind_process
from jaxpar.runtime.gpus.nvml import GpuLoad
from jaxpar.runtime.processes import connecting, peers, rendezvous
from jaxpar.runtime.processes.networks.choosing import between_hosts
from jaxpar.sharding.mesh import describe, make_mesh
from jaxpar.tools.doctor import facts, showing
from jaxpar.tools.doctor.checks import gpu as gpu_checks
from jaxpar.tools.doctor.checks import host, measured
from jaxpar.tools.doctor.checks.findings import Finding, failed, merge_findings, skipped, verdict
from jaxpar.tools.doctor.checks.host import numa_binding
from jaxpar.tools.doctor.facts import HostFacts
from jaxpar.tools.doctor.measure import bandwidth, compute, verification
from jaxpar.tools.doctor.measure import links as links_of
from jaxpar.tools.doctor.measure.bandwidth import BandwidthRow
from jaxpar.tools.doctor.measure.verification import mesh_for
from jaxpar.tools.doctor.options import DoctorOptions
from jaxpar.tools.doctor.progress import SectionProgress

# ------------ Runs the sections of an examination in order, and collects their figures and findings


#: Sections that need no devices.
LOOKING = ("versions", "hardware")

#: Version of the JSON: increases when a name changes its meaning or is removed.
SCHEMA = 2


@dataclasses.dataclass
class Section:
    """The results of a section.

    record    its figures for the JSON. tables   the same, to print.
    """

    record: Any = None
    findings: list[Finding] = dataclasses.field(default_factory=list)
    tables: list[Any] = dataclasses.field(default_factory=list)


def _figures(row: BandwidthRow) -> dict[str, Any]:
    return {
        "kind": row.kind,
        "bytes": row.size,
        "devices": row.devices,
        "seconds": dataclasses.asdict(row.call),
        "algorithm_bytes_per_second": row.algorithm,
        "bus_bytes_per_second": row.bus,
    }


class Examination:
    """Runs the requested sections on the devices of all processes."""

    def __init__(
        self,
        options: DoctorOptions,
        own: HostFacts,
        was_set: list[str],
        progress: SectionProgress,
        show: Callable[[Any], Any],
    ):
        """Args:     own: this process's facts, including its devices. was_set: flags and variables
        set by this program. show: prints a table."""
        self.options, self.was_set, self.progress, self.show = options, was_set, progress, show
        self._exchanges = itertools.count()
        self.facts = [HostFacts.from_json(text) for text in self._exchange(own.to_json())]
        self.times = [float(text) for text in self._exchange_time()]
        self.on_gpu = own.backend == "gpu"
        self.works = not any(facts.backend_error for facts in self.facts)
        self.sections: dict[str, Section] = {}

    # ------------------------------------------------------------------- between the processes

    def _exchange(self, text: str) -> list[str]:
        name = f"doctor/{next(self._exchanges)}"
        return peers.exchange(name, text, self.options.seconds)

    def _exchange_time(self) -> list[str]:
        """Return the time on every process's clock, right after a barrier."""
        self._exchange("")
        return self._exchange(repr(time.time()))

    def gathered(self, value: Any) -> list[Any]:
        """Gather a value from each process, in order."""
        return [json.loads(text) for text in self._exchange(json.dumps(value))]

    def joined(self, values: dict[str, float]) -> dict[str, float]:
        """Merge the named numbers of all processes."""
        return {name: x for each in self.gathered(values) for name, x in each.items()}

    # ------------------------------------------------------------------------------- sections

    def run(self) -> None:
        """Run every section and print its tables when it ends."""
        for name in self.options.sections:
            if not self.works and name not in LOOKING:
                continue
            with self.progress.section(name):
                self.sections[name] = self._guarded(name, getattr(self, name))
            self.show(showing.heading(name, self.progress.seconds[name]))
            for table in self.sections[name].tables:
                self.show(table)

    def _guarded(self, name: str, section: Callable[[], Section]) -> Section:
        """Run a section; in a single process, turn an error into a finding.

        With several processes the others would wait forever, so the error is raised.
        """
        try:
            return section()
        except (RuntimeError, bandwidth.LeftOut) as error:
            if len(self.facts) > 1:
                raise
            traceback.print_exception(error)
            said = f"failed to run: {type(error).__name__}, shown above"
            remedy = f"fix the failures before it, then run only this section: --only {name}"
            return Section(findings=[failed(name, said, remedy)])

    def _merged(self, check: Callable[[HostFacts], list[Finding]]) -> list[Finding]:
        return merge_findings([check(f) for f in self.facts], [f.name for f in self.facts])

    def versions(self) -> Section:
        """Check versions, devices and environment."""
        found = self._merged(host.check_versions)
        found += host.check_together(self.facts, self.times)
        table = showing.versions(self.facts[0])
        variables = showing.environment(self.facts[0], self.was_set)
        return Section(None, found, [table, *variables])

    def hardware(self) -> Section:
        """Check GPUs, links and host."""
        hosts: dict[str, list[HostFacts]] = {}
        for each in self.facts:
            hosts.setdefault(each.host["name"], []).append(each)
        by_host = [[*gpu_checks.check(f[0]), gpu_checks.used(f)] for f in hosts.values()]
        found = merge_findings(by_host, list(hosts)) + self._merged(host.check_host)
        found += self._merged(lambda facts: [numa_binding(facts)])
        return Section(None, found, [t for f in hosts.values() for t in showing.hardware(f[0])])

    def collectives(self) -> Section:
        """Verify every collective on every axis."""
        if not self._several():
            return Section([], [measured.wrong_collectives([], 0)])
        mesh = make_mesh(mesh_for(self.options.axes, jax.device_count()))
        large = verification.LARGE if self.on_gpu else verification.LARGE_ON_CPU
        sizes, rows = (verification.SMALL, large), []
        for one in verification.verify(mesh, sizes, tell=self.progress.tell):
            told = self.gathered([dataclasses.asdict(wrong) for wrong in one.wrong])
            row: dict[str, Any] = {"axes": one.axes, "dtype": one.dtype, "elements": one.elements}
            row |= {"collectives": one.collectives, "wrong": list(itertools.chain(*told))}
            rows.append(row)
        wrong = [str(verification.Wrong(**w)) for row in rows for w in row["wrong"]]
        verified = sum(len(row["collectives"]) for row in rows) * mesh.size
        finding = measured.wrong_collectives(wrong, verified)
        record = {"mesh": describe(mesh), "rows": rows}
        return Section(record, [finding], [showing.collectives(describe(mesh), rows)])

    def bandwidth(self) -> Section:
        """Time every collective at every size."""
        if not self._several():
            return Section([], [skipped("bus bandwidth", "one device")])
        default = bandwidth.MAX_BYTES if self.on_gpu else bandwidth.MAX_BYTES_ON_CPU
        mesh, o = bandwidth.one_axis(jax.devices()), self.options
        how = (o.largest_bytes or default, o.repeats, o.seconds, self.progress.tell)
        rows = list(bandwidth.measure(mesh, *how))
        hosts = [facts.host["name"] for facts in self.facts]
        gpu = gpu_of_kind(self.facts[0].devices[0])
        found = measured.bus_bandwidth(rows, gpu, len(set(hosts)) == 1)
        groups = links_of.by_host(jax.devices(), hosts)
        apart = list(links_of.measure_hosts(groups, *how)) if links_of.equal(groups) else []
        found += [measured.across_hosts(apart, list(map(len, groups)))]
        record = [{"over": "all", **_figures(row)} for row in rows]
        record += [{"over": one.over, **_figures(one.row)} for one in apart]
        return Section(record, found, [*showing.bandwidth(rows), *showing.hosts(apart)])

    def links(self) -> Section:
        """Time every pair of devices."""
        if not self._several():
            return Section([], [skipped("links", "one device")])
        mesh, o = bandwidth.one_axis(jax.devices()), self.options
        size = links_of.MESSAGE if self.on_gpu else links_of.MESSAGE_ON_CPU
        how = (size, o.repeats, o.seconds, self.joined)
        links = list(links_of.measure(mesh, *how, self.progress.tell))
        if self.on_gpu:
            slow = {link.pair for link in links_of.behind(links)}
            links = [links_of.again(mesh, k.pair, *how) if k.pair in slow else k for k in links]
        names = self.device_names()
        finding = measured.slow_pairs(links, names, self.on_gpu)
        record = [dataclasses.asdict(link) for link in links]
        return Section(record, [finding], showing.links(links, len(names)))

    def compute(self) -> Section:
        """Time matmuls and copies."""
        own = list(compute.measure(self.options.repeats, self.progress.tell))
        self.progress.tell("sustained matmuls")
        last = compute.multiply_sustained(own[0])
        own.append(last.rate)
        of_all = self.gathered([dataclasses.asdict(rate) for rate in own])
        rates = {
            (rate.what, rate.detail): compute.by_place([each[i]["devices"] for each in of_all])
            for i, rate in enumerate(own)
        }
        kind, names = self.facts[0].devices[0], self.device_names()
        found = measured.matmul(rates, kind)
        found += [measured.slow_gpus(rates, names, self.on_gpu)]
        found += measured.transfers(rates)
        loads = self.gathered([dataclasses.asdict(gpu) for gpu in last.load])
        by_process = [measured.under_load([GpuLoad(**gpu) for gpu in load]) for load in loads]
        found += merge_findings(by_process, [facts.name for facts in self.facts])
        units = {(rate.what, rate.detail): rate.unit for rate in own}
        record = {
            "rates": [{"what": w, "detail": d, "unit": units[w, d], "devices": r}
                      for (w, d), r in rates.items()],
            "load": loads,
        }  # fmt: skip
        return Section(record, found, [showing.rates(rates, units, kind)])

    def _several(self) -> bool:
        return jax.device_count() > 1

    def device_names(self) -> list[str]:
        """Return the names of all devices, in the order of `jax.devices()`."""
        what = "GPU" if self.on_gpu else "device"
        if len(self.facts) == 1:
            return [f"{what} {i}" for i in range(len(self.facts[0].devices))]
        return [f"{what} {i} of {f.name}" for f in self.facts for i in range(len(f.devices))]

    # --------------------------------------------------------------------------------- result

    def findings(self) -> list[tuple[str, Finding]]:
        """Return all findings as (section, finding), in order."""
        return [(name, finding) for name, s in self.sections.items() for finding in s.findings]

    def record(self) -> dict[str, Any]:
        """Return all results as written to JSON."""
        found = self.findings()
        return {
            "schema": SCHEMA,
            "verdict": verdict(finding for _, finding in found),
            "conditions": self._conditions(),
            "findings": [{"section": s} | dataclasses.asdict(finding) for s, finding in found],
            "seconds": self.progress.seconds,
            "processes": [dataclasses.asdict(facts) for facts in self.facts],
            **{name: s.record for name, s in self.sections.items() if s.record is not None},
        }

    def _conditions(self) -> dict[str, Any]:
        """Return the conditions of the measurement."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"time": when, "commit": provenance.checked_out_commit(), "set": self.was_set}
        return (provenance.versions() if self.works else {}) | about


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
        examined = Examination(options, own, was_set, progress, console.print)
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
    flags = replace(cfg, **{"compute.matmul_dtype": "float8", "run.compilation_cache": ""})
    number = place.num_processes if place else 1
    was_set += runtime.start(flags, number, needs_devices=False)  # missing devices are a finding
    if place is not None:
        seconds = cfg.cluster.connect_seconds
        peers.log(f"cluster    {connecting.connect(place, seconds)}")
        was_set += between_hosts(cfg.cluster.network, place.host, seconds, peers.log)
    return own, was_set
