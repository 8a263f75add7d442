"""The Grafana dashboard in examples/grafana/: what it asks for is what a running frontend serves."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ssd.ipc.messages import Emission, Load, Step
from ssd.ipc.public import Metrics
from tests.frontend.http_engine import HttpEngine
from tests.frontend.test_http_metrics import begin, exposition

FILE = Path(__file__).parents[2] / "examples" / "grafana" / "ssd.json"
GRAFANAS_OWN = {"__rate_interval"}
PROMETHEUS_OWN = {"instance", "le"}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


@pytest.fixture
def served(scripted: HttpEngine) -> dict[str, set[str]]:
    """The labels of every series, by its name, after a request that had a miss."""
    target, connection = scripted.engine.target, begin(scripted)
    end = Emission(
        target.next_submit().request, [5], finish_reason="stop", metrics=Metrics(), drafted=2, cache="token_not_covered"
    )
    target._send(Step([end], Load()))
    connection.getresponse().read()
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(exposition(scripted)):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_query_asks_for_series_and_labels_that_are_served(
    dashboard: dict[str, Any], served: dict[str, set[str]]
) -> None:
    variables = [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    for query in [*queries(dashboard), *variables]:
        names = re.findall(r"ssd:\w+", query)
        assert names and set(names) <= served.keys(), query
        labels = set.union(*(served[name] for name in names)) | PROMETHEUS_OWN
        asked = re.findall(r"(\w+)(?:=|!=)~?\"", query) + re.findall(r"by \((\w+)\)", query)
        asked += re.findall(r"^label_values\(.*, (\w+)\)$", query)
        assert set(asked) <= labels, query


def test_everything_that_is_served_is_shown(dashboard: dict[str, Any], served: dict[str, set[str]]) -> None:
    parts = re.compile(r"_(bucket|sum|count|created|total)$")
    shown = {parts.sub("", name) for query in queries(dashboard) for name in re.findall(r"ssd:\w+", query)}
    served_names = {parts.sub("", name) for name in served}
    assert {name for name in served_names if name.startswith("ssd:")} == shown
    repeated = {name.replace("vllm:", "ssd:") for name in served_names if name.startswith("vllm:")}
    assert repeated - shown == {"ssd:time_per_output_token_seconds"}, "vLLM's earlier name of one that is shown"


def test_it_can_be_imported(dashboard: dict[str, Any]) -> None:
    """By any Grafana: it brings no id, and takes the data source from a variable."""
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 39
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(dashboard):
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references))
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for query in queries(dashboard):
        assert set(re.findall(r"\$\{?(\w+)", query)) <= variables.keys() | GRAFANAS_OWN
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_panels_lie_beside_each_other(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y
