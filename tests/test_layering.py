"""Who may import whom, as docs/architecture.md says: one table, checked against every import statement."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {f"planner.{name}" for name in ("graph", "profile", "plan", "timeline", "check", "errors", "free_list")}
OURS = ("planner", "runtime", "server", "loadgen")

ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    # package: (what of ours, which third parties)
    "leaves": (LEAVES, {"msgspec"}),
    "planner": ({"planner"}, {"msgspec", "numpy", "numba", "scipy"}),
    "runtime": ({"runtime"} | LEAVES, {"msgspec", "numpy", "torch", "pynvml"}),
    "server": (
        {"server", "runtime", "planner.sizing.deployment", "planner.sizing.fitting", "planner.library"} | LEAVES,
        {
            "aiohttp",
            "uvloop",
            "grpc",
            "grpc_health",
            "grpc_reflection",
            "google",
            "tritonclient",
            "msgspec",
            "numpy",
            "torch",
            "rich",
            "psutil",
            "pynvml",
            "prometheus_client",
        },
    ),
    "server.tools": (
        {"server", "planner"},
        {"msgspec", "prometheus_client", "rich"},
    ),
    "loadgen": (
        {"loadgen"},
        {
            "tritonclient",
            "aiohttp",
            "uvloop",
            "numpy",
            "msgspec",
            "rich",
            "torch",
            "transformers",
            "tokenizers",
            "safetensors",
        },
    ),
}

FOLDERS: dict[str, dict[str, set[str]]] = {
    # folder: what others of its package it may import; files beside the folders are the words that all of them share,
    # or put all together
    "server": {
        "config": set(),
        "protocol": set(),
        "scheduling": {"config", "protocol"},
        "engine": {"scheduling"},
        "models": {"engine", "protocol", "scheduling"},
        "memory": {"engine", "models"},
        "lifecycle": {"engine", "memory", "models"},
        "metrics": {"engine", "models"},
        "operate": {"metrics"},
        "http": {"frontend", "observe", "protocol"},
        "grpc": {"frontend", "observe", "protocol"},
        "tools": {"config", "models"},
    },
    "planner": {
        "offsets": set(),
        "bounds": set(),
        "sequences": {"offsets"},
        "streaming": {"offsets", "sequences"},
        "swapadvisor": {"offsets", "sequences"},
        "beaumont": {"offsets", "sequences"},
        "home": {"sequences"},
        "tensile": {"offsets", "sequences"},
        "searchers": {
            *("beaumont", "bounds", "home", "offsets", "sequences", "streaming", "swapadvisor", "tensile"),
        },
        "sharing": {"offsets", "searchers", "sequences"},
    },
}
PUT_TOGETHER = {"server": {"cli", "serve"}, "planner": {"sizing", "fitting"}}


def modules() -> list[Path]:
    return sorted(path for package in OURS for path in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, as written; names imported from a package count as its modules."""
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
    return found


def layer_of(module: str) -> str:
    if module in LEAVES:
        return "leaves"
    return "server.tools" if module.startswith("server.tools") else module.split(".")[0]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_the_way_of_the_table(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    ours, third_parties = ALLOWED[layer_of(module)]
    for name in imports_of(path):
        top = name.split(".")[0]
        if top in OURS:
            assert any(name == allowed or name.startswith(f"{allowed}.") for allowed in ours), f"{module}: {name}"
        elif top not in sys.stdlib_module_names:
            assert top in third_parties, f"{module} imports {name}"


def folders() -> list[tuple[str, str]]:
    return sorted((p, path.parent.name) for p in FOLDERS for path in (ROOT / p).glob("*/__init__.py"))


@pytest.mark.parametrize(("package", "folder"), folders())
def test_arrows_between_the_folders_of_a_package_run_one_way(package: str, folder: str) -> None:
    others = FOLDERS[package].keys() - FOLDERS[package][folder] - {folder} | PUT_TOGETHER[package]
    for path in (ROOT / package / folder).glob("*.py"):
        for name in imports_of(path):
            if name.startswith(f"{package}."):
                assert name.split(".")[1] not in others, f"{path}: {name}"


@pytest.mark.parametrize("package", FOLDERS)
def test_the_table_of_folders_has_no_cycle(package: str) -> None:
    graphlib.TopologicalSorter(FOLDERS[package]).prepare()


def test_importing_a_package_does_nothing_but_define() -> None:
    for package in OURS:
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        assert all(isinstance(node, ast.Expr) for node in tree.body), f"{package} does something on import"
