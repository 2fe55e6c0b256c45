"""The contract that every page driver keeps."""

import ast
import json
import threading
from pathlib import Path

import pytest
import torch
from vllm.v1 import elastic_kv
from vllm.v1.elastic_kv.host_driver import HostPageDriver
from vllm.v1.elastic_kv.page_driver import OutOfMemoryError, PageDriver, PageDriverError, make_driver

from .drivers import in_host_memory, mapping_flags, mappings, resident_bytes

GRANULES = 4  # in the handles of most tests
COUNT = 8  # handles that fit the reservation of most tests


@pytest.fixture
def size(driver):
    return driver.granule * GRANULES


@pytest.fixture
def space(driver, size):
    address = driver.reserve(size * COUNT)
    yield address
    driver.unreserve(address, size * COUNT)


def drop(driver: PageDriver, *handles: int) -> None:
    driver.synchronize()
    for handle in handles:
        driver.unmap(handle)
        driver.release(handle)


def test_it_names_itself(driver):
    assert driver.name
    assert driver.device
    assert driver.granule > 0
    assert driver.granule & (driver.granule - 1) == 0
    assert driver.max_mappings is None or driver.max_mappings > 1000
    assert 0 < driver.available_bytes() <= driver.total_bytes()


def test_a_reservation_holds_no_memory(driver, space, size):
    assert driver.reported_bytes(space, size * COUNT) == 0


def test_reservations_do_not_overlap(driver, size):
    first, second = driver.reserve(size), driver.reserve(size)
    assert abs(first - second) >= size
    driver.unreserve(first, size)
    driver.unreserve(second, size)


def test_new_pages_read_as_zero_and_keep_what_is_written(driver, space, size):
    handle = driver.create(size)
    driver.map(space, handle)
    pages = driver.tensor(space, size)
    assert not pages.any()
    pages.fill_(7)
    assert (driver.tensor(space, size) == 7).all()
    drop(driver, handle)


def test_recycled_pages_read_as_zero(driver, space, size):
    """Old bytes could be NaN and would spread through a masked product (vLLM #35219)."""
    for _ in range(20):
        handle = driver.create(size)
        driver.map(space, handle)
        pages = driver.tensor(space, size)
        assert not pages.any()
        pages.fill_(-1)
        drop(driver, handle)


def test_data_moves_with_the_pages(driver, space, size):
    handle = driver.create(size)
    driver.map(space, handle)
    written = torch.arange(size, dtype=torch.int64).to(torch.int8)
    driver.tensor(space, size).copy_(written)
    for place in (3, 7, 1, 0):
        driver.synchronize()
        driver.unmap(handle)
        driver.map(space + place * size, handle)
        assert torch.equal(driver.tensor(space + place * size, size).cpu(), written)
    drop(driver, handle)


def test_a_tensor_sees_later_maps(driver, space, size):
    whole = driver.tensor(space, size * COUNT)
    assert whole.dtype == torch.int8
    assert whole.shape == (size * COUNT,)
    assert whole.data_ptr() == space
    handles = [driver.create(size) for _ in range(2)]
    driver.map(space + 2 * size, handles[0])
    whole[2 * size : 3 * size] = 5
    driver.map(space + 5 * size, handles[1])
    whole[5 * size : 6 * size] = 6
    driver.synchronize()
    driver.unmap(handles[0])
    driver.map(space + 6 * size, handles[0])
    assert (whole[5 * size : 6 * size] == 6).all()
    assert (whole[6 * size : 7 * size] == 5).all()
    drop(driver, *handles)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8], ids=str
)
def test_the_bytes_are_of_any_type(driver, space, size, dtype):
    """A cache is a view of the bytes, as its layers have it."""
    handle = driver.create(size)
    driver.map(space, handle)
    view = driver.tensor(space, size)[driver.granule :].view(dtype)
    assert view.data_ptr() == space + driver.granule
    assert view.nbytes == size - driver.granule
    view.fill_(2.0)
    assert (view.float() == 2.0).all()
    assert not driver.tensor(space, size)[: driver.granule].any()
    drop(driver, handle)


def test_neighbours_are_independent(driver, space, size):
    handles = [driver.create(size) for _ in range(COUNT)]
    for place, handle in enumerate(handles):
        driver.map(space + place * size, handle)
        driver.tensor(space + place * size, size).fill_(place + 1)
    drop(driver, *handles[1::2])
    for place in range(0, COUNT, 2):
        assert (driver.tensor(space + place * size, size) == place + 1).all()
    drop(driver, *handles[::2])


def test_handles_of_different_sizes(driver, space, size):
    small, large = driver.create(driver.granule), driver.create(size + driver.granule)
    driver.map(space + size, large)
    driver.map(space + size - driver.granule, small)
    assert driver.reported_bytes(space, size * COUNT) == size + 2 * driver.granule
    drop(driver, small, large)


def test_reported_bytes_follow_the_pages(driver, space, size):
    whole = size * COUNT
    handles = [driver.create(size) for _ in range(3)]
    assert driver.reported_bytes(space, whole) == 0
    for count, handle in enumerate(handles):
        driver.map(space + 2 * count * size, handle)
        assert driver.reported_bytes(space, whole) == (count + 1) * size
    assert driver.reported_bytes(space, size) == size
    assert driver.reported_bytes(space + size, size) == 0
    driver.unmap(handles[0])
    assert driver.reported_bytes(space, whole) == 2 * size
    driver.release(handles[0])
    drop(driver, *handles[1:])
    assert driver.reported_bytes(space, whole) == 0


def test_memory_comes_with_create_and_goes_with_release(driver, space):
    def used() -> int:
        return resident_bytes() if driver.device == "host" else driver.total_bytes() - driver.available_bytes()

    size = 16 << 20
    before = used()
    handle = driver.create(size)
    assert used() - before >= size * 0.9
    driver.release(handle)
    assert used() - before < size * 0.2


class TestMisuse:
    """It raises ValueError and changes nothing."""

    @pytest.fixture(autouse=True)
    def _unchanged(self, driver, space, size):
        """Two handles, one of them mapped, are the same after the test as before it."""
        self.mapped, self.unmapped = driver.create(size), driver.create(size)
        driver.map(space + size, self.mapped)
        pages = driver.tensor(space + size, size)
        pages.fill_(9)
        before = mappings(space, size * COUNT)
        yield
        assert (pages == 9).all()
        assert driver.reported_bytes(space, size * COUNT) == size
        assert mappings(space, size * COUNT) == before
        driver.map(space, self.unmapped)
        drop(driver, self.mapped, self.unmapped)

    @pytest.mark.parametrize("nbytes", [0, -4096, 1, 4097, 3 << 20 | 1])
    def test_sizes(self, driver, nbytes):
        with pytest.raises(ValueError, match=str(nbytes)):
            driver.create(nbytes)
        with pytest.raises(ValueError, match=str(nbytes)):
            driver.reserve(nbytes)

    def test_unknown_handles(self, driver, space):
        for call in (driver.release, driver.unmap, lambda handle: driver.map(space, handle)):
            with pytest.raises(ValueError, match="987654"):
                call(987654)

    def test_release_while_mapped(self, driver):
        with pytest.raises(ValueError, match="mapped"):
            driver.release(self.mapped)

    def test_release_twice(self, driver, size):
        handle = driver.create(size)
        driver.release(handle)
        with pytest.raises(ValueError, match=str(handle)):
            driver.release(handle)

    def test_unmap_what_is_not_mapped(self, driver):
        with pytest.raises(ValueError, match="not mapped"):
            driver.unmap(self.unmapped)

    def test_map_twice(self, driver, space, size):
        with pytest.raises(ValueError, match="already mapped"):
            driver.map(space + 4 * size, self.mapped)

    def test_map_over_other_pages(self, driver, space, size):
        for address in (space + size, space + driver.granule, space + 2 * size - driver.granule):
            with pytest.raises(ValueError, match="have pages already"):
                driver.map(address, self.unmapped)

    def test_map_outside_a_reservation(self, driver, space, size):
        for address in (space - driver.granule, space + size * COUNT - driver.granule, 1 << 30):
            with pytest.raises(ValueError, match="not reserved"):
                driver.map(address, self.unmapped)

    def test_map_between_granules(self, driver, space, size):
        with pytest.raises(ValueError, match="granule"):
            driver.map(space + 3 * size + 1, self.unmapped)

    def test_unreserve(self, driver, space, size):
        with pytest.raises(ValueError, match="still has pages"):
            driver.unreserve(space, size * COUNT)
        for address, nbytes in ((space, size), (space + size, size), (space + size, size * COUNT), (1 << 30, size)):
            with pytest.raises(ValueError, match="not a reservation"):
                driver.unreserve(address, nbytes)


def test_500_cycles_leak_nothing(driver, space, size):
    def cycle() -> None:
        handles = [driver.create(size) for _ in range(COUNT)]
        for place, handle in enumerate(handles):
            driver.map(space + place * size, handle)
        drop(driver, *handles)

    cycle()
    mappings_before, resident_before = len(mappings()), resident_bytes()
    for _ in range(500):
        cycle()
    assert len(mappings()) <= mappings_before + 4  # the interpreter may have mapped an arena of its own
    assert resident_bytes() <= resident_before + (4 << 20)  # 500 cycles moved 62 MiB on the smallest granule
    assert driver.reported_bytes(space, size * COUNT) == 0


def test_a_reservation_is_whole_again_after_unmap(driver, space, size):
    """Holes merge with what is around them, or the process would run out of mappings."""
    if not in_host_memory(driver):
        pytest.skip("a device's mappings are not the process's")
    (before,) = mappings(space, size * COUNT)
    handles = [driver.create(size) for _ in range(COUNT)]
    for place, handle in enumerate(handles):
        driver.map(space + place * size, handle)
    for handle in handles[1::2] + handles[::2]:
        driver.unmap(handle)
    (after,) = mappings(space, size * COUNT)
    assert after[2] == before[2] == "---p"
    for handle in handles:
        driver.release(handle)


@pytest.mark.parametrize(
    ("call", "limit"), [("create", "RLIMIT_DATA"), ("create", "RLIMIT_AS"), ("reserve", "RLIMIT_AS")]
)
def test_out_of_memory_tells_what_was_asked(python_without_vllm, call, limit):
    size = 64 << 20
    result = python_without_vllm(f"""
import resource
from elastic_kv.host_driver import HostPageDriver
from elastic_kv.page_driver import OutOfMemoryError
driver = HostPageDriver()
space = driver.reserve({size})
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
used = int(status["VmData" if {limit!r} == "RLIMIT_DATA" else "VmSize"].split()[0]) << 10
old = resource.getrlimit(resource.{limit})
resource.setrlimit(resource.{limit}, (used + {size // 2}, old[1]))
try:
    driver.{call}({size})
except OutOfMemoryError as error:
    print(error.call, error.code, error.nbytes, error.device, str(error), sep="|")
resource.setrlimit(resource.{limit}, old)
handle = driver.create({size})  # a later call succeeds
driver.map(space, handle)
assert driver.reported_bytes(space, {size}) == {size}
""")
    assert result.returncode == 0, result.stderr
    name, code, nbytes, device, text = result.stdout.strip().split("|")
    assert (name, code, int(nbytes), device) == ("mmap", "ENOMEM", size, "host")
    assert all(part in text for part in (name, code, nbytes, device))


@pytest.mark.parametrize(
    "prepare",
    [
        "pass",
        "handle = driver.create(size); driver.map(space, handle); driver.unmap(handle)",
        "handle = driver.create(size); driver.map(space + size, handle)",
    ],
    ids=["reserved", "unmapped", "beside pages"],
)
@pytest.mark.parametrize("access", ["ctypes.string_at(space, 1)", "ctypes.memset(space, 1, 1)"], ids=["read", "write"])
def test_touching_addresses_without_pages_ends_the_process(python_without_vllm, prepare, access):
    result = python_without_vllm(f"""
import ctypes
from elastic_kv.host_driver import HostPageDriver
driver = HostPageDriver()
size = 1 << 20
space = driver.reserve(2 * size)
{prepare}
print("before", flush=True)
{access}
print("after", flush=True)
""")
    assert result.returncode == -11, result.stderr
    assert result.stdout.split() == ["before"]


def test_the_memory_modules_need_no_vllm_and_load_no_cuda(python_without_vllm):
    """Every module is tried, in a process that has nothing yet. Those that want vLLM or torch end there."""
    result = python_without_vllm("""
import importlib, json, pkgutil
import elastic_kv
sys.modules["torch"] = None  # it loads the bindings itself
imported = []
for module in pkgutil.iter_modules(elastic_kv.__path__):
    try:
        importlib.import_module(f"elastic_kv.{module.name}")
        imported.append(module.name)
    except ModuleNotFoundError as error:
        assert error.name.split(".")[0] in ("vllm", "torch"), error
loaded = {name.split(".")[0] for name in sys.modules}
print(json.dumps([imported, sorted(loaded & {"cuda", "pynvml"})]))
""")
    assert result.returncode == 0, result.stderr
    imported, loaded = json.loads(result.stdout)
    assert {"page_driver", "host_driver", "cuda_driver", "cuda_calls", "arena", "layout", "call_costs"} <= set(imported)
    assert not loaded


def test_no_module_imports_cuda_as_it_is_imported():
    """What vLLM and torch import beside ours, they import without us as well. So this looks at the sources."""

    def imports(node: ast.AST):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (name.name for name in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield child.module
            elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from imports(child)

    folder = Path(elastic_kv.__path__[0])
    sources = [*folder.rglob("*.py"), folder.parents[1] / "config" / "elastic_kv.py"]
    assert len(sources) > 40
    for source in sources:
        names = {name.split(".")[0] for name in imports(ast.parse(source.read_text()))}
        assert not names & {"cuda", "pynvml"}, source


@pytest.mark.parametrize("name", ["auto", "host"])
def test_the_driver_of_a_cpu(name):
    assert make_driver(name, "cpu").name == "host"


@pytest.mark.parametrize(("name", "device"), [("host", "cuda"), ("auto", "xpu"), ("nonsense", "cpu"), ("cuda", "cpu")])
def test_a_driver_for_another_device_is_refused(name, device):
    with pytest.raises(ValueError, match="no page driver"):
        make_driver(name, device)


class TestUnmapThatFails:
    """Host only: the pages are as they were."""

    @pytest.mark.parametrize("granules", [4, 1024])
    @pytest.mark.parametrize(
        "broken",
        [
            ["mremap"],
            ["mmap"],
            ["mremap: no memory", "mprotect"],
            ["mremap: no memory", "mremap: no memory"],
            ["mremap: no memory", "mmap"],
        ],
        ids=" ".join,
    )
    def test_each_call_in_turn(self, monkeypatch, broken, granules):
        driver = HostPageDriver()
        size = granules * driver.granule
        space = driver.reserve(size)
        handle = driver.create(size)
        driver.map(space, handle)
        pages = driver.tensor(space, size)
        pages.fill_(7)
        to_fail = list(broken)

        def breaking(real):
            def call(what, nbytes, *arguments):
                covers = what != "mmap" or arguments[0] is not None  # and does not only look for room
                if to_fail and what == to_fail[0].split(":")[0] and covers:
                    kind = OutOfMemoryError if "no memory" in to_fail.pop(0) else PageDriverError
                    raise kind(what, "made to fail", nbytes, "host")
                return real(what, nbytes, *arguments)

            return call

        monkeypatch.setattr(driver, "_status", breaking(driver._status))
        monkeypatch.setattr(driver, "_address", breaking(driver._address))
        with pytest.raises(PageDriverError, match=broken[-1].split(":")[0]):
            driver.unmap(handle)
        assert not to_fail
        assert (pages == 7).all()
        pages.fill_(8)  # still writable
        assert driver.reported_bytes(space, size) == size
        driver.unmap(handle)
        assert driver.reported_bytes(space, size) == 0
        driver.release(handle)
        driver.unreserve(space, size)

    @pytest.mark.parametrize("size", [1 << 20, 64 << 20])
    def test_a_limit_on_data_does_not_make_it_fail(self, python_without_vllm, size):
        """The move wants room for the pages twice, if only for a moment."""
        result = python_without_vllm(f"""
import ctypes, resource
from elastic_kv.host_driver import HostPageDriver
driver = HostPageDriver()
space = driver.reserve({size})
handle = driver.create({size})
driver.map(space, handle)
ctypes.memset(space, 7, {size})
used = int(dict(line.split(":", 1) for line in open("/proc/self/status"))["VmData"].split()[0]) << 10
old = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (used + {size // 2}, old[1]))
driver.unmap(handle)
resource.setrlimit(resource.RLIMIT_DATA, old)
rest = driver.split(handle, {size // 2})
driver.map(space, rest)
driver.map(space + {size // 2}, handle)
assert ctypes.string_at(space, {size}) == b"\\7" * {size}
ctypes.memset(space, 8, {size})
""")
        assert result.returncode == 0, result.stderr


class TestSplit:
    @pytest.fixture(autouse=True)
    def _divisible(self, driver):
        if not driver.divisible:
            pytest.skip("the driver's handles cannot be cut")

    @pytest.mark.parametrize("when", ["mapped", "new", "unmapped"])
    def test_both_parts_keep_their_pages(self, driver, space, size, when):
        whole = driver.create(size)
        driver.map(space, whole)
        driver.tensor(space, size)[:] = torch.arange(size, dtype=torch.int64).to(torch.int8)
        expected = driver.tensor(space, size).clone()
        if when == "unmapped":
            driver.unmap(whole)
        elif when == "new":
            drop(driver, whole)
            whole = driver.create(size)
            expected.zero_()
        rest = driver.split(whole, driver.granule)
        assert rest != whole
        if when == "mapped":
            assert torch.equal(driver.tensor(space, size), expected)
            driver.unmap(whole)
            driver.unmap(rest)
        driver.map(space + size, whole)
        driver.map(space + 3 * size, rest)
        assert torch.equal(driver.tensor(space + size, driver.granule), expected[: driver.granule])
        left = size - driver.granule
        assert torch.equal(driver.tensor(space + 3 * size, left), expected[driver.granule :])
        assert driver.reported_bytes(space, size * COUNT) == size
        drop(driver, whole, rest)

    def test_a_part_can_go_while_the_other_stays(self, driver, space):
        size = 64 * driver.granule
        space = driver.reserve(size)
        whole = driver.create(size, space)
        driver.map(space, whole)
        driver.tensor(space, size).fill_(7)
        middle = driver.split(whole, size // 4)
        end = driver.split(middle, size // 2)
        drop(driver, middle)
        assert driver.reported_bytes(space, size) == size // 2
        assert (driver.tensor(space, size // 4) == 7).all()
        assert (driver.tensor(space + 3 * size // 4, size // 4) == 7).all()
        new = driver.create(size // 2)
        driver.map(space + size // 4, new)
        assert not driver.tensor(space + size // 4, size // 2).any()
        drop(driver, whole, end, new)
        driver.unreserve(space, size)

    def test_misuse(self, driver, space, size):
        whole = driver.create(size)
        for nbytes in (0, 1, -driver.granule, size, size + driver.granule, driver.granule + 1):
            with pytest.raises(ValueError, match=str(nbytes)):
                driver.split(whole, nbytes)
        with pytest.raises(ValueError, match="987654"):
            driver.split(987654, driver.granule)
        driver.map(space, whole)
        rest = driver.split(whole, driver.granule)
        with pytest.raises(ValueError, match="still mapped"):
            driver.release(rest)
        other = driver.create(driver.granule)
        with pytest.raises(ValueError, match="have pages already"):
            driver.map(space + driver.granule, other)
        driver.release(other)
        with pytest.raises(ValueError, match="already mapped"):
            driver.map(space + size, rest)
        drop(driver, whole, rest)


def test_handles_that_cannot_be_cut_are_not(driver, size):
    if driver.divisible:
        pytest.skip("the driver's handles can be cut")
    handle = driver.create(size)
    with pytest.raises(ValueError, match="cut"):
        driver.split(handle, driver.granule)
    driver.release(handle)


def test_pages_can_be_made_and_given_back_beside_other_calls(driver, space, size):
    """Two threads; the sums are checked at the end, since a table that lost an entry would show there."""
    mapped, failures = [driver.create(size) for _ in range(COUNT)], []

    def make_and_give_back() -> None:
        try:
            for _ in range(300):
                driver.release(driver.create(size))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=make_and_give_back) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(100):
        for place, handle in enumerate(mapped):
            driver.map(space + (place + turn) % COUNT * size, handle)
        for handle in mapped:
            driver.unmap(handle)
    for thread in threads:
        thread.join()
    assert not failures
    assert driver.reported_bytes(space, size * COUNT) == 0
    for handle in mapped:
        driver.release(handle)


def test_no_huge_pages_so_that_parts_really_go(driver):
    """Host only. A huge page that is unmapped in part keeps all its memory, though it no longer counts as resident."""
    if driver.device != "host":
        pytest.skip("the device's pages are its own affair")
    size = 64 << 20
    space = driver.reserve(size)
    handle = driver.create(size, space)
    driver.map(space, handle)
    (flags,) = [flags for address, flags in mapping_flags() if address == space]
    assert "nh" in flags  # VM_NOHUGEPAGE, proc_pid_smaps(5)
    before = resident_bytes()
    if driver.divisible:
        odd = []
        for _ in range(1, 16):
            odd.append(handle)
            handle = driver.split(handle, 4 << 20)
        drop(driver, *odd[::2])
        assert before - resident_bytes() > 0.9 * size / 2
        drop(driver, *odd[1::2])
    drop(driver, handle)
    assert before - resident_bytes() > 0.9 * size
    driver.unreserve(space, size)
