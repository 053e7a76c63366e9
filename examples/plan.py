"""Plan a hand-written model in half of its weights: which parameters stay resident, and when are the others copied?

    python examples/plan.py && cohabit show plans/chain.plan.json --html plan.html

`cohabit plan models/NAME --memory 50%` measures and plans your own model.
"""

from pathlib import Path

import cohabit.planner.graph
import cohabit.planner.plan
import cohabit.planner.profile
from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Compute
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search

LAYERS, WEIGHT_BYTES, ACTIVATION_BYTES = 8, 4 << 20, 64 << 10


def main() -> int:
    # Layer n reads weight n and activation n, and writes activation n + 1. A tensor's id is its index in the list.
    weights = [Tensor(f"weight{n}", WEIGHT_BYTES, "parameter") for n in range(LAYERS)]
    activations = [Tensor(f"x{n}", ACTIVATION_BYTES, "activation" if n else "input") for n in range(LAYERS + 1)]
    ops = [Op(f"layer{n}", "linear", (n, LAYERS + n), (LAYERS + n + 1,)) for n in range(LAYERS)]
    graph = Graph("chain", 1, "0" * 64, (*weights, *activations), tuple(ops), (2 * LAYERS,))
    # An op takes 3 ms, a weight's copy 4 ms: 1 GiB/s. `cohabit profile` measures both.
    link = Link(latency_s=20e-6, bandwidth_bytes_per_s=1 << 30)
    profile = Profile(graph.fingerprint, "by hand", (3e-3,) * LAYERS, link, link)

    memory = Memory(workspace_bytes=8 << 20, partition_bytes=LAYERS // 4 * WEIGHT_BYTES)
    problem = Problem(graph, profile, memory)
    plan = search(problem, "best", seed=0)
    check(graph, profile, plan)  # shares no code with the search; raises if a step has no memory or no data
    timeline = simulate(graph, plan, profile)
    for span in timeline.spans:
        step = plan.steps[span.step]
        what = graph.ops[step.op].name if isinstance(step, Compute) else graph.tensors[step.tensor].name
        print(f"{span.start_s * 1e3:6.1f} to {span.end_s * 1e3:6.1f} ms  {span.lane:8}  {what}")
    resident_s, bound_s = profile.compute_s, problem.bound_s
    print(
        f"resident {resident_s * 1e3:.1f} ms, at least {bound_s * 1e3:.1f}, planned {timeline.latency_s * 1e3:.1f}"
    )

    folder = Path("plans")
    folder.mkdir(exist_ok=True)
    (folder / "chain.graph.json").write_bytes(cohabit.planner.graph.encode(graph))
    (folder / "chain.profile.json").write_bytes(cohabit.planner.profile.encode(profile))
    (folder / "chain.plan.json").write_bytes(cohabit.planner.plan.encode(plan))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
