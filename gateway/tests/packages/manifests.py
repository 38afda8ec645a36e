"""Checks packaging/kubernetes and packaging/compose.yaml without a cluster: known fields only, references that lead
somewhere, and the restrictions that every container has. manifests.py FOLDER"""

import pathlib
import re
import sys

import yaml

# The fields that the manifests use, as the APIs define them. A leaf is its type, or the values that it may have.
TEXT, NUMBER, FLAG = str, int, bool
NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
LABELS = {"*": TEXT}
METADATA = {"name": NAME, "labels": LABELS}
SELECTOR = {"matchLabels": LABELS}
PORT = (NAME, NUMBER)
QUANTITY = re.compile(r"[0-9]+(m|Mi|Gi)?")
PROBE = {"httpGet": {"path": TEXT, "port": PORT}, "periodSeconds": NUMBER, "failureThreshold": NUMBER}
CONTAINER = {
    "name": NAME,
    "image": TEXT,
    "args": [TEXT],
    "ports": [{"name": NAME, "containerPort": NUMBER}],
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "resources": {"requests": {"cpu": QUANTITY, "memory": QUANTITY}, "limits": {"memory": QUANTITY}},
    "securityContext": {
        "allowPrivilegeEscalation": FLAG,
        "readOnlyRootFilesystem": FLAG,
        "capabilities": {"drop": [TEXT]},
    },
    "volumeMounts": [{"name": NAME, "mountPath": TEXT, "readOnly": FLAG}],
}
POD = {
    "automountServiceAccountToken": FLAG,
    "topologySpreadConstraints": [
        {
            "maxSkew": NUMBER,
            "topologyKey": TEXT,
            "whenUnsatisfiable": ("ScheduleAnyway", "DoNotSchedule"),
            "labelSelector": SELECTOR,
        }
    ],
    "terminationGracePeriodSeconds": NUMBER,
    "restartPolicy": ("Never", "OnFailure"),
    "affinity": {
        "podAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": TEXT, "labelSelector": SELECTOR}]
        }
    },
    "securityContext": {
        "runAsNonRoot": FLAG,
        "runAsUser": NUMBER,
        "runAsGroup": NUMBER,
        "fsGroup": NUMBER,
        "seccompProfile": {"type": ("RuntimeDefault",)},
    },
    "containers": [CONTAINER],
    "volumes": [
        {
            "name": NAME,
            "configMap": {"name": NAME},
            "secret": {"secretName": NAME, "defaultMode": NUMBER},
            "persistentVolumeClaim": {"claimName": NAME},
            "emptyDir": {"medium": ("Memory",), "sizeLimit": QUANTITY},
        }
    ],
}
TEMPLATE = {"metadata": {"labels": LABELS}, "spec": POD}
CLAIM = {
    "accessModes": [("ReadWriteOnce", "ReadWriteOncePod")],
    "resources": {"requests": {"storage": QUANTITY}},
}
SCHEMAS = {
    ("v1", "Namespace"): {},
    ("v1", "PersistentVolumeClaim"): {"spec": CLAIM},
    ("v1", "Service"): {
        "spec": {
            "type": ("ClusterIP", "LoadBalancer"),
            "clusterIP": ("None",),
            "externalTrafficPolicy": ("Local", "Cluster"),
            "publishNotReadyAddresses": FLAG,
            "selector": LABELS,
            "ports": [{"name": NAME, "port": NUMBER, "targetPort": PORT}],
        }
    },
    ("apps/v1", "Deployment"): {
        "spec": {
            "replicas": NUMBER,
            "strategy": {"type": ("Recreate",)},
            "selector": SELECTOR,
            "template": TEMPLATE,
        }
    },
    ("apps/v1", "StatefulSet"): {
        "spec": {
            "serviceName": NAME,
            "replicas": NUMBER,
            "selector": SELECTOR,
            "template": TEMPLATE,
            "volumeClaimTemplates": [{"metadata": METADATA, "spec": CLAIM}],
        }
    },
    ("batch/v1", "Job"): {
        "spec": {"backoffLimit": NUMBER, "ttlSecondsAfterFinished": NUMBER, "template": TEMPLATE}
    },
    ("policy/v1", "PodDisruptionBudget"): {"spec": {"maxUnavailable": NUMBER, "selector": SELECTOR}},
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "spec": {
            "podSelector": SELECTOR,
            "policyTypes": [("Ingress", "Egress")],
            "ingress": [{"ports": [{"port": PORT}], "from": [{"namespaceSelector": SELECTOR}]}],
        }
    },
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"): {
        "namespace": NAME,
        "resources": [TEXT],
        "configMapGenerator": [{"name": NAME, "files": [TEXT]}],
        "images": [{"name": TEXT, "newName": TEXT, "newTag": TEXT}],
    },
}


def check(value, schema, where):
    """Fails unless the value has the form of the schema."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), f"{where}: not a map"
        for key, content in value.items():
            assert key in schema or "*" in schema, f"{where}: unknown field {key}"
            check(content, schema.get(key, schema.get("*")), f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, f"{where}: not a list, or empty"
        for number, content in enumerate(value):
            check(content, schema[0], f"{where}[{number}]")
    elif isinstance(schema, re.Pattern):
        assert isinstance(value, str) and schema.fullmatch(value), f"{where}: {value!r} is not {schema.pattern}"
    elif schema == PORT:
        assert type(value) is int or NAME.fullmatch(value), f"{where}: {value!r} is no port"
    elif isinstance(schema, tuple):
        assert value in schema, f"{where}: {value!r} is none of {schema}"
    else:
        assert type(value) is schema, f"{where}: {value!r} is not {schema.__name__}"


def load(path):
    """The objects of a file, each checked."""
    objects = list(yaml.safe_load_all(path.read_text()))
    for item in objects:
        kind = (item.get("apiVersion"), item.get("kind"))
        assert kind in SCHEMAS, f"{path}: unknown kind {kind}"
        metadata = {} if kind[1] == "Kustomization" else {"metadata": METADATA}
        check(item, {"apiVersion": TEXT, "kind": TEXT, **metadata, **SCHEMAS[kind]}, str(path))
    return objects


def is_beside(pod, labels):
    """Whether the pod is scheduled to the node of a pod with `labels`."""
    affinity = pod.get("affinity", {}).get("podAffinity", {})
    return any(
        term["topologyKey"] == "kubernetes.io/hostname" and term["labelSelector"]["matchLabels"].items() <= labels
        for term in affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )


def check_pod(item, where, claims, config_maps, images):
    """Checks the references of a workload's pods, and their restrictions. Notes the pods of each claim in `claims`."""
    template = item["spec"]["template"]
    pod = template["spec"]
    if "selector" in item["spec"]:
        labels = template["metadata"]["labels"].items()
        assert item["spec"]["selector"]["matchLabels"].items() <= labels, f"{where}: selects other pods"
    context = pod["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] == 65532, f"{where}: runs as another user"
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    volumes |= {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", [])}
    for volume in pod.get("volumes", []):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        assert claim is None or claim in claims, f"{where}: no claim {claim}"
        # One process at a time uses the state of an agent.
        assert claim is None or item["spec"].get("replicas", 1) == 1, f"{where}: replicas share the claim {claim}"
        if claim:
            # Another node could not mount the volume.
            assert not claims[claim] or is_beside(pod, claims[claim]), f"{where}: may be on another node than {claim}"
            claims[claim] = template["metadata"]["labels"].items()
        config_map = volume.get("configMap", {}).get("name")
        assert config_map is None or config_map in config_maps, f"{where}: no config map {config_map}"
    for spread in pod.get("topologySpreadConstraints", []):
        assert spread["labelSelector"] == item["spec"]["selector"], f"{where}: spreads other pods"
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False, f"{where}: may gain rights"
        assert security["readOnlyRootFilesystem"] is True, f"{where}: may write its root"
        assert security["capabilities"]["drop"] == ["ALL"], f"{where}: has capabilities"
        assert container["image"] in images, f"{where}: no image {container['image']}"
        mounts = [mount["name"] for mount in container["volumeMounts"]]
        assert set(mounts) == volumes, f"{where}: mounts {mounts} of {volumes}"
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            assert port is None or port in ports, f"{where}: {probe} of unknown port {port}"


def check_kustomization(folder, claims):
    """Checks one folder; returns `claims` with those of the folder. A claim has the labels of the pods that mount it."""
    (kustomization,) = load(folder / "kustomization.yaml")
    objects = [item for name in kustomization["resources"] for item in load(folder / name)]
    used = {"kustomization.yaml", *kustomization["resources"]}
    config_maps, images = set(), {image["name"] for image in kustomization["images"]}
    for generator in kustomization.get("configMapGenerator", []):
        config_maps.add(generator["name"])
        used |= set(generator["files"])
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == used, f"{folder}: has {files}, uses {used}"
    claims = claims | {item["metadata"]["name"]: None for item in objects if item["kind"] == "PersistentVolumeClaim"}

    pods, services = {}, set()
    for item in objects:
        where = f"{folder}: {item['kind']} {item['metadata']['name']}"
        if item["kind"] == "Namespace":
            assert item["metadata"]["name"] == kustomization["namespace"], where
        if "template" in item.get("spec", {}):
            check_pod(item, where, claims, config_maps, images)
            template = item["spec"]["template"]
            ports = {port["name"] for container in template["spec"]["containers"] for port in container.get("ports", [])}
            pods[frozenset(template["metadata"]["labels"].items())] = ports
    for item in objects:
        where = f"{folder}: {item['kind']} {item['metadata']['name']}"
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            services.add(item["metadata"]["name"])
            ports = pods.get(frozenset(spec["selector"].items()))
            assert ports is not None, f"{where}: selects no pod"
            assert all(port["targetPort"] in ports for port in spec["ports"]), f"{where}: unknown port"
        if item["kind"] == "PodDisruptionBudget":
            assert frozenset(spec["selector"]["matchLabels"].items()) in pods, f"{where}: selects no pod"
        if item["kind"] == "NetworkPolicy":
            ports = pods.get(frozenset(spec["podSelector"]["matchLabels"].items()))
            assert ports is not None, f"{where}: selects no pod"
            assert all(port["port"] in ports for rule in spec["ingress"] for port in rule["ports"]), f"{where}: unknown port"
        print(item["kind"], item["metadata"]["name"])
    for item in objects:
        service = item.get("spec", {}).get("serviceName")
        assert service is None or service in services, f"{folder}: no service {service}"
    return claims


def check_compose(path):
    compose = yaml.safe_load(path.read_text())
    for name, service in compose["services"].items():
        assert service["user"] == "65532:65532" and service["read_only"] is True, f"{name}: user or root"
        assert service["cap_drop"] == ["ALL"] and "no-new-privileges:true" in service["security_opt"], f"{name}: rights"
        for volume in service["volumes"]:
            assert volume.split(":")[0] in compose["volumes"], f"{name}: no volume {volume}"
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"], f"{name}: no secret {secret}"
        print("compose", name)


packaging = pathlib.Path(sys.argv[1])
check_kustomization(packaging / "kubernetes/gateway", {})
state = check_kustomization(packaging / "kubernetes/agent", {})
check_kustomization(packaging / "kubernetes/agent/enroll", state)
check_kustomization(packaging / "kubernetes/agent-replicas", {})
check_compose(packaging / "compose.yaml")
