"""Who may import whom, as docs/architecture.md says: one table, checked against every import statement."""

import ast
import graphlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {f"planner.{name}" for name in ("graph", "profile", "plan", "timeline", "check", "errors")}
OURS = ("planner", "runtime", "server", "loadgen")

ALLOWED: dict[str, tuple[set[str], set[str]]] = {
    # package: (what of ours, which third parties)
    "leaves": (LEAVES, {"msgspec"}),
    "planner": ({"planner"}, {"msgspec", "numpy", "numba", "scipy"}),
    "runtime": ({"runtime"} | LEAVES, {"msgspec", "numpy", "torch", "pynvml"}),
    "server": (
        {"server", "runtime", "planner.sizing", "planner.fitting", "planner.library"} | LEAVES,
        {
            "aiohttp",
            "uvloop",
            "grpc",
            "grpc_health",
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
    "server.plans": (
        {"server", "planner"},
        {"torch", "rich"},
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

FOLDERS_OF_SERVER: dict[str, set[str]] = {
    # folder of server/: what others it may import; files beside them are the words that all share, or put all together
    "protocol": set(),
    "scheduling": {"protocol"},
    "engine": {"scheduling"},
    "models": {"engine", "protocol", "scheduling"},
    "memory": {"engine", "models"},
    "lifecycle": {"engine", "memory", "models"},
    "metrics": {"engine", "models"},
    "operate": {"metrics"},
    "http": {"metrics", "operate", "protocol"},
    "grpc": {"operate", "protocol"},
    "plans": {"models"},
    "remote": set(),
}
PUT_TOGETHER = {"server.cli", "server.serve"}


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
    return "server.plans" if module.startswith("server.plans") else module.split(".")[0]


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


def folders_of_server() -> list[str]:
    return sorted(path.parent.name for path in (ROOT / "server").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", folders_of_server())
def test_arrows_between_the_folders_of_the_server_run_one_way(folder: str) -> None:
    allowed = FOLDERS_OF_SERVER[folder] | {folder}
    for path in (ROOT / "server" / folder).glob("*.py"):
        for name in imports_of(path):
            assert name not in PUT_TOGETHER, f"{path}: {name}"
            if name.startswith("server.") and name.split(".")[1] in FOLDERS_OF_SERVER:
                assert name.split(".")[1] in allowed, f"{path}: {name}"


def test_the_table_of_folders_has_no_cycle() -> None:
    graphlib.TopologicalSorter(FOLDERS_OF_SERVER).prepare()


def test_importing_a_package_does_nothing_but_define() -> None:
    for package in OURS:
        tree = ast.parse((ROOT / package / "__init__.py").read_text())
        assert all(isinstance(node, ast.Expr) for node in tree.body), f"{package} does something on import"
