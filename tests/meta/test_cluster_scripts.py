"""The cluster files: checked by shellcheck, run with a make-believe Slurm, held against schemas.

The JobSet's Job is checked by the schemas of Kubernetes, and what is around it by those of JobSet's
own fields; sbatch's options by its manual. No cluster has been asked.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from jaxpar.commands import read
from jaxpar.config import Config
from jaxpar.config.command_line import read_config
from jaxpar.runtime import exit_codes
from jaxpar.runtime.processes import rendezvous
from jaxpar.tools.sweeps.command import job_array

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
SLURM, JOBSET, ELASTIC = (DEPLOY / n for n in ("slurm.sh", "jobset.yaml", "jobset_elastic.yaml"))
SKY, CHECK_SKY = DEPLOY / "sky.yaml", DEPLOY / "check_sky.py"

# ----------------------------------------------------------------------------------- Slurm


def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).parent / "shellcheck"
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; `make install` does")
    done = subprocess.run([program, str(SLURM)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def submit(tmp_path):
    """(srun's exit code, restarts so far, what srun says) -> the job's exit code, and what Slurm
    was asked."""
    asked = tmp_path / "asked"
    srun = '[ -z "$SAYS" ] || printf "$SAYS" >&2; exit $RUN_CODE'
    for name, then in {"srun": srun, "scontrol": "exit 0"}.items():
        file = tmp_path / name
        file.write_text(f'#!/bin/sh\necho "{name} $*" >> {asked}\n{then}\n')
        file.chmod(0o755)

    def run(code: int, restarts: int = 0, says: str = "") -> tuple[int, list[str]]:
        asked.unlink(missing_ok=True)
        own = {"RUN_CODE": str(code), "SLURM_JOB_ID": "4711", "SLURM_RESTART_COUNT": str(restarts)}
        env = os.environ | own | {"SAYS": says, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", str(SLURM), "llama3_8b", "--run.dir", "a b"], env=env)
        return done.returncode, asked.read_text().splitlines()

    return run


AGAIN = [
    (0, 0, 0),
    (2, 0, 0),
    (17, 0, 0),
    (75, 0, 1),
    (75, 99, 1),
    (1, 0, 1),
    (137, 9, 1),
    (1, 10, 0),
]


@pytest.mark.parametrize(("code", "restarts", "again"), AGAIN)
def test_what_slurm_starts_again(submit, code, restarts, again):
    ended, asked = submit(code, restarts)
    assert ended == code
    assert asked[0].startswith("srun --kill-on-bad-exit=1 --label ")
    assert asked[0].endswith(" -u -m jaxpar.train llama3_8b --run.dir a b")
    assert asked[1:] == ["scontrol requeue 4711"] * again


#: What srun of Slurm 22.05 says of two processes, with its own code, and the code that counts.
ENDS = [
    (("n2: task 1: Exited with exit code 2", "n1: task 0: Terminated"), 143, 2),
    (("n[1-2]: tasks 0-1: Exited with exit code 17",), 17, 17),
    (("n2: task 1: Exited with exit code 75", "n1: task 0: Killed"), 137, 75),
    (("n2: task 1: Killed", "n1: task 0: Exited with exit code 75"), 137, 137),
    (("Unable to connect to the controller",), 1, 1),
]


@pytest.mark.parametrize(("says", "code", "counts"), ENDS)
def test_the_process_that_ends_first_counts(submit, says, code, counts):
    lines = ["0: step 1", *(f"srun: error: {line}" for line in says)]
    ended, asked = submit(code, says="".join(f"{line}\\n" for line in lines))
    assert ended == counts
    assert asked[1:] == ["scontrol requeue 4711"] * (counts not in (2, 17))


#: The long options of sbatch. Source: its manual, https://slurm.schedmd.com/sbatch.html.
SBATCH = set(
    """account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
    constraint consolidate-segments container container-id contiguous core-spec cores-per-socket
    cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude
    exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name
    kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output overcommit
    oversubscribe parsable partition prefer priority profile propagate qos quiet reboot requeue
    reservation resv-ports segment signal sockets-per-node spread-job spread-segments stepmgr
    switches test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    use-min-nodes verbose wait wait-all-nodes wckey wrap""".split()
)

#: What the manual allows as values of the options that are used; None for no value.
VALUES = {
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"([a-z]\w*:)?\d+",
    "cpus-per-task": r"\d+",
    "exclusive": None,
    "time": r"\d+|(\d+-)?\d+:\d\d(:\d\d)?",
    "signal": r"([RB]+:)?([A-Z]+|\d+)(@\d+)?",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
    "array": r"\d+-\d+(%\d+)?",
}


def sbatch_misfits(script: str) -> list[str]:
    """The #SBATCH lines of a script whose option or value sbatch does not know."""
    found = []
    for line in re.findall(r"^#SBATCH (.*)", script, re.MULTILINE):
        name, given, value = line.strip().removeprefix("--").partition("=")
        allowed = VALUES.get(name, "")
        fits = not given if allowed is None else re.fullmatch(allowed, value)
        if not line.startswith("--") or name not in SBATCH or not fits:
            found.append(line)
    return found


def test_slurm_knows_the_options():
    text = SLURM.read_text()
    assert text.count("#SBATCH ") > 8 and sbatch_misfits(text) == []
    assert set(VALUES) <= SBATCH
    assert sbatch_misfits(job_array("python", ["quickstart"], [["a"], ["b"]], "runs/s")) == []
    for option, instead in (("nodes=2", "node=2"), ("mode=append", "mode=add"), ("@300", "@5m")):
        assert len(sbatch_misfits(text.replace(option, instead))) == 1


def test_slurm_asks_for_what_the_pages_say():
    options = [line[8:] for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=TERM@300", "--ntasks-per-node=1"} <= set(options)
    assert "--open-mode=append" in options  # a restarted job keeps its log


# -------------------------------------------------------------------------------- Kubernetes

#: The version of Kubernetes whose schemas the Job is held against.
KUBERNETES = "1.37"


def misfits(jobset: dict) -> list[str]:
    """Where a JobSet has a field, a type or a value that the schemas do not have."""
    validate = pytest.importorskip("kubernetes_validate", reason="`make install` installs it")
    schema = json.loads(Path(__file__).with_name("jobset_schema.json").read_text("utf-8"))
    found = [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(jobset)]
    for job in jobset["spec"].get("replicatedJobs", []):
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        try:
            validate.validate(whole | job["template"], KUBERNETES, strict=True)
        except validate.ValidationError as error:
            found.append(error.message)
    return found


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load(JOBSET.read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (only,) = jobset["spec"]["replicatedJobs"]
    return only["template"]["spec"]


@pytest.mark.parametrize("file", [JOBSET, ELASTIC], ids=lambda file: file.stem)
def test_jobsets_fit_the_schemas(file):
    assert misfits(yaml.safe_load(file.read_text())) == []


WRONG = [
    ("backoffLimit", "backOffLimit", "'backOffLimit' was unexpected"),
    ('value: "2"', "value: 2", "2 is not of type 'string'"),
    ("maxRestarts", "maxRestart", "'maxRestart' was unexpected"),
    ("action: FailJobSet", "action: FailJob", "'FailJob' is not one of"),
    ("[PodFailurePolicy]", "[PodFailed]", "'PodFailed' is not one of"),
    ("replicas: 1", "replicas: one", "'one' is not of type 'integer'"),
]


@pytest.mark.parametrize(("text", "instead", "said"), WRONG)
def test_a_wrong_jobset_is_seen(text, instead, said):
    wrong = yaml.safe_load(JOBSET.read_text().replace(text, instead))
    (told,) = misfits(wrong)
    assert said in told


def test_its_pods_find_one_another(jobset, job):
    (container,) = job["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    for index in range(job["completions"]):
        found = rendezvous.detect(Config(), env | {"JOB_COMPLETION_INDEX": str(index)})
        assert (found.source, found.process_id) == ("kubernetes", index)
        assert found.num_processes == job["completions"] == job["parallelism"]
    name, train = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert found.host == f"{name}-{train}-0-0.{name}" and job["completionMode"] == "Indexed"
    assert jobset["spec"]["network"]["publishNotReadyAddresses"]
    assert container["command"][-1] == "jaxpar.train"
    read_config(container["args"])


def test_its_pods_have_no_rights_and_what_cannot_work_is_not_repeated(job):
    pod = job["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
    assert not pod["automountServiceAccountToken"]
    assert not pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "ecret" not in JOBSET.read_text().replace("no secrets", "")
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [2, 17] and job["backoffLimit"] == 0
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 60


@pytest.fixture(scope="module")
def elastic():
    """The elastic JobSet's name, and its Jobs by name."""
    whole = yaml.safe_load(ELASTIC.read_text())
    jobs = {job["name"]: job["template"]["spec"] for job in whole["spec"]["replicatedJobs"]}
    return whole, jobs


def test_elastic_pods_meet_at_the_rendezvous(elastic):
    whole, jobs = elastic
    met = f"{whole['metadata']['name']}-rendezvous-0-0.{whole['metadata']['name']}:29400"
    launchers = {}
    for name, job in jobs.items():
        (container,) = job["template"]["spec"]["containers"]
        assert container["command"][-2:] == ["-m", "jaxpar.launch"]
        launchers[name] = read("launch", container["args"])
    assert launchers["rendezvous"].address == launchers["train"].rendezvous == met
    assert launchers["train"].config.checked()
    most = jobs["train"]["parallelism"]
    assert launchers["train"].nodes == f"2:{most}" and jobs["train"]["completions"] == most
    assert whole["spec"]["successPolicy"]["targetReplicatedJobs"] == ["train"]
    assert jobs["train"]["successPolicy"]["rules"] == [{"succeededCount": 1}]


def test_an_elastic_pod_is_replaced_by_itself(elastic, job):
    """And it has the rights, the grace and the final codes of the other JobSet."""
    train = elastic[1]["train"]
    assert train["backoffLimitPerIndex"] > 0 and "backoffLimit" not in train
    final, ignored = train["podFailurePolicy"]["rules"]
    assert final == job["podFailurePolicy"]["rules"][0] and ignored["action"] == "Ignore"
    own, other = train["template"]["spec"], job["template"]["spec"]
    for name in ("securityContext", "restartPolicy", "terminationGracePeriodSeconds", "volumes"):
        assert own[name] == other[name]
    for each in elastic[1].values():
        pod = each["template"]["spec"]
        assert pod["securityContext"] == other["securityContext"]
        assert not pod["automountServiceAccountToken"]
        rights = other["containers"][0]["securityContext"]
        assert pod["containers"][0]["securityContext"] == rights


# ---------------------------------------------------------------------------------- SkyPilot


@pytest.fixture(scope="module")
def sky():
    return yaml.safe_load(SKY.read_text())


def test_skypilots_machines_find_one_another(sky, tmp_path):
    """Its script, run as on two machines, gives arguments that train accepts."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    env = sky["envs"] | {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7", "PATH": os.environ["PATH"]}
    for rank in range(sky["num_nodes"]):
        place = {"SKYPILOT_NUM_NODES": str(sky["num_nodes"]), "SKYPILOT_NODE_RANK": str(rank)}
        command = ["bash", "-c", sky["run"]]
        done = subprocess.run(
            command, env=env | place, cwd=tmp_path, capture_output=True, text=True
        )
        flags, module, program, *args = done.stdout.splitlines()
        assert (flags, module, program) == ("-u", "-m", "jaxpar.train")
        found = rendezvous.detect(read_config(args), {})
        assert (found.coordinator, found.process_id) == ("10.0.0.4:12321", rank)
        assert found.num_processes == sky["num_nodes"]


def test_skypilot_repeats_what_slurm_repeats(sky):
    codes = sky["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert {exit_codes.EXIT_ERROR, exit_codes.EXIT_PREEMPTED, exit_codes.EXIT_HANG} < set(codes)
    assert not {exit_codes.EXIT_CONFIG, exit_codes.EXIT_NUMERICS} & set(codes)


def test_skypilots_check_says_what_it_needs():
    done = subprocess.run([sys.executable, CHECK_SKY, SKY], capture_output=True, text=True)
    assert done.returncode == 1 and "skypilot is not installed here" in done.stderr
