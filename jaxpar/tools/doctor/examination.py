"""Runs the sections of an examination in order, and collects their figures and findings."""

import dataclasses
import itertools
import json
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.planning.predict.hardware import gpu_of_kind
from jaxpar.runtime import provenance
from jaxpar.runtime.gpus.nvml import GpuLoad
from jaxpar.runtime.processes import peers
from jaxpar.sharding.mesh import describe, make_mesh
from jaxpar.tools.doctor import showing
from jaxpar.tools.doctor.checks import gpu as gpu_checks
from jaxpar.tools.doctor.checks import host, measured
from jaxpar.tools.doctor.checks.findings import Finding, failed, merge_findings, skipped, verdict
from jaxpar.tools.doctor.checks.host import numa_binding
from jaxpar.tools.doctor.facts import HostFacts
from jaxpar.tools.doctor.measure import bandwidth, compute, verification
from jaxpar.tools.doctor.measure import hosts as hosts_of
from jaxpar.tools.doctor.measure import links as links_of
from jaxpar.tools.doctor.measure.bandwidth import BandwidthRow
from jaxpar.tools.doctor.meshes import mesh_for
from jaxpar.tools.doctor.options import DoctorOptions
from jaxpar.tools.doctor.progress import SectionProgress

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
        for facts in self.facts:
            hosts.setdefault(facts.host["name"], []).append(facts)
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
        groups = hosts_of.by_host(jax.devices(), hosts)
        apart = list(hosts_of.measure(groups, *how)) if hosts_of.equal(groups) else []
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
