"""A job as a `TrainJob` of Kubeflow Trainer v2.

Input: a `Job`. Output: YAML with a ConfigMap that holds the configuration, unless it is a preset, and the TrainJob. The
runtime ``torch-distributed`` tells torchrun the nodes through PET_* variables. Runs are on a volume claim mounted at /runs.
"""

import json
import textwrap

from forebay.launch.job import Job

SUBMIT = ("kubectl", "apply", "-f")
_CONFIG = "/etc/forebay/config.toml"


def write(job: Job) -> str:
    """The file's text."""
    arguments = job.arguments(_CONFIG if job.text is not None else "", f"log.folder=/runs/{job.name}")
    command = ["python3", "-m", "forebay.launch.torchrun", "-m", "forebay", *arguments]
    resources = f"\n        nvidia.com/gpu: {job.gpus}" if job.gpus else "\n        # no GPUs: device.type = 'cpu'"
    image = json.dumps(job.image or "registry.example/forebay:latest")
    return f"""\
# {job.summary("Kubeflow Trainer v2")}
# Start it with `kubectl apply -f FILE`. To continue after a failure: `kubectl delete -f FILE`, and apply it again.
{_config_map(job)}apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.name}
spec:
  runtimeRef:
    name: torch-distributed
{f"  activeDeadlineSeconds: {job.seconds}{chr(10)}" if job.seconds else ""}\
  trainer:
    image: {image}  # EDIT: an image with Forebay
    numNodes: {job.nodes}
    numProcPerNode: {job.processes}
    resourcesPerNode:
      limits:{resources}
        cpu: {8 * job.processes}  # EDIT
        memory: {64 * job.processes}Gi  # EDIT: with memory.policy = "offload", the saved activations are here too
    command:
{textwrap.indent(_list(command), "      ")}
  runtimePatches:
    - manager: forebay.dev/launch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: 300  # EDIT: more than a step and a save take
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: runs, mountPath: /runs}}
                              - {{name: shared-memory, mountPath: /dev/shm}}
{_mount(job)}\
                        volumes:
                          - name: runs
                            persistentVolumeClaim:
                              claimName: runs  # EDIT: a ReadWriteMany claim; all nodes write checkpoints into it
                          - name: shared-memory  # NCCL needs more than the 64 MiB of a container
                            emptyDir: {{medium: Memory}}
{_volume(job)}"""


def _list(items: list[str]) -> str:
    """Items of a YAML list; a JSON string is a YAML string."""
    return "\n".join(f"- {json.dumps(item, ensure_ascii=False)}" for item in items)


def _config_map(job: Job) -> str:
    if job.text is None:
        return ""
    text = job.text.rstrip().replace("\n", f"\n{' ' * 4}")
    # |2 says how far the text is indented, so that its first line may begin with spaces.
    return f"""\
apiVersion: v1
kind: ConfigMap
metadata:
  name: {job.name}
data:
  config.toml: |2
    {text}
---
"""


def _mount(job: Job) -> str:
    if job.text is None:
        return ""
    return f"{' ' * 30}- {{name: config, mountPath: /etc/forebay, readOnly: true}}\n"


def _volume(job: Job) -> str:
    if job.text is None:
        return ""
    return textwrap.indent(f"- name: config\n  configMap: {{name: {job.name}}}\n", " " * 26)
