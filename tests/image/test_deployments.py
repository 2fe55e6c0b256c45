"""The compose file, the KubeRay example and the profiles: they say what the entrypoint, vLLM and the series take."""

import re

import pytest
import yaml
from elastic_tools.image import tag
from elastic_tools.pins import ROOT, pins
from vllm.config.elastic_kv import ElasticKVConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

PROFILES = sorted((ROOT / "configs" / "profiles").glob("*.yaml"))
ENTRYPOINT = (ROOT / "docker" / "entrypoint").read_text()
OF_OTHERS = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "VLLM_API_KEY"}  # Ray's and vLLM's own
IN_THE_IMAGE = "/opt/elastic-kv/"


@pytest.fixture(scope="module")
def parser():
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def engine(parser, *arguments):
    return EngineArgs.from_cli_args(parser.parse_args(["--model", "owner/name", *arguments]))


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_vllm_takes_the_profile(parser, profile):
    given = yaml.safe_load(profile.read_text())
    made = engine(parser, "--config", str(profile))
    elastic = made.elastic_kv_config
    config = elastic if isinstance(elastic, ElasticKVConfig) else ElasticKVConfig(**elastic)
    assert config.policy in ("static", "on-demand")
    for option, value in given.items():
        if option != "elastic-kv-config":
            assert getattr(made, option.replace("-", "_")) == value, option


def test_what_stands_behind_a_profile_on_the_command_line_wins(parser):
    made = engine(parser, "--config", str(PROFILES[0]), "--max-model-len", "123")
    assert made.max_model_len == 123


def test_every_profile_says_how_it_is_used():
    assert {path.stem for path in PROFILES} == {"cpu", "shared-gpu", "single-gpu", "tp-ray", "tp-ray-cpu"}
    for path in PROFILES:
        assert f"vllm serve MODEL --config configs/profiles/{path.name}" in path.read_text()


def environments():
    """Who has which environment: compose services and containers of the KubeRay example."""
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    found = {f"compose {name}": service["environment"] for name, service in compose["services"].items()}
    _, cluster = yaml.safe_load_all((ROOT / "configs" / "kuberay.yaml").read_text())
    for container in containers(cluster):
        found[f"kuberay {container['name']}"] = {one["name"]: one.get("value", "") for one in container["env"]}
    return found


def containers(cluster):
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.mark.parametrize(
    ("who", "environment"), environments().items(), ids=lambda value: value if str(value) == value else ""
)
def test_the_entrypoint_knows_every_variable(who, environment):
    known = set(re.findall(r"^#   ([A-Z_]+) ", ENTRYPOINT, re.MULTILINE))
    assert set(environment) - OF_OTHERS <= known
    assert environment["RAY_MODE"] in ("head", "worker")
    assert ("RAY_HEAD" in environment) is (environment["RAY_MODE"] == "worker")


def test_the_entrypoint_documents_what_it_reads():
    known = set(re.findall(r"^#   ([A-Z_]+) ", ENTRYPOINT, re.MULTILINE))
    read = set(re.findall(r"\$\{?([A-Z][A-Z_]+)", ENTRYPOINT))
    assert read - {"BASH_SOURCE", "RAY_POLL_SECONDS", "SECONDS"} <= known


def test_the_head_waits_for_as_many_nodes_as_there_are():
    _, cluster = yaml.safe_load_all((ROOT / "configs" / "kuberay.yaml").read_text())
    workers = sum(group["replicas"] for group in cluster["spec"]["workerGroupSpecs"])
    profile = yaml.safe_load((ROOT / "configs" / "profiles" / "tp-ray.yaml").read_text())
    assert environments()["kuberay ray-head"]["RAY_NODES"] == str(1 + workers) == str(profile["tensor-parallel-size"])


def test_images_profiles_and_versions_are_those_of_the_repository():
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    kuberay = (ROOT / "configs" / "kuberay.yaml").read_text()
    for text in (compose, kuberay):
        assert tag("cuda") in text
        for name in re.findall(rf"{IN_THE_IMAGE}(configs/profiles/[\w-]+\.yaml|docker/[a-z]+)", text):
            assert (ROOT / name).is_file(), name
    for name in re.findall(r"elastic-kv-vllm:[\w.-]+", compose + kuberay):
        assert name in (tag("cuda"), tag("cpu"))
    assert f"rayVersion: {pins()['packages']['ray']}" in kuberay


def test_every_node_has_longer_to_stop_than_to_drain():
    compose = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    _, cluster = yaml.safe_load_all((ROOT / "configs" / "kuberay.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    times = {f"compose {name}": int(one["stop_grace_period"].removesuffix("s")) for name, one in compose.items()}
    for pod in (group["template"]["spec"] for group in groups):
        times[f"kuberay {pod['containers'][0]['name']}"] = pod["terminationGracePeriodSeconds"]
    drains = {who: int(environment["DRAIN_SECONDS"]) for who, environment in environments().items()}
    assert times.keys() == drains.keys()
    assert all(times[who] > drains[who] for who in times)


def test_without_gpus_each_node_lends_a_rank_and_none_asks_for_a_gpu():
    class Loader(yaml.SafeLoader):
        """Knows the tag with which one compose file takes away what another says."""

    Loader.add_constructor("!reset", lambda loader, node: "reset")
    base = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    cpu = yaml.load((ROOT / "docker" / "compose.cpu.yaml").read_text(), Loader)["services"]
    assert {name for name, service in base.items() if "gpus" in service} == set(cpu)
    for service in cpu.values():
        assert service["gpus"] == "reset"
        assert service["environment"] == {"RAY_SLOTS": "1"}
        assert tag("cpu") in service["image"]
    wanted = yaml.safe_load((ROOT / "configs" / "profiles" / "tp-ray-cpu.yaml").read_text())
    assert wanted["tensor-parallel-size"] == len(cpu)
    assert "tp-ray-cpu" in cpu["head"]["command"][-1]
