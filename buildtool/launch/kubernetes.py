"""Kubernetes: Kubeflow's TrainJob, a JobSet, or an indexed Job; each node is a pod that starts torchrun."""

import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import partial

from buildtool.core.command import CommandFailed, run, run_streaming
from buildtool.core.errors import ConfigError, DataError
from buildtool.core.progress import Progress
from buildtool.core.yaml_text import dump
from buildtool.launch.engine import LAST_LINES, MOST_FAILURES, POLL_S, Ended, Engine, Output, Text
from buildtool.launch.job import Job, Run
from buildtool.launch.words import torchrun_line
from probes.core.codec import Json, load
from probes.core.quoting import Unquotable, shell, terminal

RESOURCES = {"amd": "amd.com/gpu", "nvidia": "nvidia.com/gpu"}  # of the vendors' device plugins
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_EXPANDED = re.compile(r"\$(?=[$(])")

Object = dict[str, Json]


def literal(text: str) -> str:
    """A text in `command`, `args` or `env`, where Kubernetes would replace $(NAME) and shorten $$."""
    return _EXPANDED.sub("$$", text)


def _shell(text: str) -> list[Json]:
    return ["sh", "-c", literal(text)]


def _line(job: Job, each: Run, where: str) -> list[Json]:
    return _shell(f"mkdir -p -- {shell(each.out)} && exec {torchrun_line(job, each, where)}")


def _static(job: Job, rank: str, address: str) -> str:
    return f"--nnodes={job.nodes} --node-rank={rank} --master-addr={address} --master-port={job.port}"


def _metadata(job: Job, name: str) -> Object:
    labels: Object = {"app.kubernetes.io/managed-by": "weir"}
    return {"name": name, "labels": labels | ({QUEUE_LABEL: job.queue} if job.queue else {})}


def _limits(job: Job) -> Object:
    """What a pod may use; requests are the same."""
    limits: Object = {"cpu": str(job.cpus * job.processes)}
    if job.memory:
        limits["memory"] = job.memory.removesuffix("B")
    if job.gpus:
        limits[RESOURCES[job.vendor]] = str(job.gpus)
    return {"limits": limits}


def _env(job: Job) -> list[Json]:
    return [{"name": name, "value": literal(value)} for name, value in job.variables.items()]


def _volumes(job: Job) -> tuple[list[Json], list[Json]]:
    """Volumes, and where they are mounted. Loaders pass batches through /dev/shm, else of 64 MiB."""
    volumes: list[Json] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[Json] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, (path, source) in enumerate(job.mounts.items()):
        kind: Object = (
            {"hostPath": {"path": source}}
            if source.startswith("/")
            else {"persistentVolumeClaim": {"claimName": source}}
        )
        volumes.append({"name": f"mount-{number}", **kind})
        mounts.append({"name": f"mount-{number}", "mountPath": path})
    return volumes, mounts


def _pods(job: Job, command: list[Json], **more: Json) -> Object:
    """The specification of a Job of as many pods as nodes, none of which is started again."""
    volumes, mounts = _volumes(job)
    container: Object = {
        "name": "node",
        "image": job.image,
        "command": command,
        "env": _env(job),
        "resources": _limits(job),
        "volumeMounts": mounts,
    }
    pod: Object = {"restartPolicy": "Never", "containers": [container], "volumes": volumes, **more}
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "activeDeadlineSeconds": job.minutes * 60,
        "template": {"spec": pod},
    }


def _trainjob(job: Job, each: Run) -> list[Object]:
    """The runtime names nodes and address in PET_ variables, which torchrun reads as its options."""
    volumes, mounts = _volumes(job)
    patch: Object = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    job_patch: Object = {"name": "node", "template": {"spec": {"template": {"spec": patch}}}}
    runtime: Object = {"template": {"spec": {"replicatedJobs": [job_patch]}}}
    spec: Object = {
        "runtimeRef": {"name": job.runtime},
        "activeDeadlineSeconds": job.minutes * 60,
        "trainer": {
            "image": job.image,
            "command": _line(job, each, ""),
            "env": _env(job),
            "numNodes": job.nodes,
            "numProcPerNode": job.processes,
            "resourcesPerNode": _limits(job),
        },
        "runtimePatches": [{"manager": "weir.dev/launch", "trainingRuntimeSpec": runtime}],
    }
    return [_object("trainer.kubeflow.org/v1alpha1", "TrainJob", job, each, spec)]


def _jobset(job: Job, each: Run) -> list[Object]:
    where = _static(job, '"$JOB_COMPLETION_INDEX"', f"{each.name}-node-0-0.{each.name}")
    spec: Object = {
        "failurePolicy": {"maxRestarts": 0},
        "network": {"enableDNSHostnames": True, "subdomain": each.name, "publishNotReadyAddresses": True},
        "replicatedJobs": [
            {"name": "node", "replicas": 1, "template": {"spec": _pods(job, _line(job, each, where))}}
        ],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", job, each, spec)]


def _job(job: Job, each: Run) -> list[Object]:
    """A Job, and the headless service that gives its pods names."""
    where = _static(job, '"$JOB_COMPLETION_INDEX"', f"{each.name}-0.{each.name}")
    own = _object("batch/v1", "Job", job, each, _pods(job, _line(job, each, where), subdomain=each.name))
    selector: Object = {"batch.kubernetes.io/job-name": each.name}
    spec: Object = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return [_object("v1", "Service", job, each, spec), own]


def _object(version: str, kind: str, job: Job, each: Run, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": _metadata(job, each.name), "spec": spec}


Objects = Callable[[Job, Run], list[Object]]


def render(job: Job, *, objects: Objects) -> tuple[Text, ...]:
    """A file for each run. Raises ConfigError for what a cluster needs to know, and what can't be quoted."""
    if not job.image:
        raise ConfigError("a pod needs an image", "add: --image REGISTRY/NAME:TAG")
    if job.gpus and job.vendor == "unknown":
        raise ConfigError("a pod asks for cards by their vendor", "add: --vendor amd (or nvidia)")
    if not any(f"{job.out}/".startswith(f"{path.rstrip('/')}/") for path in job.mounts):
        raise ConfigError(
            f"{job.out} is in no mount: reports would go with the pods", f"add: --mount {job.out}=CLAIM"
        )
    try:
        return tuple(
            Text(f"{each.name}.yaml", "---\n".join(map(dump, objects(job, each)))) for each in job.runs()
        )
    except Unquotable as error:
        raise ConfigError(f"a pod can't hold the command: {error}", "put it into a script") from error


def _kubectl(job: Job, progress: Progress, *words: str, objects: Objects) -> None:
    for text in render(job, objects=objects):
        command = ["kubectl", *job.options, "create", "--validate=strict", *words, "--filename=-"]
        run_streaming(command, progress=progress, stdin=text.text)


def check(job: Job, progress: Progress, *, objects: Objects) -> None:
    """Have the cluster judge it."""
    _kubectl(job, progress, "--dry-run=server", objects=objects)


def submit(job: Job, progress: Progress, *, objects: Objects) -> str:
    """Create it; objects are called as the runs."""
    _kubectl(job, progress, objects=objects)
    return job.name


def follow(job: Job, _job_id: str, progress: Progress, *, kind: str, label: str) -> tuple[Ended, ...]:
    """Show states until each run is over, then the last lines of its pods."""
    return tuple(_follow(job, each, progress, kind, label) for each in job.runs())


def _follow(job: Job, each: Run, progress: Progress, kind: str, label: str) -> Ended:
    shown = ""
    while True:
        answer = _object_text(job, f"{kind}/{each.name}", progress)
        try:
            state, ok = state_of(load(answer))
        except ValueError as error:
            raise DataError(
                f"kubectl gave no object for {each.name}: {terminal(answer[:80])}", "try: kubectl get jobs"
            ) from error
        if state != shown:
            progress(f"{each.name}: {state}")
            shown = state
        if ok is not None:
            break
        time.sleep(POLL_S)
    output = Output(progress)
    selector = f"--selector={label}={each.name}"
    words = [
        "logs",
        selector,
        "--prefix",
        "--all-containers",
        f"--tail={LAST_LINES}",
        "--max-log-requests=1000",
    ]
    try:
        for line in run(["kubectl", *job.options, *words]).stdout.splitlines():
            output(line)
    except CommandFailed as error:
        progress(f"{each.name}: the pods' logs are gone: {error.tail[:200]}")
    return Ended(each.name, ok, state, () if ok else output.cause)


def _object_text(job: Job, what: str, progress: Progress) -> str:
    """What the cluster says of an object. Raises CommandFailed for none, and for long silence."""
    for failures in itertools.count(1):
        try:
            return run(["kubectl", *job.options, "get", what, "--output=json"]).stdout
        except CommandFailed as error:  # its API server may be restarting
            if failures > MOST_FAILURES or "(NotFound)" in error.tail:
                raise
            progress(terminal(error.tail[:200]))
            time.sleep(POLL_S)
    raise AssertionError


def state_of(answer: object) -> tuple[str, bool | None]:
    """An object's state in words, and whether it has ended well; None while it hasn't ended."""
    status = answer.get("status") if isinstance(answer, dict) else None
    rows = status.get("conditions") if isinstance(status, dict) else None
    conditions = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for condition in conditions:
        kind, holds = condition.get("type"), condition.get("status") == "True"
        why = ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))
        if holds and kind in ("Complete", "Completed", "SuccessCriteriaMet"):
            return str(kind), True
        if holds and kind in ("Failed", "FailureTarget"):
            return f"{kind} ({why})" if why else str(kind), False
    named: Sequence[str] = [str(c.get("type")) for c in conditions if c.get("status") == "True"]
    return ", ".join(named) or "waiting", None


def _engine(objects: Objects, kind: str, label: str) -> Engine:
    return Engine(
        render=partial(render, objects=objects),
        check=partial(check, objects=objects),
        submit=partial(submit, objects=objects),
        follow=partial(follow, kind=kind, label=label),
    )


# pods of TrainJobs and JobSets have the JobSet's label: Trainer calls its JobSet as the TrainJob
TRAINJOB = _engine(_trainjob, "trainjob.trainer.kubeflow.org", "jobset.sigs.k8s.io/jobset-name")
JOBSET = _engine(_jobset, "jobset.jobset.x-k8s.io", "jobset.sigs.k8s.io/jobset-name")
JOB = _engine(_job, "job.batch", "batch.kubernetes.io/job-name")
