"""Searches for served plans, in a process of its own, so that another checkout can search the same problems.

Reads one JSON object per line from standard input and answers each with one line; see `answer`. Imports only what every
checkout since 95f7e81f has.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import cohabit.planner.graph
import cohabit.planner.profile
from cohabit.planner.errors import CohabitError
from cohabit.planner.memory import Memory
from cohabit.planner.problem import TIE, Problem
from cohabit.planner.search.registry import make
from cohabit.planner.warm import warm_up


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Search for the seconds of CPU time in `marks`, ascending. Returns the least latency at each, or a refusal.

    `graph` and `profile` are paths, `memory` has the bytes of the workspace and of the partition. Time includes that
    of preparing the search. A candidate that ends after a mark does not count for it.
    """
    graph = cohabit.planner.graph.decode(Path(asked["graph"]).read_bytes())
    profile = cohabit.planner.profile.decode(Path(asked["profile"]).read_bytes())
    problem = Problem(graph, profile, Memory(*asked["memory"]))
    started_s, marks = time.thread_time(), list(asked["marks"])
    least_s, found, evaluations = math.inf, list[float](), 0
    try:
        searcher = make("best", problem, asked["seed"])
        while len(found) < len(marks) and (candidates := searcher.ask()):
            costs = []
            for candidate in candidates:
                cost = searcher.evaluate(candidate, least_s * TIE)
                while (
                    len(found) < len(marks) and time.thread_time() - started_s > marks[len(found)] and evaluations
                ):
                    found.append(least_s)
                if len(found) == len(marks):
                    break
                costs.append(cost)
                evaluations += 1
                least_s = min(least_s, cost.latency_s)
            searcher.tell(candidates[: len(costs)], costs)
    except CohabitError as error:
        return {"refusal": str(error)}
    found += [least_s] * (len(marks) - len(found))
    return {"latencies_s": found, "evaluations": evaluations, "cpu_s": time.thread_time() - started_s}


def main() -> None:
    warm_up("best", single=False)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
