"""The cluster files: checked by shellcheck, run with a make-believe Slurm, read field by field.

The JobSet is held against the fields that it uses of JobSet v1alpha2, batch/v1 and core/v1, written
down below from their documentation; no cluster has been asked.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxpar.config import Config
from jaxpar.config.command_line import read_config
from jaxpar.runtime.processes import detect

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "scripts" / "deploy"
SLURM, JOBSET = DEPLOY / "slurm.sh", DEPLOY / "jobset.yaml"

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


def test_slurm_asks_for_what_the_pages_say():
    options = [line[8:] for line in SLURM.read_text().splitlines() if line.startswith("#SBATCH ")]
    assert {"--requeue", "--signal=TERM@300", "--ntasks-per-node=1"} <= set(options)
    assert "--open-mode=append" in options  # a restarted job keeps its log


# -------------------------------------------------------------------------------- Kubernetes

NAMED = {"name": str, "value": str}
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool,
    "securityContext": {
        "runAsNonRoot": bool,
        "runAsUser": int,
        "runAsGroup": int,
        "fsGroup": int,
        "seccompProfile": {"type": str},
    },
    "containers": [
        {
            "name": str,
            "image": str,
            "workingDir": str,
            "command": [str],
            "args": [str],
            "env": [NAMED],
            "resources": {"limits": {"nvidia.com/gpu": int}},
            "securityContext": {
                "allowPrivilegeEscalation": bool,
                "capabilities": {"drop": [str]},
            },
            "volumeMounts": [{"name": str, "mountPath": str}],
        }
    ],
    "volumes": [
        {
            "name": str,
            "persistentVolumeClaim": {"claimName": str},
            "emptyDir": {"medium": str, "sizeLimit": str},
        }
    ],
}
JOB = {
    "completionMode": str,
    "parallelism": int,
    "completions": int,
    "backoffLimit": int,
    "podFailurePolicy": {
        "rules": [
            {
                "action": str,
                "onExitCodes": {"containerName": str, "operator": str, "values": [int]},
            }
        ]
    },
    "template": {"spec": POD},
}
SCHEMA = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def misfits(value, schema, path: str = "") -> list[str]:
    """Where a document has a field, or a type, that the schema has not."""
    if isinstance(schema, type):
        return [] if type(value) is schema else [f"{path}: {value!r} is no {schema.__name__}"]
    if type(value) is not type(schema):
        return [f"{path}: {value!r} is no {type(schema).__name__}"]
    if isinstance(schema, list):
        inner = [misfits(item, schema[0], f"{path}[{i}]") for i, item in enumerate(value)]
    else:
        unknown = [[f"{path}.{key}: is not a field"] for key in value.keys() - schema.keys()]
        known = value.keys() & schema.keys()
        inner = unknown + [misfits(value[key], schema[key], f"{path}.{key}") for key in known]
    return [text for texts in inner for text in texts]


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load(JOBSET.read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (only,) = jobset["spec"]["replicatedJobs"]
    return only["template"]["spec"]


def test_the_jobset_has_no_field_that_is_not_one(jobset):
    assert misfits(jobset, SCHEMA) == []
    wrong = yaml.safe_load(JOBSET.read_text().replace("backoffLimit", "backOffLimit"))
    assert len(misfits(wrong, SCHEMA)) == 1
    wrong = yaml.safe_load(JOBSET.read_text().replace('value: "2"', "value: 2"))
    assert len(misfits(wrong, SCHEMA)) == 1


def test_its_pods_find_one_another(jobset, job):
    (container,) = job["template"]["spec"]["containers"]
    env = {item["name"]: item["value"] for item in container["env"]}
    for index in range(job["completions"]):
        found = detect.detect(Config(), env | {"JOB_COMPLETION_INDEX": str(index)})
        assert (found.source, found.process_id) == ("kubernetes", index)
        assert found.num_processes == job["completions"] == job["parallelism"]
    name, train = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert found.host == f"{name}-{train}-0-0.{name}" and job["completionMode"] == "Indexed"
    assert jobset["spec"]["network"]["publishNotReadyAddresses"]
    assert container["command"][-1] == "jaxpar.train"
    read_config(container["args"], "jaxpar.train", None)


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
