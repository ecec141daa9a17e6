"""The Kubernetes manifests: valid by the schema, commands that our command line accepts, ports and names that agree."""

import copy
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from spark_node.cli.main import parser
from spark_node.cli.run import given_settings
from spark_node.config import load
from spark_node.deploy.bundle import USER
from spark_node.membership import peer_names
from spark_node.security.identity import Role
from spark_node.security.identity import load as load_identity

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OLDEST, NEWEST = "1.27", kubernetes_validate.latest_version()
NAME, COMPONENT = "app.kubernetes.io/name", "app.kubernetes.io/component"
IN_CLUSTER = {"POD_NAME": "spark-host-2", "POD_IP": "10.1.2.3", "RUN_ID": "spark-1"}


def documents(folder: str) -> list[Any]:
    """Every document of a folder's resources, as its kustomization lists them."""
    listed = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text())["resources"]
    return [one for name in listed for one in yaml.safe_load_all((FOLDER / folder / name).read_text())]


BASE = documents("base")


def one(kind: str, name: str) -> Any:
    return next(d for d in BASE if d["kind"] == kind and d["metadata"]["name"] == name)


def with_gpu() -> Any:
    """The StatefulSet with the patch of the GPU overlay (RFC 6902), as kustomize applies it."""
    found = copy.deepcopy(one("StatefulSet", "spark-host"))
    for step in yaml.safe_load((FOLDER / "gpu" / "gpu.yaml").read_text()):
        assert step["op"] == "add"
        *path, last = [p.replace("~1", "/").replace("~0", "~") for p in step["path"].split("/")[1:]]
        place = found
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            assert last == "-"
            place.append(step["value"])
        else:
            place[last] = step["value"]
    return found


def pods(resources: list[Any]) -> list[Any]:
    return [d["spec"]["template"]["spec"] for d in resources if d["kind"] in ("Deployment", "StatefulSet", "Job")]


def containers(pod: Any) -> list[Any]:
    return [*pod["initContainers"], *pod["containers"]]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_resource_is_valid_by_the_schema_of_kubernetes(version: str) -> None:
    assert len(BASE) > 10
    reader = yaml.safe_load((FOLDER / "reader.yaml").read_text())
    for resource in [*BASE, with_gpu(), reader]:
        kubernetes_validate.validate(resource, version, strict=True)


def test_the_schema_would_find_a_mistake() -> None:
    wrong = copy.deepcopy(one("StatefulSet", "spark-host"))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePullPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_every_file_is_in_use() -> None:
    for folder in ("base", "gpu", "monitoring"):
        text = (FOLDER / folder / "kustomization.yaml").read_text()
        for file in (FOLDER / folder).iterdir():
            assert file.name == "kustomization.yaml" or file.name in text, f"{file} is nobody's"


@pytest.mark.parametrize("pod", pods([*BASE, with_gpu()]))
def test_pods_may_do_nothing_that_they_need_not(pod: Any) -> None:
    """What Kubernetes calls the restricted profile, and a root file system that nobody writes to."""
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, USER, USER)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in containers(pod):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["readOnlyRootFilesystem"] is True
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        for mount in container["volumeMounts"]:
            assert mount["name"] in volumes or mount["name"] == "state"
            assert (
                mount.get("readOnly")
                or "emptyDir" in volumes.get(mount["name"], {})
                or mount["name"] in ("state", "runs")
            )
    assert volumes["certs"]["emptyDir"]["medium"] == "Memory"
    assert "secret" not in {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}


def command_of(container: Any, environment: dict[str, str], folder: Path) -> list[str]:
    """The words that spark-dfl gets: Kubernetes' $(NAME) filled in, then run with a spark-dfl that only tells them."""
    words = [*container["command"], *container.get("args", [])]
    filled = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], word) for word in words]
    teller = folder / "spark-dfl"
    teller.write_text(f"#!{sys.executable}\nimport sys\nprint(*sys.argv[1:], sep='\\n')\n")
    teller.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(filled, env={**environment, "PATH": path}, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def environment_of(container: Any) -> dict[str, str]:
    fields = {"metadata.name": "POD_NAME", "status.podIP": "POD_IP"}
    found = {}
    for entry in container.get("env", []):
        reference = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        found[entry["name"]] = entry["value"] if reference is None else IN_CLUSTER[fields[reference]]
    return found


def arguments(container: Any, folder: Path) -> Any:
    """The container's command line as our own parser and configuration understand it: (args, config)."""
    environment = environment_of(container)
    words = command_of(container, environment, folder)
    args = parser().parse_args([word.replace("/config/run.toml", str(FOLDER / "base" / "run.toml")) for word in words])
    return args, load(None, Path(args.config), environment=environment, flags=given_settings(args))


def test_every_command_is_one_that_the_command_line_accepts(tmp_path: Path) -> None:
    found = {}
    for pod in pods([*BASE, with_gpu()]):
        args, config = arguments(pod["containers"][0], tmp_path)
        found[args.command] = config.run.device
        mounted = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        assert config.security.certs in mounted
        for name in ("checkpoints", "logs", "out"):
            if getattr(args, name, None):
                assert str(Path(getattr(args, name)).parent) in mounted
    assert found == {"orchestrator": "cpu", "observe": "cpu", "host": "cuda"}


def test_the_pods_together_have_every_peer_once(tmp_path: Path) -> None:
    peers = one("StatefulSet", "spark-host")
    container = peers["spec"]["template"]["spec"]["containers"][0]
    dealt: list[int] = []
    for pod in range(peers["spec"]["replicas"]):
        environment = {**environment_of(container), "POD_NAME": f"spark-host-{pod}"}
        args = parser().parse_args(command_of(container, environment, tmp_path))
        dealt += range(args.first, args.first + args.count)
    run = tomllib.loads((FOLDER / "base" / "run.toml").read_text())
    assert dealt == list(range(run["run"]["nodes"]))


def test_ports_and_names_agree(tmp_path: Path) -> None:
    orchestrator = one("Deployment", "spark-orchestrator")["spec"]["template"]
    args, _ = arguments(orchestrator["spec"]["containers"][0], tmp_path)
    ports = {port["name"]: port["containerPort"] for port in orchestrator["spec"]["containers"][0]["ports"]}
    assert ports == {"grpc": args.port, "http": args.http_port}
    service = one("Service", "spark-orchestrator")["spec"]
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == ports
    assert service["selector"] == orchestrator["metadata"]["labels"]

    peers = one("StatefulSet", "spark-host")
    _, config = arguments(peers["spec"]["template"]["spec"]["containers"][0], tmp_path)
    assert config.network.orchestrator == f"spark-orchestrator:{args.port}"
    assert config.network.host == IN_CLUSTER["POD_IP"]
    own = {port["name"]: port["containerPort"] for port in peers["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert own == {"grpc": config.network.port, "metrics": config.network.metrics_port}
    headless = one("Service", "spark-host")["spec"]
    assert headless["clusterIP"] == "None"
    assert peers["spec"]["serviceName"] == "spark-host"
    assert {port["targetPort"]: port["port"] for port in headless["ports"]} == own
    assert headless["selector"] == peers["spec"]["template"]["metadata"]["labels"]
    assert one("PodDisruptionBudget", "spark-host")["spec"]["selector"]["matchLabels"] == headless["selector"]
    for resource in BASE:
        if resource["kind"] in ("Deployment", "StatefulSet"):
            assert resource["spec"]["selector"]["matchLabels"] == resource["spec"]["template"]["metadata"]["labels"]
    claims = [pod["volumes"] for pod in pods(BASE)]
    claimed = {
        v["persistentVolumeClaim"]["claimName"] for volumes in claims for v in volumes if "persistentVolumeClaim" in v
    }
    assert claimed == {d["metadata"]["name"] for d in BASE if d["kind"] == "PersistentVolumeClaim"}


def allows(policy: Any, component: str, port: int) -> bool:
    """Whether a policy lets pods of a component in at a port."""
    for rule in policy["spec"].get("ingress", []):
        inside = any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"])
        labels = {NAME: "spark-dfl", COMPONENT: component}
        for source in rule["from"]:
            wanted = source.get("podSelector", {}).get("matchLabels")
            if inside and wanted is not None and wanted.items() <= labels.items():
                return True
    return False


def test_network_policies_let_through_what_a_run_needs_and_no_more() -> None:
    orchestrator, peers, observer = (
        one("NetworkPolicy", f"spark-{name}") for name in ("orchestrator", "peers", "observer")
    )
    for policy, component in ((orchestrator, "orchestrator"), (peers, "peers"), (observer, "observer")):
        assert policy["spec"]["podSelector"]["matchLabels"] == {NAME: "spark-dfl", COMPONENT: component}
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert all(allows(orchestrator, component, 7400) for component in ("peers", "observer"))
    assert not allows(orchestrator, "peers", 7401)
    assert all(allows(peers, component, port) for component in ("peers", "observer") for port in (7500, 7503))
    assert not allows(peers, "orchestrator", 7500)
    assert not allows(peers, "observer", 7700)
    assert "ingress" not in observer["spec"]
    for policy in (peers, observer):
        reached = {
            (rule["to"][0].get("podSelector", {}).get("matchLabels", {}).get(COMPONENT, "dns"), port["port"])
            for rule in policy["spec"]["egress"]
            for port in rule["ports"]
        }
        assert reached == {("peers", 7500), ("orchestrator", 7400), ("dns", 53)}
    assert "egress" not in orchestrator["spec"]


ENDPOINT = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "port": {"type": "string"},
        "portNumber": {"type": "integer", "minimum": 1, "maximum": 65535},
        "path": {"type": "string", "pattern": "^/"},
        "interval": {"type": "string", "pattern": "^[0-9]+s$"},
    },
    "oneOf": [{"required": ["port"]}, {"required": ["portNumber"]}],
}
SPECS: dict[str, Any] = {
    "monitoring.coreos.com/v1 PodMonitor": {
        "type": "object",
        "additionalProperties": False,
        "required": ["selector", "podMetricsEndpoints"],
        "properties": {
            "selector": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
            },
            "podMetricsEndpoints": {"type": "array", "minItems": 1, "items": ENDPOINT},
        },
    },
    "monitoring.coreos.com/v1alpha1 ScrapeConfig": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "metricsPath": {"type": "string", "minLength": 1},
            "scrapeInterval": {"type": "string", "pattern": "^[0-9]+s$"},
            "httpSDConfigs": {
                "type": "array",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["url"],
                    "properties": {
                        "url": {"type": "string", "pattern": "^http(s)?://.+$"},
                        "refreshInterval": {"type": "string", "pattern": "^[0-9]+s$"},
                    },
                },
            },
        },
    },
}
"""The parts of the Prometheus operator's definitions that we use, strictly; no package has them as a schema."""


def test_monitors_have_the_operators_form_and_find_every_peer(tmp_path: Path) -> None:
    found = {}
    for file in ("pod-monitors.yaml", "scrape-config.yaml"):
        for resource in yaml.safe_load_all((FOLDER / "monitoring" / file).read_text()):
            assert set(resource) == {"apiVersion", "kind", "metadata", "spec"}
            jsonschema.validate(resource["spec"], SPECS[f"{resource['apiVersion']} {resource['kind']}"])
            found[resource["kind"], resource["metadata"]["name"]] = resource["spec"]
    peers = one("StatefulSet", "spark-host")["spec"]["template"]
    args, config = arguments(peers["spec"]["containers"][0], tmp_path)
    monitor = found["PodMonitor", "spark-peers"]
    first = config.network.metrics_port
    assert [e["portNumber"] for e in monitor["podMetricsEndpoints"]] == list(range(first, first + args.count))
    assert monitor["selector"]["matchLabels"] == peers["metadata"]["labels"]
    namespace = next(d for d in BASE if d["kind"] == "Namespace")["metadata"]["name"]
    url = found["ScrapeConfig", "spark-peers"]["httpSDConfigs"][0]["url"]
    assert url == f"http://spark-orchestrator.{namespace}.svc:7401/sd"


def test_the_archives_hold_for_each_pod_its_own_keys_alone(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "spark-dfl"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spark_node "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(FOLDER.parents[1])
    script, out = FOLDER / "make-certificates", tmp_path / "out"
    done = subprocess.run([script, "2", "3", out], env=environment, capture_output=True, text=True, check=True)
    secrets = {pod["volumes"][1]["secret"]["secretName"]: pod["initContainers"][0] for pod in pods(BASE)}
    for role in ("orchestrator", "observer", "peers"):
        assert f"kubectl -n spark create secret generic spark-{role} --from-file={out}/{role}" in done.stdout
        assert f"spark-{role}" in secrets

    def unpacked(archive: Path) -> Path:
        folder = tmp_path / "unpacked" / archive.parent.name / archive.name
        folder.mkdir(parents=True)
        init = secrets[f"spark-{archive.parent.name}"]
        words = [word.replace("/certs", str(folder)) for word in init["command"]]
        subprocess.run([re.sub(r"^/secret/.*", str(archive), word) for word in words], check=True)
        return folder

    for pod in range(2):
        folder = unpacked(out / "peers" / f"spark-host-{pod}.tar.gz")
        own = peer_names(6)[pod * 3 : pod * 3 + 3]
        assert sorted(path.stem for path in folder.rglob("*.key")) == own
        for peer in own:
            assert load_identity(folder, Role.PEER, peer).identity.name == peer
    for role in (Role.ORCHESTRATOR, Role.OBSERVER):
        folder = unpacked(out / role.value / "certificates.tar.gz")
        assert [path.stem for path in folder.rglob("*.key")] == [role.value]
        assert load_identity(folder, role, role.value).identity.role is role
    with tarfile.open(out / "peers" / "spark-host-0.tar.gz") as archive:
        assert not [entry.name for entry in archive if "authority.key" in entry.name]
    failed = subprocess.run([script, "2"], env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "usage:" in failed.stderr
