"""The alert rules can be parsed, use metrics that are there, and are all in the document."""

import re

import promql_parser
import pytest
import yaml
from elastic_tools.pins import CACHE, ROOT

from .facts import OPERATING, metric_names, tables_below

RULES = yaml.safe_load((ROOT / "configs" / "alerts.yaml").read_text())["groups"][0]["rules"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_is_promql_over_metrics_that_are_there(rule):
    promql_parser.parse(rule["expr"])
    known = metric_names()
    used = set(re.findall(r"vllm:[a-z_]+", rule["expr"]))
    assert used
    for name in used:
        if name.startswith("vllm:elastic_kv_"):
            assert name.removesuffix("_bucket") in known, name
        else:
            loggers = (CACHE / "upstream" / "vllm" / "v1" / "metrics" / "loggers.py").read_text()
            assert f'"{name}"' in loggers, name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_has_a_severity_and_says_where(rule):
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_the_document_has_all_of_them():
    (table,) = tables_below(OPERATING, "Alerts")
    assert table == [rule["alert"] for rule in RULES]
