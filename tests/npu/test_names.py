"""Names of torch-npu, Mooncake and vLLM-Ascend, and of their settings, against what lies inside the wheels for an NPU.

The wheels are read, not imported: they import only where CANN is. `nox -s tests` downloads them (without dependencies)
to `.nox/wheels`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.npu.edge import CHECKS, Edge

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / ".nox" / "wheels"
OURS = ROOT / "packages/connector/src/kvpool_connector"
TORCH_NPU = ("2.9.1", "2.14.0")
"""The oldest and the newest that are supported."""
VLLM_ASCEND = ("0.14.0rc1", "0.23.0")
SHARED_ENGINE = "vllm_ascend/distributed/kv_transfer/utils/mooncake_transfer_engine.py"
MOONCAKE = "0.3.13.post1"
OBJECTS = {"_event": "Event", "_stream": "Stream"}
"""What our attributes hold, by the class of torch.npu."""
SIGNATURE = re.compile(rb"\(\{[^\0]{0,400}\) -> [^\0]{1,80}\0")
"""How pybind11 keeps the types of a call."""
SETTING = re.compile(r"\b(?:MC|ASCEND)_[A-Z0-9_]+\b")


def wheel(name: str) -> zipfile.ZipFile:
    """A wheel by the beginning of its file name."""
    found = list(WHEELS.glob(f"{name}-*.whl"))
    assert found, f"no wheel of {name} in {WHEELS}; `nox -s tests` downloads it"
    return zipfile.ZipFile(found[0])


@cache
def npu_sources(version: str) -> dict[str, ast.Module]:
    """The files of `torch_npu.npu` of a version, parsed."""
    with wheel(f"torch_npu-{version}") as found:
        paths = [path for path in found.namelist() if re.fullmatch(r"torch_npu/npu/\w+\.py", path)]
        return {Path(path).stem: ast.parse(found.read(path)) for path in paths}


@cache
def operators(version: str) -> set[str]:
    """Operators that a version has a kernel of its own for."""
    with wheel(f"torch_npu-{version}") as found:
        paths = [path for path in found.namelist() if re.fullmatch(r"torch_npu/csrc/aten/\w+\.yaml", path)]
        text = "\n".join(found.read(path).decode() for path in paths)
    return set(re.findall(r"^\s*- (?:func: )?([\w.]+)", text, re.MULTILINE))


def definition(version: str, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """What `torch.npu.NAME` is: exported by the package, and defined in one of its files."""
    sources = npu_sources(version)
    exported = {
        constant.value
        for node in ast.walk(sources["__init__"])
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets)
        for constant in ast.walk(node.value)
        if isinstance(constant, ast.Constant)
    }
    if name not in exported:
        return None
    for module in sources.values():
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
    return None


def fits(call: ast.Call, function: ast.FunctionDef, skip: int) -> bool:
    """Whether a call's arguments can be bound; `skip` leading ones (self, cls) are not written."""
    given = function.args
    kinds = inspect.Parameter
    defaults = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    parameters = [
        kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=kinds.empty if d is None else d)
        for a, d in list(zip(given.args, defaults, strict=True))[skip:]
    ]
    parameters += [kinds(a.arg, kinds.KEYWORD_ONLY) for a in given.kwonlyargs]
    try:
        inspect.Signature(parameters).bind(*call.args, **{word.arg: word.value for word in call.keywords if word.arg})
    except TypeError:
        return False
    return True


def misfits(version: str, source: str) -> Iterator[str]:
    """What `ascend.py` uses of torch.npu and a version does not have, or has otherwise."""
    for node in ast.walk(ast.parse(source)):
        ours = isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "npu"
        if ours and definition(version, node.attr) is None:
            yield f"torch.npu.{node.attr} is not there"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = node.func.value, node.func.attr
        if getattr(owner, "id", "") == "npu":
            found = definition(version, name)
            if isinstance(found, ast.ClassDef):
                found, skip = method(version, found.name, "__new__"), 1
            else:
                skip = 0
            if isinstance(found, ast.FunctionDef) and not fits(node, found, skip):
                yield f"torch.npu.{name} has other arguments"
        elif isinstance(owner, ast.Attribute) and owner.attr in OBJECTS:
            found = method(version, OBJECTS[owner.attr], name)
            if found is None:
                yield f"torch.npu.{OBJECTS[owner.attr]}.{name} is not there"
            elif not fits(node, found, 1):
                yield f"torch.npu.{OBJECTS[owner.attr]}.{name} has other arguments"


def method(version: str, class_name: str, name: str) -> ast.FunctionDef | None:
    """A method that a class of torch.npu defines itself."""
    found = definition(version, class_name)
    for node in found.body if isinstance(found, ast.ClassDef) else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return None


@cache
def binaries(name: str = f"mooncake_transfer_engine_npu-{MOONCAKE}") -> dict[str, bytes]:
    """The extension modules and libraries inside Mooncake's wheel for an NPU."""
    with wheel(name) as found:
        paths = [path for path in found.namelist() if re.fullmatch(r"mooncake/[\w.-]+\.so", path)]
        return {Path(path).name: found.read(path) for path in paths}


def has(name: str, *files: str) -> bool:
    """Whether a text stands in one of Mooncake's files; a linker keeps a text within the end of a longer one."""
    return any(name.encode() + b"\0" in binaries()[file] for file in files or binaries())


def names_of(source: str, *owners: str) -> set[str]:
    """Attributes that are called, read or set on these names or on what these methods return."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value
            if isinstance(owner, ast.Call):
                owner = owner.func
            if getattr(owner, "id", getattr(owner, "attr", "")) in owners:
                found.add(node.attr)
    return found


@pytest.mark.parametrize("version", TORCH_NPU)
def test_what_the_edge_uses_of_torch_npu_is_there(version: str) -> None:
    source = (OURS / "ascend.py").read_text(encoding="utf-8")
    assert {"Event", "Stream", "stream", "set_device"} <= names_of(source, "npu")
    assert list(misfits(version, source)) == []


@pytest.mark.parametrize("version", TORCH_NPU)
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("npu.set_device(", "npu.select_device(", "torch.npu.select_device is not there"),
        ("self._event.query()", "self._event.done()", "torch.npu.Event.done is not there"),
        ("self._event.record()", "self._event.record(1, 2)", "torch.npu.Event.record has other arguments"),
        ("npu.Event()", "npu.Event(timing=True)", "torch.npu.Event has other arguments"),
        (
            "npu.device_count()",
            "npu.device_count(0)",
            "torch.npu.device_count has other arguments",
        ),
    ],
)
def test_a_wrong_name_or_argument_is_found(version: str, old: str, new: str, told: str) -> None:
    source = (OURS / "ascend.py").read_text(encoding="utf-8")
    assert old in source
    assert told in set(misfits(version, source.replace(old, new)))


@pytest.mark.parametrize("version", TORCH_NPU)
def test_torch_has_the_module_under_its_name(version: str) -> None:
    with wheel(f"torch_npu-{version}") as found:
        sources = [found.read(path) for path in found.namelist() if path.endswith(".py")]
    assert any(re.search(rb"_register_device_module\(['\"]npu['\"], torch_npu\.npu\)", source) for source in sources)


@pytest.mark.parametrize("version", TORCH_NPU)
def test_every_operator_has_a_kernel(version: str) -> None:
    """Of all operators that the edge's checks run: torch-npu's own kernel, or torch's for every device."""
    ran: set[str] = set()
    for check in CHECKS.values():
        edge = Edge()
        check(edge)
        ran |= edge.machine.operators
    assert {"aten::index_select", "aten::index_copy_", "aten::copy_"} <= ran
    assert no_kernel(version, ran) == set()
    assert no_kernel(version, ran | {"aten::index_from_nowhere"}) == {"aten::index_from_nowhere"}


@pytest.mark.parametrize("version", TORCH_NPU)
def test_host_memory_can_be_pinned(version: str) -> None:
    """Copies that wait for nobody are from and to such memory alone."""
    assert (OURS / "ascend.py").read_text(encoding="utf-8").count("pin_memory=True") == 2
    assert {"_pin_memory", "is_pinned", "copy_"} <= operators(version)


def no_kernel(version: str, names: set[str]) -> set[str]:
    """Those that would not run on an NPU."""
    shared = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name
        for name in names
        if name.removeprefix("aten::") not in operators(version)
        and not (name in KNOWN and shared(name, "CompositeExplicitAutograd"))
    }


KNOWN = {"aten::detach", "aten::slice.Tensor", "aten::view.dtype"}
"""Views that torch itself makes on any device."""


def test_what_the_store_uses_of_mooncake_is_there() -> None:
    source = (OURS / "mooncake.py").read_text(encoding="utf-8")
    used = names_of(source, "client", "_open") | names_of(source, "module", "_placement", "_pinned")
    assert {"setup", "register_buffer", "batch_get_into_multi_buffers", "MooncakeDistributedStore"} <= used
    assert {"prefer_alloc_in_same_node", "with_hard_pin"} <= used
    assert {name for name in used if not has(name, "store.so")} == set()
    keywords = {"engine", "tenant_id", "rdma_devices", "master_server_addr", "local_hostname", "local_buffer_size"}
    assert {name for name in keywords if not has(name, "store.so")} == set()
    of_engine = names_of(source, "engine")
    assert of_engine == {"get_rpc_port", "get_engine"}
    assert {name for name in of_engine if not has(name, "engine.so")} == set()
    assert not has("batch_put_from_nowhere")


def test_calls_have_the_arguments_that_the_tests_run_with() -> None:
    """The tests run on the wheel for hosts without devices; the one for an NPU has the very same signatures."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None and found.submodule_search_locations
    (path,) = Path(found.submodule_search_locations[0]).glob("store*.so")
    ours = set(SIGNATURE.findall(path.read_bytes()))
    assert len(ours) > 50
    assert set(SIGNATURE.findall(binaries()["store.so"])) == ours


def test_settings_in_the_environment_are_read_by_somebody() -> None:
    """Of Mooncake in its wheel; the visible devices are CANN's, and torch-npu's source names them."""
    texts = [path.read_text(encoding="utf-8") for path in OURS.rglob("*.py")]
    texts += [(ROOT / "docs" / "npu.md").read_text(encoding="utf-8")]
    used = {name for text in texts for name in SETTING.findall(text)}
    assert {"ASCEND_ENABLE_USE_FABRIC_MEM", "MC_RPC_TIMEOUT_MS"} <= used
    assert {name for name in used if not has(name)} == {"ASCEND_RT_VISIBLE_DEVICES"}
    for version in TORCH_NPU:
        with wheel(f"torch_npu-{version}") as found:
            assert b"ASCEND_RT_VISIBLE_DEVICES" in found.read("torch_npu/npu/__init__.py")


@pytest.mark.parametrize("version", VLLM_ASCEND)
def test_the_shared_engine_is_where_and_as_we_take_it(version: str) -> None:
    path = SHARED_ENGINE.removesuffix(".py").replace("/", ".")
    assert f"from {path} import global_te" in (OURS / "vllm.py").read_text(encoding="utf-8")
    with wheel(f"vllm_ascend-{version}") as found:
        module = ast.parse(found.read(SHARED_ENGINE))
    assigned = {
        ast.unparse(target): ast.unparse(node.value)
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    }
    assert assigned["global_te"] == "GlobalTE()"
    (made,) = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "GlobalTE"]
    theirs = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef)}
    source = (OURS / "mooncake.py").read_text(encoding="utf-8")
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self._engine.")
    ]
    assert {ast.unparse(call.func) for call in calls} == {
        "self._engine.get_transfer_engine",
        "self._engine.register_buffer",
    }
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        assert fits(call, theirs[call.func.attr], 1), ast.unparse(call)
        call.keywords.append(ast.keyword("no_such_argument", ast.Constant(1)))
        assert not fits(call, theirs[call.func.attr], 1)


@pytest.mark.parametrize("version", VLLM_ASCEND)
def test_vllm_ascend_sets_the_store_up_with_the_same_names(version: str) -> None:
    """Their call gives the arguments by name (0.23) or in the order of ours (0.14)."""
    with wheel(f"vllm_ascend-{version}") as found:
        module = ast.parse(
            found.read("vllm_ascend/distributed/kv_transfer/kv_pool/ascend_store/backend/mooncake_backend.py")
        )
    (ours,) = [set_up_arguments(call) for call in setups(ast.parse((OURS / "mooncake.py").read_text("utf-8")))]
    names = ["metadata_server", "global_segment_size", "local_buffer_size", "protocol"]
    assert ours[1:7] == [*names, "device_name", "master_server_address"]
    theirs = [set_up_arguments(call) for call in setups(module)]
    assert len(theirs) == (1 if version.startswith("0.14") else 2), "fabric memory came after 0.14"
    for found_names in theirs:
        assert found_names[1:7] in (ours[1:7], [*names, "rdma_devices", "master_server_addr"])


def setups(module: ast.Module) -> list[ast.Call]:
    """Calls of a store's `setup`."""
    return [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setup"
    ]


def set_up_arguments(call: ast.Call) -> list[str]:
    """Names of the arguments by place: a keyword, or the last name of what is given."""
    return [ast.unparse(argument).rsplit(".", 1)[-1] for argument in call.args] + [
        word.arg for word in call.keywords if word.arg
    ]


def test_mooncake_knows_the_protocol_and_fabric_memory() -> None:
    assert "ascend_transport.so" in binaries()
    assert has("ASCEND_ENABLE_USE_FABRIC_MEM", "libmooncake_store.so")
    assert has("P2PHANDSHAKE")


def test_nothing_in_mooncake_reads_the_limit_on_locked_memory() -> None:
    """So the connector only warns of it: what the driver locks is decided in CANN."""
    assert has("aclrtMallocHost", "ascend_transport.so")
    assert not [name for name, value in binaries().items() if b"memlock" in value.lower() or b"\0mlock\0" in value]
