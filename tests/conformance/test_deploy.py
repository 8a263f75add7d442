"""The files in deploy/: sound for the programs that read them, and what they ask of an engine is what it does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.scripts.scripts import start

from tests.conformance.conftest import launched

DEPLOY = Path(__file__).parents[2] / "deploy"
BIN = Path(sys.executable).parent
FILES = sorted(path.name for path in (DEPLOY / "kubernetes").glob("*.yaml"))
KEY = "a-key-of-the-secret"
WHO = ("leader", "worker")


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text()))


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a document."""
    spec = document["spec"]
    found = [spec.get("template"), *(spec.get("leaderWorkerTemplate", {}).get(f"{who}Template") for who in WHO)]
    return [template for template in found if template]


ALL = [(name, document) for name in FILES for document in documents(name)]


@pytest.mark.parametrize("name,document", ALL, ids=[f"{name}-{document['kind']}" for name, document in ALL])
def test_kubernetes_would_take_it(name: str, document: dict[str, Any]) -> None:
    """What is not of Kubernetes itself is looked at as far as it holds pods."""
    if document["apiVersion"] in ("v1", "apps/v1"):
        kubernetes_validate.validate(document, "1.34", strict=True)
    for template in pods(document):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.34", strict=True)
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [container[probe]["httpGet"]["port"] for probe in container if probe.endswith("Probe")]
            assert {*probes} <= ports


def test_the_names_in_them_fit_together() -> None:
    kinds = {document["kind"]: document for _, document in ALL if document["kind"] != "Service"}
    services = {document["metadata"]["name"]: document for _, document in ALL if document["kind"] == "Service"}
    deployment = kinds["Deployment"]
    (template,) = pods(deployment)
    workloads = {"ssd": template, "ssd-large": pods(kinds["LeaderWorkerSet"])[0]}
    for name, service in services.items():
        selector = service["spec"]["selector"].items()
        chosen = [other for other, pod in workloads.items() if selector <= pod["metadata"]["labels"].items()]
        assert chosen == [name], "a service with pods of two models would answer with either"
    service = services["ssd"]["spec"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    (port,) = service["ports"]
    assert port["targetPort"] in {port["name"] for port in container["ports"]}
    monitor = kinds["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= services["ssd"]["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == port["name"]
    assert endpoint["authorization"]["credentials"] == container["env"][0]["valueFrom"]["secretKeyRef"]


@pytest.mark.mock
def test_an_engine_does_what_the_deployment_asks_of_it() -> None:
    (template,) = pods(documents("ssd.yaml")[0])
    (container,) = template["spec"]["containers"]
    command, *options = container["args"]
    assert command == "launch"
    (endpoint,) = documents("servicemonitor.yaml")[0]["spec"]["endpoints"]
    with launched(*options, "--load-format", "mock", SSD_API_KEY=KEY) as url:
        url = re.sub(r"//[^:/]+", "//127.0.0.1", url)
        probes = [container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")]
        assert len(probes) == 3
        for path in probes:
            assert urllib.request.urlopen(url + path).status == 200, "a probe has no key"
        request = urllib.request.Request(url + endpoint["path"], headers={"Authorization": f"Bearer {KEY}"})
        assert b"ssd:num_requests_running" in urllib.request.urlopen(request).read()
    defaults = subprocess.run(
        [sys.executable, "-m", "ssd.cli.main", "launch", "--dry-run"], capture_output=True, text=True, check=True
    )
    drain = json.loads(defaults.stdout)["shutdown_timeout"]
    assert template["spec"]["terminationGracePeriodSeconds"] > drain + 10


def test_a_set_is_a_ray_cluster_and_its_engine_fits_on_it() -> None:
    """As Kubernetes fills them in, but for the models and devices, which are not here."""
    set_of_nodes = documents("leaderworkerset.yaml")[0]
    size = set_of_nodes["spec"]["leaderWorkerTemplate"]["size"]
    leader, worker = (template["spec"]["containers"][0] for template in pods(set_of_nodes))
    assert leader["command"] == worker["command"] == ["sh", "-c"]
    head, engine = leader["args"][0].split(" && exec ssd launch ")
    joining = worker["args"][0].removeprefix("exec ").replace("$(LWS_LEADER_ADDRESS)", "leader.example")
    started = [start.make_context("start", command.removeprefix("ray start ").split()) for command in (head, joining)]
    assert started[0].params["head"] and started[1].params["block"]
    assert started[1].params["address"] == f"leader.example:{started[0].params['port']}"
    limits = [container["resources"]["limits"]["nvidia.com/gpu"] for container in (leader, worker)]
    ranks = int(re.search(r"--tensor-parallel-size=(\d+)", engine)[1])  # type: ignore[index]
    assert int(limits[0]) + int(limits[1]) * (size - 1) == ranks
    kept = [each for each in engine.split() if not re.match(r"--(target|draft|\S*device|tensor-parallel-size)=", each)]
    shown = subprocess.run(
        [sys.executable, "-m", "ssd.cli.main", "launch", "-tp", "2", *kept, "--dry-run"],
        env={"SSD_API_KEY": KEY, "PATH": str(BIN)},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["executor"] == "ray"


def test_the_dockerfile_has_no_known_faults() -> None:
    command = [BIN / "hadolint", "--config", DEPLOY / ".hadolint.yaml", DEPLOY / "Dockerfile"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_would_take_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "ssd.service"
    text = (DEPLOY / "ssd.service").read_text()
    unit.write_text(text.replace("/opt/ssd/bin/ssd", str(BIN / "ssd")))
    found = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
