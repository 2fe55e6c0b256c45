import pytest
from support.servers import SUPPORT, engine_environment, serving

KEY = "a-test-key"


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server for all tests here: elastic, with an API key, asynchronous scheduling on."""
    log = tmp_path_factory.mktemp("server") / "log"
    # Development mode has the routes that pause generation.
    environment = engine_environment() | {"PYTHONPATH": str(SUPPORT), "VLLM_SERVER_DEV_MODE": "1"}
    arguments = ["--elastic-kv-config", '{"start": "128MiB", "capacity": "512MiB"}', "--async-scheduling"]
    with serving(log, *arguments, key=KEY, environment=environment) as server:
        yield server


@pytest.fixture(autouse=True)
def full_size(request):
    """Every test begins at capacity, idle."""
    server = request.getfixturevalue("server")
    answer = server.resize(fraction=1)
    assert answer["outcome"] == "done", answer
