"""Training loops for `cohabit.budget`: a net, and what users do in and beside their steps. Each returns numbers."""

import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cohabit
from cohabit.runtime.training.budget import Budget

WIDTH, ROWS, STEPS = 128, 256, 5
Optimizer = torch.optim.Optimizer
Loop = Callable[[nn.Sequential, Optimizer], list[float]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def made(kind: type[Optimizer] = torch.optim.AdamW, **options: Any) -> tuple[nn.Sequential, Optimizer]:
    """Return a net with residuals, dropout, tied weights and buffers that change, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(4)), nn.BatchNorm1d(WIDTH))
    net[3].up.weight = net[0].up.weight
    return net, kind(net.parameters(), lr=1e-3, **options)  # type: ignore[call-arg]


def batches(count: int = STEPS, rows: int = ROWS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


def step(net: Callable[[torch.Tensor], torch.Tensor], optimizer: Optimizer, x: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = net(x).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.item()


def steps(net: Any, optimizer: Optimizer, count: int = STEPS) -> list[float]:
    return [step(net, optimizer, x) for x in batches(count)]


def state_of(net: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    found = {f"net.{name}": value.clone() for name, value in net.state_dict().items()}
    found |= {f"gradient.{name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    for number, values in enumerate(optimizer.state.values()):
        found |= {f"{number}.{k}": v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not different


def check(
    loop: Loop,
    memory: int | str,
    store: Literal["ram", "file"] = "ram",
    *,
    sees_ops: bool | None = None,
    **options: Any,
) -> Budget:
    """Assert that a loop has eager PyTorch's numbers and state within a budget, which is returned."""
    net, optimizer = made(**options)
    torch.manual_seed(2)
    expected, state = loop(net, optimizer), state_of(net, optimizer)
    net, optimizer = made(**options)
    torch.manual_seed(2)
    with cohabit.budget(memory, net, optimizer, store=store) as limits:
        assert loop(net, optimizer) == expected
        assert sees_ops in (None, limits.sees_ops) or limits.exceeded_bytes
    assert_same(state_of(net, optimizer), state)
    assert limits.limit_bytes is not None, "also after the context"
    return limits


@contextmanager
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch._dynamo.reset()  # what one test compiled is not the next one's


# What loops do in their steps


def with_other_batches_and_evaluation(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in (*batches(4), *batches(1, 40), *batches(2)):
        losses.append(step(net, optimizer, x))
        net.eval()
        with torch.no_grad():
            losses.append(net(x).sum().item())
        net.train()
    return losses


def with_python_s_randomness(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    """Mixup by numpy, blocks recomputed by Python's choice, and a weight that changes from step to step."""
    random.seed(2)
    np.random.seed(2)
    losses = []
    for number, x in enumerate(batches()):
        net[1].drop.p = 0.1 * number
        share = float(np.random.beta(1, 1))
        optimizer.zero_grad()
        hidden = net[0](share * x + (1 - share) * x.flip(0))
        hidden = checkpoint(net[1:3], hidden, use_reentrant=False) if random.random() < 0.5 else net[1:3](hidden)
        loss = net[3:](hidden).square().mean()
        (loss * min(1.0, 0.3 * number + 0.1)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_hooks(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    def halved(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    calls: list[int] = []
    handles = [
        net[0].up.weight.register_hook(lambda gradient: 2 * gradient),
        net[2].register_forward_hook(lambda module, inputs, result: result * 0.9),
        optimizer.register_step_pre_hook(lambda o, args, kwargs: halved(net[1].down.weight)),
        optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(1)),
        net[0].down.weight.register_post_accumulate_grad_hook(halved),
    ]
    losses = steps(net, optimizer)
    for handle in handles:
        handle.remove()
    return [*losses, len(calls)]


def with_accumulation_and_autocast(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        for part in x.chunk(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(part).float().square().mean() / 2
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def with_a_scaler(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    scaler, losses = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2), []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item() + scaler.get_scale())
    return losses


def with_a_closure(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(optimizer.step(closure).item())  # type: ignore[call-overload, union-attr]
    return losses


def going_backward_three_times(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
        optimizer.step()
        losses.append(loss.item())
    return losses


def penalizing_gradients(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for batch in batches():
        x = batch.clone().requires_grad_()
        optimizer.zero_grad()
        loss = net(x).square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def with_hooks_on_saved_tensors(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for number, x in enumerate(batches()):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
            hidden = net[:1](x)
        second = checkpoint(net[1], hidden, use_reentrant=False) if number % 2 else net[1](hidden)
        loss = net[2:](second).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def raising_in_the_middle(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for number, x in enumerate(batches(8)):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        if number == 4:
            loss.register_hook(lambda gradient: 1 / 0)
        if number == 6:
            continue  # its graph dies
        try:
            loss.backward()
        except ZeroDivisionError:
            continue
        optimizer.step()
        losses.append(loss.item())
    return losses


# What they write and read beside autograd


def keeping_what_layers_return(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    kept: list[torch.Tensor] = []
    arrays: list[Any] = []

    def keep(module: nn.Module, inputs: Any, result: torch.Tensor) -> None:
        kept.append(result)
        arrays.append(result.detach().numpy())

    handles = [block.register_forward_hook(keep) for block in net.children()]
    losses = steps(net, optimizer)
    for handle in handles:
        handle.remove()
    return losses + [tensor.sum().item() for tensor in kept] + [float(array.sum()) for array in arrays]


def reading_arrays_and_views(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    arrays = [parameter.detach().numpy() for parameter in net.parameters()]
    views = [parameter.data.view(-1) for parameter in net.parameters()]
    losses = []
    for x in batches():
        losses += [step(net, optimizer, x), sum(float(a.sum()) for a in arrays), sum(v.sum().item() for v in views)]
    return losses


def reading_what_nodes_saved(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        loss = net(x).square().mean()
        losses += [loss.grad_fn.next_functions[0][0]._saved_self.sum().item(), loss.item()]
        loss.backward()
        optimizer.step()
    return losses


def writing_past_autograd(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        optimizer.zero_grad()
        hidden = net[0](x)
        square = hidden * hidden
        hidden.data.mul_(2.0)
        hidden.detach().numpy()[0] = 1.0
        first, second = net[1](square).unsafe_chunk(2, 1)
        loss = net[2](torch.cat([first.sin(), second.cos()], 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def writing_what_is_saved(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    """Autograd refuses to go backward, as without a budget."""
    losses = steps(net, optimizer, 3)
    for _ in range(2):
        hidden = net[0](batches(1)[0]).exp()
        result = hidden.sin()
        hidden.add_(1)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected"):
            result.sum().backward()
    optimizer.zero_grad()
    return losses + steps(net, optimizer, 2)


def with_functions_of_torch_func(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = steps(net, optimizer, 3)
    net.eval()
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, weights, (x,)).square().mean()

    for x in batches(2):
        losses += [value.sum().item() for value in torch.func.grad(loss)(weights, x).values()]
        losses.append(torch.func.vmap(lambda row: net(row[None]).sum())(x).sum().item())
    net.train()
    return losses + steps(net, optimizer, 2)


def validating_in_inference_mode(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        losses.append(step(net, optimizer, x))
        net.eval()
        with torch.inference_mode():
            losses.append(net(x.double().to(torch.float32).reshape(-1, WIDTH)).contiguous().flatten().sum().item())
        net.train()
    return losses


# What they do with their state


def reading_and_loading_everything(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    """Reads everything in all ways while the loop runs, and goes on with what was loaded."""
    losses = steps(net, optimizer)
    average = copy.deepcopy(net)
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file)
    for name, value in net.state_dict().items():
        assert torch.equal(loaded["net"][name], value)
        assert torch.equal(pickle.loads(pickle.dumps(value)), value)
        assert value.tolist() == loaded["net"][name].tolist()
        assert np.array_equal(value.detach().numpy(), loaded["net"][name].numpy())
        assert value.untyped_storage().nbytes() == loaded["net"][name].untyped_storage().nbytes()
    for mean, parameter in zip(average.parameters(), net.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.1)
    net.load_state_dict(loaded["net"])
    optimizer.load_state_dict(loaded["optimizer"])
    losses += steps(net, optimizer)
    return [*losses, sum(parameter.sum().item() for parameter in average.parameters())]


def reading_the_optimizer_s_state(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    losses = []
    for x in batches():
        losses.append(step(net, optimizer, x))
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        states = [torch.load(file)["state"], copy.deepcopy(optimizer.state_dict())["state"]]
        states += [dict(optimizer.state), {**optimizer.state}, copy.copy(optimizer.state), optimizer.state | {}]
        states += [pickle.loads(pickle.dumps(optimizer)).state]
        for state in states:
            values = [value for inner in state.values() for value in inner.values()]
            losses.append(sum(value.sum().item() for value in values if isinstance(value, torch.Tensor)))
        del states, state, values
        assert repr(optimizer.state).startswith("defaultdict(")
    return losses


def holding_and_writing_the_optimizer_s_state(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    held = []
    losses = []
    for number, x in enumerate(batches(8)):
        losses.append(step(net, optimizer, x))
        inner = optimizer.state[net[1].up.weight]
        held.append(inner)
        if number == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if number == 5:
            del optimizer.state[net[0].up.weight]
            optimizer.state.pop(net[0].down.weight)
        for value in inner.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)
        losses += [v.sum().item() for values in held for v in values.values() if isinstance(v, torch.Tensor)]
    return losses


def with_rates_groups_and_hooks(net: nn.Sequential, optimizer: Optimizer) -> list[float]:
    extra = nn.Linear(WIDTH, WIDTH)
    calls: list[int] = []

    def halve(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01
            calls.append(len(group["params"]))

    losses = []
    for number, x in enumerate(batches(7)):
        if number == 3:
            optimizer.add_param_group({"params": list(extra.parameters())})
            optimizer.register_step_pre_hook(halve)
            optimizer.register_step_post_hook(halve)
        if number >= 3:
            extra(x).square().mean().backward()
        losses.append(step(net, optimizer, x))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return [*losses, *calls, *(group["lr"] for group in optimizer.param_groups)]


LOOPS: list[Loop] = [
    steps,
    with_other_batches_and_evaluation,
    with_python_s_randomness,
    with_hooks,
    with_accumulation_and_autocast,
    with_a_scaler,
    with_a_closure,
    going_backward_three_times,
    penalizing_gradients,
    with_hooks_on_saved_tensors,
    raising_in_the_middle,
    keeping_what_layers_return,
    reading_arrays_and_views,
    reading_what_nodes_saved,
    writing_past_autograd,
    writing_what_is_saved,
    with_functions_of_torch_func,
    validating_in_inference_mode,
    reading_and_loading_everything,
    reading_the_optimizer_s_state,
    holding_and_writing_the_optimizer_s_state,
    with_rates_groups_and_hooks,
]
