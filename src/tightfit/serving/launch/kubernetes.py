"""A Kubernetes manifest that runs a server: a Deployment of one replica with its GPUs, and a Service."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PORT = 8000


def manifest(name: str, image: str, arguments: Sequence[str], *, num_gpus: int) -> str:
    """The manifest as YAML: `image` runs the command `arguments`, with `num_gpus` of the node's."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "model"
    if label[0].isdigit():
        # The name of a Service begins with a letter (RFC 1035).
        label = f"model-{label}"
    labels = {"app": label}
    container = {
        "name": "server",
        "image": image,
        "command": [*arguments, "--port", str(_PORT)],
        "ports": [{"containerPort": _PORT}],
        "resources": {"limits": {"nvidia.com/gpu": num_gpus}},
        # It loads weights, compiles and captures before it answers.
        "startupProbe": {
            "httpGet": {"path": "/health", "port": _PORT},
            "periodSeconds": 10,
            "failureThreshold": 360,
        },
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT}, "periodSeconds": 5},
        # Ranks exchange what they have through shared memory.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": label, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            # Its GPUs are not free for a second one while the first runs.
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": label, "labels": labels},
        "spec": {"selector": labels, "ports": [{"port": 80, "targetPort": _PORT}]},
    }
    return "---\n".join("".join(f"{line}\n" for line in _lines(part)) for part in (deployment, service))


def _lines(value: Any, indent: str = "") -> Iterator[str]:
    """A mapping as lines of YAML. Strings are quoted as JSON has them, which YAML reads too."""
    assert isinstance(value, Mapping)
    for key, part in value.items():
        if isinstance(part, Mapping):
            yield f"{indent}{key}:"
            yield from _lines(part, f"{indent}  ")
        elif isinstance(part, list):
            yield f"{indent}{key}:"
            for item in part:
                yield from _item(item, f"{indent}  ")
        else:
            yield f"{indent}{key}: {json.dumps(part)}"


def _item(item: Any, indent: str) -> Iterator[str]:
    if not isinstance(item, Mapping):
        yield f"{indent}- {json.dumps(item)}"
        return
    first, *others = _lines(item, f"{indent}  ")
    yield f"{indent}- {first.lstrip()}"
    yield from others
