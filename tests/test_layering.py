"""Who may import whom, as docs/architecture.md says, checked against every import; what documents name is there."""

import ast
import graphlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.run import COMMANDS, EARLIER
from cohabit.planner import parts

ROOT = Path(__file__).parent.parent
LINKED = ("planner", "runtime", "server", "loadgen")
"""Packages beside `cohabit/`, which links to them."""
PACKAGES = (*LINKED, "page")
WORDS = {
    f"planner.{name}"
    for name in [
        "graph",
        "profile",
        "plan",
        "timeline",
        "check",
        "errors",
        "free_list",
        "lifetimes",
        "memory",
        "order",
        "cache_file",
        "parts",
        "shapes",
    ]
}
"""The planner's plain data, which needs nothing but msgspec."""
PREPARING = {f"planner.{name}" for name in ("sizing", "library")}
TRITON = {"tritonclient", "google"}
"""Protocol buffers: the messages of Triton's protocol and its model configuration."""

ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    # The longest prefix of a module's name that is in this table says what of ours and which third parties it imports.
    **{word: (WORDS, {"msgspec"}) for word in WORDS},
    "planner": ({"planner"}, {"msgspec", "numpy", "numba", "scipy"}),
    "planner.tiling": ({"planner.tiling", "planner.errors", "planner.parts"}, {"numpy", "scipy"}),
    "runtime": ({"runtime"} | WORDS, {"msgspec", "numpy", "torch", "pynvml"}),
    "runtime.lowering.encoding.int8_code": (set(), {"llvmlite"}),
    "runtime.lowering.rows": ({"runtime.lowering"}, {"sympy", "torch"}),
    "runtime.training": (
        {"runtime", "planner.search.registry"} | WORDS,
        {"msgspec", "numpy", "safetensors", "torch"},
    ),
    "runtime.training.planning": (
        {"runtime.errors", "runtime.training", "planner.problem", "planner.schedule", "planner.search"} | WORDS,
        {"msgspec"},
    ),
    "runtime.tiling": ({"runtime", "planner.tiling", "planner.errors", "planner.parts"}, {"numpy", "torch"}),
    "server": ({"server", "planner.errors", "planner.parts"}, {"msgspec", "rich", "uvloop"}),
    "server.process": ({"server", "planner.errors"}, {"msgspec", "numpy", "uvloop"}),
    "server.config": (
        {"server", "planner.errors", "planner.memory", "planner.parts", "planner.shapes"},
        {"msgspec"},
    ),
    "server.ipc": ({"server", "planner.errors", "planner.shapes"}, {"msgspec", "numpy"}),
    "server.protocol": ({"server", "planner.errors", "planner.shapes"}, {"msgspec", "numpy"}),
    "server.scheduling": ({"server", "planner.shapes"}, {"msgspec"}),
    "server.triton": ({"server", "planner.shapes"}, {"msgspec", "numpy"} | TRITON),
    "server.observe": ({"server", "planner.shapes"}, {"msgspec", "opentelemetry", "psutil", "pynvml"}),
    "server.frontend": (
        {"server", "planner.errors", "planner.free_list", "planner.shapes"},
        {"jinja2", "llguidance", "msgspec", "numpy", "tokenizers"},
    ),
    "server.http": ({"server", "page.html", "planner.errors"}, {"aiohttp", "msgspec"}),
    "server.grpc": (
        {"server", "planner.errors"},
        {"grpc", "grpc_health", "grpc_reflection", "msgspec", "numpy"} | TRITON,
    ),
    "server.engine": ({"server", "runtime", "planner.errors", "planner.shapes"}, {"msgspec", "numpy", "torch"}),
    "server.repository": ({"server", "runtime.lowering.archive_file"}, {"msgspec"}),
    "server.repository.cache": (
        {"server", "runtime.lowering", "runtime.pieces", "planner.cache_file", "planner.errors"},
        {"msgspec"},
    ),
    "server.deploy": ({"server", "runtime"} | WORDS | PREPARING, {"msgspec", "torch"}),
    "server.importing": (
        {"server", "runtime", "planner.errors", "planner.parts"},
        {"huggingface_hub", "msgspec", "numpy", "safetensors", "tokenizers", "torch", "transformers"},
    ),
    "server.importing.onnx": ({"server.errors", "server.importing"}, {"numpy", "onnx", "onnxruntime", "torch"}),
    "server.capacity": ({"server", "page", "planner"}, {"msgspec", "numpy"}),
    "server.view": ({"server", "page.document", "planner.errors"}, {"msgspec"}),
    "server.view.analysis": ({"server", "planner"}, set()),
    "server.view.plan_document": ({"server", "page.document", "planner"}, set()),
    "server.view.terminal": ({"server", "planner"}, {"rich"}),
    "server.scale": (
        {"server", "planner.errors", "planner.parts", "planner.sizing.assignment"},
        {"aiohttp", "msgspec", "yarl"},
    ),
    "server.scale.app": ({"server", "planner.errors", "planner.sizing.assignment"}, {"ray", "starlette"}),
    "server.commands.scale": ({"server", "planner.errors"}, {"ray", "rich"}),
    "server.commands": ({"server", "page.html", "planner"}, {"msgspec", "prometheus_client", "rich"}),
    "server.commands.completion": ({"server.errors"}, {"rich", "shtab"}),
    "server.commands.serve": ({"server", "planner.errors"}, {"rich", "uvloop"}),
    "server.commands.tile": ({"server", "planner.errors", "planner.tiling", "runtime.tiling"}, {"rich"}),
    "server.commands.train": ({"server", "planner", "runtime.training"}, {"rich"}),
    "page": ({"page"}, {"msgspec"}),
    "loadgen": (
        {"loadgen"},
        {"aiohttp", "msgspec", "numpy", "rich", "safetensors", "tokenizers", "torch", "transformers", "uvloop"}
        | {"hdrh", "tritonclient"},
    ),
    "loadgen.drawing": ({"loadgen", "page"}, {"hdrh", "msgspec", "numpy"}),
}

FOLDERS: dict[str, dict[str, set[str]]] = {
    # folder: the other folders of its package that it may import. Modules next to the folders are shared by all of
    # them, except for those in PUT_TOGETHER.
    "server": {
        "config": set(),
        "ipc": set(),
        "protocol": {"ipc"},
        "observe": {"ipc", "protocol"},
        "scheduling": {"ipc"},
        "triton": {"config", "ipc", "protocol", "scheduling"},
        "engine": {"ipc", "protocol", "scheduling"},
        "repository": {"ipc", "scheduling", "triton"},
        "deploy": {"config", "engine", "ipc", "repository", "scheduling", "triton"},
        "frontend": {"config", "ipc", "observe", "protocol", "triton"},
        "process": {"config", "deploy", "engine", "frontend", "ipc", "observe", "repository", "triton"},
        "view": {"config", "frontend", "ipc", "observe", "protocol"},
        "http": {"frontend", "ipc", "observe", "protocol", "triton", "view"},
        "grpc": {"frontend", "ipc", "observe", "protocol"},
        "importing": {"config", "deploy", "engine", "frontend", "ipc", "protocol", "repository", "triton"},
        "capacity": {"ipc", "scheduling"},
        "scale": {"config", "frontend", "http", "ipc", "protocol", "repository"},
        "commands": {"capacity", "config", "deploy", "engine", "importing", "repository", "scale", "view"},
    },
    "planner": {
        "bounds": set(),
        "problem": {"bounds"},
        "layout": set(),
        "schedule": {"problem"},
        "search": {"layout", "problem", "schedule"},
        "streaming": {"layout", "problem", "schedule"},
        "genetic": {"bounds", "layout", "problem", "schedule", "search", "streaming"},
        "offloading": {"genetic", "layout", "problem", "schedule", "search", "streaming"},
        "papers": {"papers/swapadvisor", "problem", "search"},
        "papers/baselines": {"papers/beaumont", "problem", "schedule", "search"},
        "papers/beaumont": {"problem", "schedule", "search"},
        "papers/home": {"problem", "schedule", "search"},
        "papers/swapadvisor": {"genetic", "layout", "problem", "schedule", "search"},
        "papers/tensile": {"problem", "schedule", "search"},
        "sizing": {"genetic", "layout", "offloading", "problem", "search"},
        "tiling": set(),
    },
    "runtime": {
        "lowering": set(),
        "stores": {"lowering"},
        "binding": {"lowering"},
        "shared_region": {"binding", "cpu", "cuda", "lowering", "stores"},
        "measure": {"binding", "lowering"},
        "tiling": {"lowering"},
        "cpu": {"binding", "lowering", "measure", "stores"},
        "cuda": {"binding", "lowering", "measure", "stores"},
        "training": {"stores"},
    },
}
PUT_TOGETHER = {
    "server": {"cli", "serve"},
    "planner": {"library", "warm"},
    "runtime": {"devices"},
}
"""Modules next to the folders that no folder may import, because they import the folders."""
MAY_PUT_TOGETHER = {
    "planner": {"sizing": {"library"}},
    "server": {"commands": {"serve"}, "scale": {"serve"}},
}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / "cohabit" / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, ours without `cohabit.`; names imported from a package count as its modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {n for n in names if (ROOT / Path(*n.split("."))).with_suffix(".py").exists()}
            found.update(submodules or {node.module})
    outside = {name for name in found if name.partition(".")[0] in PACKAGES}
    assert not outside, f"{path} imports {outside}: the one top-level name is `cohabit`"
    return {name.removeprefix("cohabit.") for name in found}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT / "cohabit").with_suffix("").parts)


def test_imports_follow_the_table() -> None:
    for path in modules():
        module = module_of(path)
        parts = module.split(".")
        row = next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in ALLOWED)
        ours, third_parties = ALLOWED[row]
        for name in imports_of(path):
            top = name.split(".")[0]
            if top in PACKAGES:
                assert any(name == a or name.startswith(f"{a}.") for a in ours), f"{module} imports {name}"
            elif top not in sys.stdlib_module_names:
                assert top in third_parties, f"{module} imports {name}"


def folder_of(package: str, module: str) -> str:
    """The longest folder in the table that holds the module; the module's own name where none does."""
    parts = module.split(".")[1:]
    inside = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((folder for folder in inside if folder in FOLDERS[package]), parts[0])


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_of_a_package_import_one_another_in_one_direction(package: str) -> None:
    table = FOLDERS[package]
    graphlib.TopologicalSorter(table).prepare()  # raises CycleError
    for path in (ROOT / "cohabit" / package).rglob("*/*.py"):
        folder = folder_of(package, module_of(path))
        if folder == path.stem:
            continue  # next to the folders
        assert folder in table, f"{path} lies in no folder of the table"
        together = PUT_TOGETHER[package] - MAY_PUT_TOGETHER.get(package, {}).get(folder, set())
        others = table.keys() - table[folder] - {folder} | together
        for name in imports_of(path):
            if name.startswith(f"{package}."):
                assert folder_of(package, name) not in others, f"{path} imports {name}"


WING_FOLDERS = (*parts.WINGS, "planner.tiling")
"""`runtime.tiling` registers the parts of both folders: `planner.tiling` imports NumPy with its package."""
WING_COMMANDS = {
    part.path.removeprefix("cohabit.")
    for wing in parts.wings()
    for part in wing.get("cohabit.commands", {}).values()
}
"""Modules of `server.commands` that belong to wings."""


def test_the_core_imports_no_wing() -> None:
    def is_wing(name: str) -> bool:
        return name in WING_COMMANDS or any(name == wing or name.startswith(f"{wing}.") for wing in WING_FOLDERS)

    core = [path for path in modules() if not is_wing(module_of(path))]
    assert len(core) < len(modules())
    assert {f"{path}: {name}" for path in core for name in imports_of(path) if is_wing(name)} == set()


def test_importing_a_package_does_nothing_but_define() -> None:
    for package in PACKAGES:
        tree = ast.parse((ROOT / "cohabit" / package / "__init__.py").read_text())
        assert all(isinstance(node, ast.Expr) for node in tree.body), f"{package} does something on import"


def test_every_folder_of_a_package_is_linked_and_copied_into_the_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert {path.name for path in (ROOT / "cohabit").iterdir() if path.is_symlink()} == set(LINKED)
    assert {name for name in LINKED if f"COPY {name} {name}\n" not in dockerfile} == set()


def test_no_two_classes_share_a_name() -> None:
    seen: dict[str, Path] = {}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                assert node.name not in seen, f"{node.name}: {path}, and {seen[node.name]}"
                seen[node.name] = path


def test_no_folder_has_more_modules_than_a_reader_takes_in_at_once() -> None:
    """But for commands, which have a module each."""
    for folder in {path.parent for path in modules()} - {ROOT / "cohabit" / "server" / "commands"}:
        names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(names) <= 17, f"{folder} has {len(names)} modules"


def test_every_test_that_a_document_names_is_there() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    documents = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    named = set(re.findall(r"`(test_\w+)`", documents))
    assert len(named) > 30
    assert {name for name in named if f"def {name}(" not in tests} == set()


def anchors_of(document: Path) -> set[str]:
    """The names by which links reach a document's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", document.read_text())
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_of_a_document_leads_somewhere() -> None:
    documents = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    checked = 0
    for document in documents:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([\w-]+))?\)", document.read_text()):
            path = document.parent / target if target else document
            assert path.exists(), f"{document} names {target}"
            if anchor and path.suffix == ".md":
                assert anchor in anchors_of(path), f"{document}: {path.name} has no heading #{anchor}"
            checked += 1
    assert checked > 200


def test_every_result_has_one_command_and_the_index_names_it() -> None:
    results = {path.stem for path in (ROOT / "docs" / "results").glob("*.md")} - {"README", "papers"}
    assert COMMANDS.keys() | EARLIER.keys() == results
    assert COMMANDS.keys().isdisjoint(EARLIER)
    index = (ROOT / "docs" / "results" / "README.md").read_text()
    assert {name for name in results if f"| [{name}.md]({name}.md) |" not in index} == set()
    for command in COMMANDS.values():
        assert find_spec(f"benchmarks.{command.partition(' ')[0]}") is not None, command
