"""The state of a training: parameters, buffers and optimizer state, a named tensor with a storage of its own each."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.weights import Manifest, Piece, Segment
from cohabit.runtime.memory import SpillBuffer

RNG: Final = "rng"
"""Name of the state that random ops read and change, so that they keep their order and are never computed again.

Its bytes mean nothing: the random numbers are those of torch's own generator."""

INITIALISED: Final = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "SGD")
"""Optimizers of torch whose state after a step on zeros, but for its counters, is the state before the first step."""


class StateTensor:
    """One of the user's tensors. While its bytes are under the plan's control, the user sees an empty tensor.

    Where programs run on another device's memory, or in a pool of their own, it stays empty until it comes back.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        if owner.untyped_storage().nbytes() != owner.nbytes or not owner.untyped_storage().resizable():
            owner.data = owner.data.clone()
        self.owner = owner
        self.dtype, self.shape, self.stride = owner.dtype, owner.shape, owner.stride()
        self.storage = owner.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self._fill: float | None = None

    def free_if_filled(self) -> None:
        """Free the bytes of a tensor whose elements are all equal; `save` makes them again."""
        first = self.owner.flatten()[0].item() if self.owner.numel() > 1 else None
        if first is not None and bool((self.owner == first).all()):
            self._fill = first
            self.storage.resize_(0)

    @property
    def is_here(self) -> bool:
        """Whether the bytes are in memory."""
        return self.storage.nbytes() == self.nbytes

    def save(self, buffer: SpillBuffer) -> None:
        """Copy the bytes to a buffer and release them; do nothing if they have left already."""
        if self._fill is not None:
            self.storage.resize_(self.nbytes)
            self.value().fill_(self._fill)
            self._fill = None
        if self.is_here:
            buffer.save(self.flat())
            self.storage.resize_(0)

    def load(self, buffer: SpillBuffer) -> None:
        """Bring the bytes back."""
        self.storage.resize_(self.nbytes)
        buffer.load(self.flat())

    def flat(self) -> torch.Tensor:
        """Return the bytes as a flat tensor; they must be there."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return flat.set_(self.storage, 0, (self.nbytes,), (1,))

    def hide(self) -> None:
        """Leave the user an empty tensor: one without bytes would end the process when it is read."""
        self.owner.data = torch.empty(0, dtype=self.dtype, device=self.owner.device)

    def show(self) -> None:
        """Give the user the bytes, which must be there."""
        self.owner.data = self.value()

    def fill(self, value: torch.Tensor, buffer: SpillBuffer) -> None:
        """Put a value of the same form into the buffer; the tensor has left memory."""
        self.storage.resize_(self.nbytes)
        self.value().copy_(value)
        self.save(buffer)

    def regain(self, owner: torch.Tensor) -> None:
        """Take what the user's tensor holds, if it is another now, or has other memory. Raises UnsupportedModel."""
        if owner.shape != self.shape or owner.dtype != self.dtype:
            raise UnsupportedModel(
                f"a tensor of the training is now {owner.dtype} {list(owner.shape)}, the step was captured for"
                f" {self.dtype} {list(self.shape)}; make a new trainer"
            )
        if owner.untyped_storage()._cdata != self.storage._cdata:
            self.value().copy_(owner.detach())
        self.owner = owner

    def value(self) -> torch.Tensor:
        """Return the tensor itself; its bytes must be there."""
        empty = torch.empty(0, dtype=self.dtype, device=self.storage.device)
        return empty.set_(self.storage, 0, self.shape, self.stride)


class TrainingState:
    """Tensors by name: `layer.weight` of the model, `optimizer.layer.weight.exp_avg` of its optimizer.

    Raises UnsupportedModel where two of them share memory, or the optimizer's first state cannot be made.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        parameters = dict(model.named_parameters())
        self._parameters = parameters
        self._names = {id(p): name for name, p in parameters.items()}
        optimized = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) not in self._names for p in optimized):
            raise UnsupportedModel("the optimizer has a parameter that is not the model's")
        owners: dict[str, torch.Tensor] = {**parameters, **dict(model.named_buffers())}
        self.of_module = list(owners)
        self.trained = [self.name_of(p) for p in optimized if p.requires_grad]
        _require_own_storages(owners)
        self.tensors = {name: StateTensor(owner) for name, owner in owners.items()}
        self._of_optimizer: dict[tuple[str, str], str] = {}
        """Names of the optimizer's tensors, by parameter and key."""
        self._begun: list[torch.Tensor] = []
        """Parameters whose optimizer state was made here."""
        with self.undone_on_failure(optimizer):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    self._add_optimizer_state(optimizer, group, p)
        self.tensors[RNG] = StateTensor(torch.zeros(1, dtype=torch.int64))

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name in the model."""
        return self._names[id(parameter)]

    def optimizer_state(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
    ) -> defaultdict[torch.Tensor, Any]:
        """Return an optimizer's state with `trained` parameters as its keys, and `values` as its tensors."""
        state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for parameter, own in optimizer.state.items():
            name = self.name_of(parameter)
            if name in trained:
                names = {key: self._of_optimizer.get((name, key)) for key in own}
                state[trained[name]] = {k: own[k] if n is None else values[n] for k, n in names.items()}
        return state

    @contextmanager
    def undone_on_failure(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Leave the optimizer as it was if no trainer comes of it."""
        try:
            yield
        except BaseException:
            for parameter in self._begun:
                del optimizer.state[parameter]
            self._begun.clear()
            raise

    def regain(self, optimizer: torch.optim.Optimizer) -> None:
        """Take what the user's tensors hold; `load_state_dict` puts others in the place of an optimizer's.

        Raises UnsupportedModel where they have another form.
        """
        for tensor in self.tensors.values():
            tensor.regain(tensor.owner)
        for (parameter, key), name in self._of_optimizer.items():
            self.tensors[name].regain(optimizer.state[self._parameters[parameter]][key])

    def manifest(self) -> Manifest:
        """Describe the tensors as segments, one each; nothing of them is in a file."""
        segments, offset = [], 0
        for name, tensor in self.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            piece = Piece(name, dtype, tuple(tensor.shape), tensor.stride, 0, tensor.nbytes)
            segments.append(Segment(offset, tensor.nbytes, (piece,)))
            offset += tensor.nbytes
        return Manifest("training", tuple(segments), ())

    def _add_optimizer_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> None:
        is_new = parameter.requires_grad and not optimizer.state.get(parameter)
        if is_new:
            optimizer.state[parameter] = first_state(optimizer, group, parameter)
            self._begun.append(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                name = f"optimizer.{self.name_of(parameter)}.{key}"
                self._of_optimizer[self.name_of(parameter), key] = name
                self.tensors[name] = StateTensor(value)
                if is_new:
                    self.tensors[name].free_if_filled()


def first_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Return the state that an optimizer has for a parameter before its first step, in which it makes it.

    It is what one of its kind leaves after a step on zeros, with its counters set back. Raises UnsupportedModel.
    """
    kind: Any = type(optimizer)
    if kind.__name__ not in INITIALISED or not kind.__module__.startswith("torch.optim."):
        raise UnsupportedModel(
            f"what state {kind.__name__} begins with is not known; take one step with it before, as usual"
        )
    if group.get("momentum") and group.get("dampening"):
        raise UnsupportedModel(
            "SGD with dampening does not dampen its first step, so that the first step is another program than the"
            " others; take it before, as usual"
        )
    stand_in = torch.zeros_like(parameter)
    stand_in.grad = torch.zeros_like(parameter)
    like = kind([{**group, "params": [stand_in], "foreach": False, "fused": False}])
    like.step()
    state: dict[str, Any] = like.state[stand_in]
    if isinstance(state.get("step"), torch.Tensor):
        state["step"].zero_()
    return state


def _require_own_storages(owners: Mapping[str, torch.Tensor]) -> None:
    known: dict[int, str] = {}
    for name, tensor in owners.items():
        other = known.setdefault(tensor.untyped_storage()._cdata, name)
        if other != name:
            raise UnsupportedModel(
                f"{name} and {other} share their memory, so that they cannot leave it one by one; give each a tensor of"
                " its own"
            )
