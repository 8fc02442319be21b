"""The Grafana dashboard of the release: what it asks for is published, under the labels that it groups by."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from documents import ROOT

from vllm_crossspec.metrics.export import _make_counters

BOARD = ROOT / "deploy" / "dashboards" / "crossspec.json"
METRIC = re.compile(r"\b((?:crossspec|vllm):\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([\w, ]+)\) \(rate\(((?:crossspec|vllm):\w+)")


def names(name, kind):
    """Of the series of a metric on the page."""
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}
    return [name + ending for ending in endings[kind]]


def of_vllm():
    """Metrics that this vLLM makes, from its source: making them takes an engine's configuration."""
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.origin).parent / "v1"
    published = set()
    for file in ("metrics/loggers.py", "spec_decode/metrics.py"):
        for call in ast.walk(ast.parse((folder / file).read_text())):
            function = getattr(getattr(call, "func", None), "attr", "")
            if made := re.fullmatch(r"_(counter|gauge|histogram)_cls", function):
                named = [key.value for key in call.keywords if key.arg == "name"]
                if named and isinstance(named[0], ast.Constant):
                    published |= {*names(named[0].value, made[1])}
        # Three counters of speculation are made of a list of names.
        listed = re.findall(r"\(\s*\"(vllm:spec_decode_\w+)\", \"", (folder / file).read_text())
        published |= {series for name in listed for series in names(name, "counter")}
    return published


@pytest.fixture(scope="module")
def of_ours():
    """Labels of each series that our exporter makes."""
    labels = {}
    for name, metric in _make_counters().items():
        for series in names(name if name.startswith("crossspec:") else f"crossspec:{name}", metric._type):
            labels[series] = {*metric._labelnames, *(["le"] if series.endswith("_bucket") else [])}
    return labels


def panels(board):
    return [inner for panel in board["panels"] for inner in (panel, *panel.get("panels", ()))]


def problems(board, of_ours):
    """A sentence for whatever a board asks for in vain."""
    found, published = [], {*of_ours, *of_vllm()}
    ids = [panel["id"] for panel in panels(board)]
    if len(ids) != len({*ids}):
        found.append("two panels have the same id")
    for panel in panels(board):
        for target in panel.get("targets", ()):
            where, expr = panel["title"], target["expr"]
            asked = METRIC.findall(expr)
            if not asked or len(asked) != len(re.findall(r"(?:crossspec|vllm):", expr)):
                found.append(f"{where}: a metric without a choice of engines in {expr}")
            found += [f"{where}: nobody publishes {name}" for name, _ in asked if name not in published]
            found += [f"{where}: {name} of all engines" for name, choice in asked if 'engine=~"$engine"' not in choice]
            for by, name in GROUPED.findall(expr):
                unknown = {*by.split(", ")} - of_ours.get(name, {"engine", "le", "model_name"})
                found += [f"{where}: {name} has no label {label}" for label in sorted(unknown)]
            if target["datasource"]["uid"] != "${datasource}":
                found.append(f"{where}: another data source than the one that is chosen")
    return found


def test_release_dashboard_asks_for_what_is_published(of_ours):
    board = json.loads(BOARD.read_text())
    assert problems(board, of_ours) == []
    variables = {variable["name"]: variable["type"] for variable in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "engine": "query"}
    asked = [target["expr"] for panel in panels(board) for target in panel.get("targets", ())]
    shown = {name for expr in asked for name, _ in METRIC.findall(expr)}
    assert {*of_ours} - shown == set(), "metrics of ours that no panel shows"


def test_release_dashboard_that_asks_in_vain_is_seen(of_ours):
    """Negative control."""
    text = BOARD.read_text()
    for old, new, sentence in (
        ("crossspec:drafts_total", "crossspec:draft_total", "nobody publishes crossspec:draft_total"),
        ("vllm:generation_tokens_total", "vllm:generation_tokens", "nobody publishes vllm:generation_tokens"),
        ("by (stage)", "by (drafter)", "crossspec:round_seconds_total has no label drafter"),
        ('"id": 2,', '"id": 3,', "two panels have the same id"),
        ('crossspec:drafter_swaps_total{engine=~\\"$engine\\"}', "crossspec:drafter_swaps_total{}", "of all engines"),
    ):
        assert old in text
        assert any(sentence in found for found in problems(json.loads(text.replace(old, new)), of_ours)), sentence
