"""`--elastic-kv-config`: what is taken, and what is refused in one clear sentence."""

import inspect
import json
import re
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from vllm.config.elastic_kv import ElasticKVConfig, parse_size
from vllm.v1.attention.backends.registry import AttentionBackendEnum

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (4096, 4096),
        (2**62 - 1, 2**62 - 1),
        (4096.0, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("512MiB", 512 * MIB),
        ("512mib", 512 * MIB),
        (" 512 MiB ", 512 * MIB),
        ("1KiB", 1024),
        ("1GiB", GIB),
        ("2TiB", 2 << 40),
        ("1.5GiB", 3 * GIB // 2),
        ("0.5KiB", 512),
        ("0.3GiB", 322122547),  # rounded down to whole bytes
        ("1.1MiB", 1153433),
        ("4611686018427387903", 2**62 - 1),  # more digits than a float can hold
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes(value, nbytes):
    assert parse_size(value) == nbytes
    assert type(parse_size(value)) is int
    assert ElasticKVConfig(capacity=value).size("capacity") == nbytes


BAD_SIZES = [
    0,
    -1,
    -(2**70),
    2**62,
    1.5,
    0.0,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e300,
    True,
    False,
    [],
    [1],
    {},
    {"bytes": 1},
    b"512MiB",
    "",
    " ",
    "0",
    "0GiB",
    "-1",
    "-1GiB",
    "+1",
    "nan",
    "inf",
    "GiB",
    "one",
    "1 2",
    "1GB",
    "1G",
    "1MiBs",
    "1e3",
    "0x10",
    "1,5GiB",
    "1.",
    ".5GiB",
    "1_000",
    "1GiB 1MiB",
    "१GiB",
    "4194304TiB",
    "1\x00",
    "0.0000001KiB",
]


def one_sentence(message: str) -> bool:
    return 0 < len(message) < 400 and "\n" not in message


@pytest.mark.parametrize("value", BAD_SIZES, ids=repr)
def test_what_is_no_size_is_refused_by_name(value):
    with pytest.raises(ValueError, match="is not a size: give bytes") as failure:
        parse_size(value)
    assert str(failure.value).startswith(repr(value))
    assert one_sentence(str(failure.value))
    for field in ("base", "start", "capacity"):
        with pytest.raises(ValidationError) as invalid:
            ElasticKVConfig(**{field: value})
        (item,) = invalid.value.errors()
        assert item["loc"] == (field,)
        assert repr(value) in item["msg"]


@pytest.mark.parametrize(
    "value",
    [10**5000, -(10**5000), "9" * 5000, "1" * 100 + "GiB", [10**5000], [1] * 5000, "x" * 10**6],
    ids=["int", "negative", "digits", "digits with unit", "int in a list", "list", "text"],
)
def test_what_is_too_long_is_refused_in_short(value):
    with pytest.raises(ValueError, match="is not a size: give bytes") as failure:
        parse_size(value)
    assert one_sentence(str(failure.value))


def test_defaults():
    config = ElasticKVConfig()
    assert (config.base, config.start, config.capacity) == (None, None, None)
    assert [config.size(name) for name in ("base", "start", "capacity")] == [None] * 3
    assert (config.policy, config.driver, config.admin_api) == ("static", "auto", None)


def test_from_json_as_the_command_line_does():
    config = TypeAdapter(ElasticKVConfig).validate_json(
        json.dumps({"base": "512MiB", "start": GIB, "capacity": "4GiB", "admin_api": True, "driver": "host"})
    )
    assert [config.size(name) for name in ("base", "start", "capacity")] == [512 * MIB, GIB, 4 * GIB]
    assert config.admin_api is True
    assert config.driver == "host"


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"base": "2GiB", "start": "1GiB"}, ("base", "start", str(2 * GIB), str(GIB))),
        ({"start": "2GiB", "capacity": "1GiB"}, ("start", "capacity", str(2 * GIB), str(GIB))),
        ({"base": "2GiB", "capacity": "1GiB"}, ("base", "capacity", str(2 * GIB), str(GIB))),
        ({"base": 3, "start": 2, "capacity": 9}, ("base", "start", "3", "2")),
    ],
)
def test_sizes_in_the_wrong_order(fields, names):
    with pytest.raises(ValueError, match="is larger than") as failure:
        ElasticKVConfig(**fields)
    assert all(name in str(failure.value) for name in names)


def test_equal_sizes_are_taken():
    assert ElasticKVConfig(base="1GiB", start=GIB, capacity="1024MiB").size("base") == GIB


@pytest.mark.parametrize(
    "fields",
    [
        {"capacty": "1GiB"},
        {"policy": "adaptive!"},
        {"policy": None},
        {"driver": "hip"},
        {"driver": 1},
        {"admin_api": "maybe"},
        {"admin_api": 7},
    ],
    ids=str,
)
def test_unknown_keys_and_values(fields):
    (name,) = fields
    with pytest.raises(ValidationError, match=name):
        ElasticKVConfig(**fields)
    with pytest.raises(ValidationError, match=name):
        TypeAdapter(ElasticKVConfig).validate_python(fields)


def engine_config(**changes):
    """The parts of a VllmConfig that are looked at; `changes` are paths such as `cache_config__block_size`."""
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cpu"),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None, num_gpu_blocks_override=None, kv_offloading_size=None),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            pipeline_parallel_size=1,
            tensor_parallel_size=2,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            enable_elastic_ep=False,
            distributed_executor_backend="mp",
        ),
        model_config=SimpleNamespace(
            enable_sleep_mode=False, enable_cumem_allocator=False, is_multimodal_model=False, runner_type="generate"
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None, backend_per_kind={}),
        kv_transfer_config=None,
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        assert hasattr(target, name)
        setattr(target, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_transfer_config": object()}, "--kv-transfer-config"),
        ({"cache_config__kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"model_config__enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"model_config__enable_cumem_allocator": True}, "--enable-cumem-allocator"),
        ({"cache_config__num_gpu_blocks_override": 100}, "--num-gpu-blocks-override"),
        ({"parallel_config__data_parallel_size": 2}, "--data-parallel-size 2"),
        ({"parallel_config__pipeline_parallel_size": 4}, "--pipeline-parallel-size 4"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({"parallel_config__enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"parallel_config__distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"attention_config__hisparse_config": object()}, "HiSparse"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_excludes_an_elastic_cache_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=f"elastic KV cache does not work with .*{message}") as failure:
        ElasticKVConfig().verify_and_update(engine_config(**changes))
    assert one_sentence(str(failure.value))


def test_ray_s_former_executor_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    config = engine_config(parallel_config__distributed_executor_backend="ray")
    with pytest.raises(ValueError, match="VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0, Ray's former executor"):
        ElasticKVConfig().verify_and_update(config)


@pytest.mark.parametrize(
    "backends",
    [
        {"attention_config__backend": AttentionBackendEnum.ELASTIC_TRITON},
        {"attention_config__backend_per_kind": {"full_attention": AttentionBackendEnum.ELASTIC_TRITON}},
    ],
)
def test_pooling_models_are_refused_on_the_backend_that_could_not_report_their_faults(backends):
    pooling = {"model_config__runner_type": "pooling"}
    with pytest.raises(ValueError, match="does not work with a pooling model on ELASTIC_TRITON") as failure:
        ElasticKVConfig().verify_and_update(engine_config(**pooling, **backends))
    assert one_sentence(str(failure.value))
    for taken in (pooling, backends, pooling | {"attention_config__backend": AttentionBackendEnum.CPU_ATTN}):
        ElasticKVConfig().verify_and_update(engine_config(**taken))


@pytest.mark.parametrize(("driver", "device"), [("cuda", "cpu"), ("host", "cuda"), ("auto", "xpu")])
def test_a_device_without_a_page_driver_is_refused_before_anything_is_loaded(driver, device):
    with pytest.raises(ValueError, match=f"no page driver .* for device type '{device}'") as failure:
        ElasticKVConfig(driver=driver).verify_and_update(engine_config(device_config__device_type=device))
    assert one_sentence(str(failure.value))


def test_an_amd_gpu_is_refused_before_anything_is_loaded(monkeypatch):
    """torch and vLLM call it 'cuda'."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="no page driver for ROCm") as failure:
        ElasticKVConfig().verify_and_update(engine_config(device_config__device_type="cuda"))
    assert one_sentence(str(failure.value))


def test_an_nvidia_gpu_is_served(monkeypatch):
    """Also with what torch's allocator can be told, since the cache is not its own."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    ElasticKVConfig().verify_and_update(engine_config(device_config__device_type="cuda"))


def test_the_names_exist_in_the_engine():
    """The stand-in above has the fields of the real configuration."""
    from vllm.config import AttentionConfig, CacheConfig, ModelConfig, ParallelConfig, VllmConfig

    parts = {
        "cache_config": CacheConfig,
        "parallel_config": ParallelConfig,
        "model_config": ModelConfig,
        "attention_config": AttentionConfig,
    }
    config = engine_config()
    for name, kind in parts.items():
        assigned = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(kind)))
        assert set(vars(getattr(config, name))) <= set(kind.__dataclass_fields__) | set(dir(kind)) | assigned
    assert set(vars(config)) <= set(VllmConfig.__dataclass_fields__)


def test_tensor_parallelism_is_served():
    config = engine_config()
    ElasticKVConfig().verify_and_update(config)
    assert config == engine_config()


def test_an_engine_without_a_model_is_served():
    ElasticKVConfig().verify_and_update(engine_config(model_config=None))


def test_start_becomes_the_size_that_the_engine_takes():
    config = engine_config()
    ElasticKVConfig(start="1GiB").verify_and_update(config)
    ElasticKVConfig(start="1GiB").verify_and_update(config)  # as workers do, which check again
    assert config.cache_config.kv_cache_memory_bytes == GIB


def test_two_sizes_to_start_with():
    config = engine_config(cache_config__kv_cache_memory_bytes=2 * GIB)
    with pytest.raises(ValueError, match=f"either .*{GIB}.*{2 * GIB}.*not both"):
        ElasticKVConfig(start="1GiB").verify_and_update(config)
    assert config.cache_config.kv_cache_memory_bytes == 2 * GIB
    ElasticKVConfig().verify_and_update(config)
    assert config.cache_config.kv_cache_memory_bytes == 2 * GIB


def test_the_real_configuration_refuses_offloading():
    """It adds its KV connector after this check has run, so the check looks at the setting itself."""
    from vllm.config import CacheConfig, VllmConfig

    with pytest.raises(ValidationError, match="--kv-offloading-size"):
        VllmConfig(cache_config=CacheConfig(kv_offloading_size=1.0), elastic_kv_config=ElasticKVConfig())


def test_the_real_configuration_without_it_is_upstreams():
    from vllm.config import CacheConfig, VllmConfig

    config = VllmConfig(cache_config=CacheConfig())
    assert config.elastic_kv_config is None
    assert config.cache_config.kv_cache_memory_bytes is None


LENDING = ["small-chunk", "reclaim", "adaptive"]


@pytest.mark.parametrize("policy", LENDING)
def test_policies_that_lend_the_prefill_reserve(policy):
    config = ElasticKVConfig(policy=policy)
    config.verify_and_update(engine_config())
    assert config.keeps_reserve
    assert not ElasticKVConfig().keeps_reserve


def test_always_lent_has_to_be_asked_for_twice():
    with pytest.raises(ValueError, match="'always-lent' ends the engine at the first large step"):
        ElasticKVConfig(policy="always-lent")
    assert ElasticKVConfig(policy="always-lent", unsafe_always_lent=True).keeps_reserve


@pytest.mark.parametrize(
    "fields", [{"small_chunk": 0}, {"lend_after_s": -1.0}, {"lend_after_s": float("nan")}], ids=str
)
def test_numbers_of_the_reserve(fields):
    with pytest.raises(ValueError, match="small_chunk has to be 1 at least, and lend_after_s 0 at least"):
        ElasticKVConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "changes", "words"),
    [
        ({"policy": "reclaim"}, {"scheduler_config__enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({"policy": "adaptive"}, {"model_config__is_multimodal_model": True}, "a multimodal model"),
        ({"policy": "small-chunk"}, {"model_config__runner_type": "pooling"}, "a pooling model"),
        ({"policy": "reclaim", "keep": "1GiB"}, {}, "keep, which"),
        ({"memory_budget": "1GiB", "policy": "on-demand"}, {}, "does not work with the policy on-demand"),
        ({"memory_budget": "1GiB"}, {"cache_config__kv_cache_memory_bytes": MIB}, "memory_budget and start, not"),
    ],
    ids=str,
)
def test_what_the_reserve_does_not_cover(fields, changes, words):
    with pytest.raises(ValueError, match=words) as failure:
        ElasticKVConfig(**fields).verify_and_update(engine_config(**changes))
    assert one_sentence(str(failure.value))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"start": "64MiB"},
        {"policy": "on-demand", "start": "64MiB"},
        {"memory_budget": "2GiB"},
        {"memory_budget": "2GiB", "capacity": "1GiB"},
        {"memory_budget": "2GiB", "start": "64MiB"},
        {"memory_budget": "2GiB", "policy": "adaptive"},
    ],
    ids=str,
)
def test_a_process_of_the_engine_verifies_again_what_was_verified(fields):
    config = engine_config()
    ElasticKVConfig(**fields).verify_and_update(config)
    first = config.cache_config.kv_cache_memory_bytes
    ElasticKVConfig(**fields).verify_and_update(config)
    assert config.cache_config.kv_cache_memory_bytes == first


def test_a_memory_budget_bounds_the_start():
    """What the cache starts with is known when the rest of the process is; until then no size of upstream's counts."""
    config = engine_config()
    ElasticKVConfig(memory_budget="2GiB", capacity="1GiB").verify_and_update(config)
    assert config.cache_config.kv_cache_memory_bytes == GIB
    config = engine_config()
    ElasticKVConfig(memory_budget="2GiB", start="64MiB").verify_and_update(config)
    assert config.cache_config.kv_cache_memory_bytes == 64 * MIB
