"""Device memory for one inference of one model: the one type for a budget."""

import msgspec


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workspace, which the model has during an inference, and a partition, which keeps its contents in between."""

    workspace_bytes: int
    partition_bytes: int = 0
    counted: bool = False
    """Whether parameters and state are counted, too: the workspace is one budget for everything, in which nothing has
    an address, as in a training step. Otherwise they have addresses in partition and workspace, and only inputs,
    activations and scratch are counted."""

    @property
    def nbytes(self) -> int:
        return self.workspace_bytes + self.partition_bytes
