"""What ``make serve`` would run, for users and machines of several kinds."""

import json
import os
import socket
import subprocess
import sys

import pytest
from elastic_tools import serve
from elastic_tools.pins import ROOT

NOTHING = {"MODEL": "owner/name"}


def plan(*arguments, environment=NOTHING, engine="cpu", flags=(), cpus=(0, 1)):
    return serve.plan(arguments, environment, engine=engine, cpu_flags=set(flags), cpus=cpus, process=7)


def option(chosen, name):
    """The value that vLLM would take: the last one given."""
    command = chosen.command
    places = [place for place, word in enumerate(command) if word == name]
    return command[places[-1] + 1] if places else None


def elastic(chosen):
    return json.loads(option(chosen, "--elastic-kv-config"))


def test_defaults_on_a_small_cpu():
    chosen = plan()
    assert chosen.command[2:4] == ["serve", "owner/name"]
    assert (option(chosen, "--host"), option(chosen, "--port")) == ("127.0.0.1", "8000")
    assert option(chosen, "--dtype") == "float32"
    assert "--enforce-eager" in chosen.command
    assert elastic(chosen) == {"start": "1GiB", "capacity": "4GiB", "admin_api": True}
    assert chosen.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert any("http://127.0.0.1:8000" in line and "pid 7" in line for line in chosen.lines)


@pytest.mark.parametrize("flag", sorted(serve.BF16_FLAGS))
def test_bf16_hardware_chooses_its_own_type(flag):
    assert option(plan(flags=["avx2", flag]), "--dtype") is None


def test_gpu_gets_neither_cpu_options_nor_an_elastic_cache():
    """The engine would refuse it, after loading the model: there is no page driver for it yet."""
    chosen = plan(engine="cuda")
    assert option(chosen, "--dtype") is None
    assert "--enforce-eager" not in chosen.command
    assert option(chosen, "--elastic-kv-config") is None
    assert any("not elastic" in line for line in chosen.lines)
    assert "VLLM_CPU_OMP_THREADS_BIND" not in chosen.environment


def test_hub_is_asked_only_for_a_model_that_the_user_names(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    local = plan(environment={"MODEL": str(tmp_path)})
    assert local.environment["HF_HUB_OFFLINE"] == "1"
    assert option(local, "--served-model-name") == tmp_path.name
    assert "HF_HUB_OFFLINE" not in plan().environment


def test_arguments_of_the_user_win():
    own = ["--port", "9", "--dtype=bfloat16", "--elastic-kv-config", '{"start": "2GiB"}', "--served-model-name", "x"]
    chosen = plan(*own)
    assert chosen.command[-len(own) :] == own
    assert chosen.command.count("--elastic-kv-config") == 1
    assert "x on http://127.0.0.1:9" in chosen.lines[0]


def test_port_and_host_from_the_environment():
    chosen = plan(environment=NOTHING | {"HOST": "::1", "PORT": "81"})
    assert "http://[::1]:81" in chosen.lines[0]
    assert elastic(chosen)["admin_api"] is True


def test_open_server_without_a_key_does_not_offer_resizing():
    chosen = plan(environment=NOTHING | {"HOST": "0.0.0.0"})
    assert "admin_api" not in elastic(chosen)
    assert not any("/elastic_kv/resize" in line for line in chosen.lines)
    keyed = plan(environment=NOTHING | {"HOST": "0.0.0.0", "VLLM_API_KEY": "secret"})
    assert any("/elastic_kv/resize" in line for line in keyed.lines)
    assert not any("secret" in line for line in keyed.lines)


def test_elastic_off():
    chosen = plan(environment=NOTHING | {"ELASTIC": "off"})
    assert option(chosen, "--elastic-kv-config") is None
    assert option(chosen, "--kv-cache-memory-bytes") == str(1 << 30)
    assert not any("elastic_kv" in line for line in chosen.lines)


def test_size_is_given_once():
    assert "start" not in elastic(plan("--kv-cache-memory-bytes", "1000000"))


@pytest.mark.parametrize(
    ("cpus", "ranks", "expected"),
    [([0, 1], 1, "0,1"), ([2, 5], 2, "2|5"), (range(8), 1, "auto"), (range(8), 2, "0,1,2,3|4,5,6,7")],
)
def test_binding(cpus, ranks, expected):
    assert serve.binding(list(cpus), ranks) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MODEL": "/no/such/place"}, "does not exist"),
        ({"MODEL": "./gone"}, "does not exist"),
        ({"MODEL": "a/b/c"}, "does not exist"),
        (NOTHING | {"PORT": "http"}, "not a port"),
        (NOTHING | {"PORT": "70000"}, "not a port"),
    ],
)
def test_mistakes_are_told(environment, message):
    with pytest.raises(serve.ServeError, match=message):
        plan(environment=environment)


def test_directory_without_a_model(tmp_path):
    with pytest.raises(serve.ServeError, match=r"without a config\.json"):
        plan(environment={"MODEL": str(tmp_path)})


def test_too_few_cores():
    with pytest.raises(serve.ServeError, match="at least 4 cores"):
        plan("--tensor-parallel-size", "4")


def test_a_library_that_the_system_lacks_is_told(monkeypatch):
    monkeypatch.setattr(serve, "LIBNUMA", "libnuma.so.0")
    with pytest.raises(serve.ServeError, match=r"libnuma\.so\.0 is missing.*apt install libnuma1"):
        plan()


def test_port_in_use_is_told_at_once():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        environment = {**os.environ, "MODEL": "owner/name", "PORT": str(port), "PYTHONPATH": str(ROOT / "scripts")}
        result = subprocess.run(
            [sys.executable, "-m", "elastic_tools.serve"], env=environment, capture_output=True, text=True
        )
    assert result.returncode == 1
    assert result.stderr == f"serve: port {port} on 127.0.0.1 is in use; stop what uses it or say PORT=another.\n"
