"""Several training loops in one budget (TENSILE, section 5.3, Figure 6), and two of them with half of it each.

Every job trains a net of its own with SGD, in a thread of one process. A job starts when the one before it has made its
first steps, and runs until all have made theirs. The budget is 60 % of the sum of the peaks that the jobs have alone.
*Halves* are two processes at once, with half of that budget each. All losses must be those of eager PyTorch.
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import torch

import cohabit
from benchmarks.record import parser_of, publish, table_of
from benchmarks.training_nets import NETS, loss
from cohabit.runtime.training.budget import Budget

MIB = 1 << 20
SHARE = 0.6
FIRST_STEPS = 2
"""Steps that a job makes before the next one starts. They are not measured."""
UNLIMITED = "1TiB"
Outcome = tuple[list[float], list[list[float]], int]
"""Median seconds of each job's steps, its losses, and the peak bytes of all tensors."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if all losses are eager's."""
    parser = parser_of("benchmarks.budget_jobs", __doc__, has_folder=False)
    parser.add_argument("--nets", nargs="+", choices=tuple(NETS), default=["wide_resnet", "gpt", "unet", "lstm"])
    parser.add_argument("--steps", type=int, default=6, help="steps of each job (default: %(default)s)")
    parser.add_argument("--train", metavar="MEMORY", help="train in this process, and print the outcome as JSON")
    options = parser.parse_args(argv)
    if options.train:
        print(json.dumps(trained(options.nets, options.train, options.steps)))
        return 0

    peaks = {name: in_process([name], UNLIMITED, options.steps)[2] for name in options.nets}
    rows, equal = [], True
    for count in range(1, len(options.nets) + 1):
        names = options.nets[:count]
        budget_bytes = int(SHARE * sum(peaks[name] for name in names))
        eager_s, losses, _ = in_process(names, "eager", options.steps)
        together_s, together_losses, peak_bytes = in_process(names, f"{budget_bytes}B", options.steps)
        halves_s = "-"
        if count == 2:
            halves = [started([name], f"{budget_bytes // 2}B", options.steps) for name in names]
            outcomes = [outcome_of(process) for process in halves]
            halves_s = f"{slowdown([s for step_s, _, _ in outcomes for s in step_s], eager_s):.2f}"
            equal &= [one for _, job_losses, _ in outcomes for one in job_losses] == losses
        equal &= together_losses == losses
        saved, overhead = 1 - peak_bytes / sum(peaks[name] for name in names), slowdown(together_s, eager_s)
        rows.append(
            {
                "jobs": ", ".join(names),
                "budget MiB": f"{budget_bytes / MIB:.0f}",
                "peak over budget": f"{peak_bytes / budget_bytes:.2f}",
                "MSR": f"{saved:.3f}",
                "EOR": f"{overhead:.3f}",
                "CBR": f"{saved / overhead:.3f}",
                "halves": halves_s,
                "losses": "equal" if together_losses == losses else "differ",
            }
        )
        print(rows[-1], flush=True)
    about = (
        "MSR is the memory saved, of the sum of the peaks that the jobs have alone; EOR the time of a step over that of"
        " the same jobs in threads of eager PyTorch, geometric mean over the jobs of medians; CBR is MSR / EOR."
        f" *halves* is EOR of two processes with half of the budget each. {options.steps} steps of each job; each uses"
        " one thread.\n"
    )
    publish(options, "Several training loops in one budget", [about, table_of(rows)])
    return 0 if equal else 1


def slowdown(step_s: Sequence[float], eager_s: Sequence[float]) -> float:
    return statistics.geometric_mean(ours / theirs for ours, theirs in zip(step_s, eager_s, strict=True))


def in_process(names: Sequence[str], memory: str, steps: int) -> Outcome:
    return outcome_of(started(names, memory, steps))


def started(names: Sequence[str], memory: str, steps: int) -> subprocess.Popen[str]:
    arguments = ["--nets", *names, "--steps", str(steps), "--train", memory]
    command = [sys.executable, "-m", "benchmarks.budget_jobs", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def outcome_of(process: subprocess.Popen[str]) -> Outcome:
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a contestant ended with status {process.returncode}")
    step_s, losses, peak_bytes = json.loads(output)
    return step_s, losses, peak_bytes


def trained(names: Sequence[str], memory: str, steps: int) -> Outcome:
    """Train all jobs in threads, with a budget in bytes or eagerly."""
    torch.set_num_threads(1)
    jobs = []
    for name in names:
        torch.manual_seed(0)
        model = NETS[name].model()
        jobs.append((model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), NETS[name].batch()))
    losses: list[list[float]] = [[] for _ in jobs]
    seconds: list[list[float]] = [[] for _ in jobs]
    may_start = [threading.Event() for _ in range(len(jobs) + 1)]
    may_start[0].set()
    left = threading.Semaphore(0)
    all_done = threading.Event()

    def train(number: int) -> None:
        model, optimizer, batch = jobs[number]
        may_start[number].wait()
        while not all_done.is_set():
            began_s = time.perf_counter()
            optimizer.zero_grad()
            value = loss(model, *batch)
            torch.autograd.backward(value)
            optimizer.step()
            losses[number].append(value.item())
            seconds[number].append(time.perf_counter() - began_s)
            if len(losses[number]) == FIRST_STEPS:
                may_start[number + 1].set()
            if len(losses[number]) == steps:
                left.release()

    owners = [owner for model, optimizer, _ in jobs for owner in (model, optimizer)]
    with nullcontext() if memory == "eager" else cohabit.budget(memory, *owners) as limits:
        threads = [threading.Thread(target=train, args=(number,)) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for _ in jobs:
            left.acquire()
        all_done.set()
        for thread in threads:
            thread.join()
        peak_bytes = limits.peak_bytes if isinstance(limits, Budget) else 0
    # All jobs run during the last one's steps.
    overlap = len(seconds[-1])
    medians = [statistics.median(job[-max(overlap - FIRST_STEPS, 1) :]) for job in seconds]
    return medians, [job[:steps] for job in losses], peak_bytes


if __name__ == "__main__":
    sys.exit(main())
