"""How many small errors the tests find: `python -m tests.mutants --count 60`.

A mutant is the sources with one thing wrong: a comparison, a sum, a constant, a condition, a call or a result. Mutants
are drawn at random, the same number from each area. The tests aimed at the area run on each. A survivor is printed: a
check is missing, or the change makes no difference that can be seen.
"""

import argparse
import ast
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401  # once, for all forks

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Area:
    sources: str
    """Files, as patterns below the root."""
    tests: str


AREAS = {
    "scheduler": Area(
        "server/scheduling/*.py",
        "tests/server/test_scheduler.py tests/server/test_scheduler_overload.py tests/server/test_estimates.py",
    ),
    "check": Area("planner/check.py", "tests/planner/test_check.py tests/planner/test_plan_format.py"),
    "matching": Area(
        "server/protocol/matching.py",
        "tests/transport/test_bad_input.py tests/transport/test_tritonclient.py tests/transport/test_codec.py "
        "tests/transport/test_shared_memory.py tests/transport/test_limits.py tests/transport/test_classification.py",
    ),
    "streams": Area(
        "planner/streaming/*.py",
        "tests/planner/test_streaming.py "
        "tests/planner/test_searchers.py::test_a_candidate_costs_what_its_plan_is_simulated_to_take[genetic-served] "
        "tests/planner/test_searchers.py::test_nothing_is_in_memory_after_its_last_use[genetic] "
        "tests/planner/test_searchers.py::test_serving_plans_come_close_to_the_best_of_all_copies[genetic]",
    ),
    "placement": Area(
        "server/deploy/partitions.py planner/layout/placement.py",
        "tests/server/test_partitions.py tests/planner/test_layout.py",
    ),
    "codecs": Area(
        "server/http/codec.py server/grpc/codec.py",
        "tests/transport/test_codec.py tests/transport/test_bad_input.py tests/transport/test_tritonclient.py "
        "tests/transport/test_http.py tests/transport/test_shared_memory.py tests/transport/test_grpc_connections.py",
    ),
    "free list": Area("planner/free_list.py", "tests/planner/test_free_list.py"),
}

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


LEFT_ALONE = ("annotation", "returns", "decorator_list")


def variant(node: ast.AST) -> ast.AST | None:
    """What a node could be by mistake."""
    match node:
        case ast.Compare(left, [operator, *operators], others) if type(operator) in SWAPPED:
            return ast.Compare(left, [SWAPPED[type(operator)](), *operators], others)
        case ast.BoolOp(operator, values):
            return ast.BoolOp(SWAPPED[type(operator)](), values)
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED:
            return ast.BinOp(left, SWAPPED[type(operator)](), right)
        case ast.Constant(bool() as value):
            return ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            return ast.Constant(value + 1)
        case ast.If(test, body, orelse):
            return ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.Return(ast.expr()):
            return ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise():
            return ast.Pass()
    return None


class Mutation:
    """Replaces the node with a number, of those that have a variant. Annotations and messages are left alone."""

    def __init__(self, number: int | None) -> None:
        self.number, self.count, self.what = number, 0, ""

    def visit(self, node: ast.AST) -> ast.AST:
        other = variant(node)
        if other is not None:
            self.count += 1
            if self.count - 1 == self.number:
                ast.fix_missing_locations(ast.copy_location(other, node))
                before, after = (ast.unparse(n).split("\n")[0] for n in (node, other))
                self.what = f"{node.lineno}: {before}  ->  {after}"  # type: ignore[attr-defined]
                return other
        if not isinstance(node, ast.JoinedStr | ast.Raise):
            for field, value in ast.iter_fields(node):
                if field not in LEFT_ALONE:
                    self.visit_field(node, field, value)
        return node

    def visit_field(self, node: ast.AST, field: str, value: object) -> None:
        if isinstance(value, list):
            value[:] = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
        elif isinstance(value, ast.AST):
            setattr(node, field, self.visit(value))


def mutation(source: str, number: int | None = None) -> tuple[Mutation, str]:
    """A source with one mutation, or with none, which counts them."""
    made = Mutation(number)
    return made, ast.unparse(made.visit(ast.parse(source)))


def passes(copy: Path, tests: str, interpret: bool) -> bool:
    """Run tests in a fork, which has imported torch already. One that takes too long has failed."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "NUMBA_CACHE_DIR": f"{copy}/.numba"}
        if interpret:  # compiling takes longer than the tests
            os.environ |= {"COHABIT_INTERPRET": "1", "NUMBA_CACHE_DIR": f"{copy}/.none"}
        sys.dont_write_bytecode = True
        del sys.modules["tests"]  # this one
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests.split()]))
    deadline_s = time.monotonic() + TIMEOUT_S
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline_s:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    return ended[1] == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("areas", nargs="*", default=list(AREAS), help=f"some of {', '.join(AREAS)}")
    parser.add_argument("--count", type=int, default=60, help="mutants of all areas together")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        kept = shutil.ignore_patterns(".*", "__pycache__", "results")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=kept)
        for place, name in enumerate(given.areas):
            area = AREAS[name]
            paths = [path for pattern in area.sources.split() for path in sorted(copy.glob(pattern))]
            interpret = any("@compiled" in path.read_text() for path in paths)
            assert passes(copy, area.tests, interpret), f"{name}: the tests fail on the sources as they are"
            numbers = [(path, number) for path in paths for number in range(mutation(path.read_text())[0].count)]
            count = given.count * (place + 1) // len(given.areas) - given.count * place // len(given.areas)
            drawn = random.Random(f"{given.seed} {name}").sample(numbers, count)
            survived = []
            for path, number in drawn:
                source = path.read_text()
                made, changed = mutation(source, number)
                path.write_text(changed)
                if passes(copy, area.tests, interpret):
                    survived.append(f"{path.relative_to(copy)}:{made.what}")
                path.write_text(source)
            print(f"{name}: {len(drawn) - len(survived)} of {len(drawn)} found", flush=True)
            print("".join(f"  survived: {line}\n" for line in survived), end="", flush=True)


if __name__ == "__main__":
    main()
