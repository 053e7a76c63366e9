"""The runtime's errors.

CohabitError
├── ArchiveError         a model.pt2 cannot be used: damaged, pickled, not a plain program
│   └── UnsupportedModel   a valid program that cannot be planned; the message has the cause and the remedy
├── UnsupportedPlan      a valid plan for another runtime
├── DeviceError          a kernel or a copy failed while an inference ran
│   ├── StoreChanged       a weights file is not the one that was loaded
│   └── DeviceLost         nothing can run on the device until the process is restarted
├── UnusableTraining     a training's batches have ended, or its checkpoints cannot be written or resumed
├── CaptureFailed        a program's kernels cannot become one graph; they are issued one by one instead
└── MemoryExceeded       an allocation would leave its region
"""

from cohabit.planner.errors import CohabitError


class ArchiveError(CohabitError):
    """A model archive is damaged, or has content that is never loaded (pickles, binaries)."""


class UnsupportedModel(ArchiveError):
    """The program is valid, but breaks a rule that planning relies on."""


class UnsupportedPlan(CohabitError):
    """A valid plan needs a feature that this runtime lacks; the message says how to plan without it."""


class DeviceError(CohabitError):
    """A kernel or a copy failed while an inference ran. The program can be run again."""


class StoreChanged(DeviceError):
    """A weights file was changed or truncated after its model was loaded: models must be loaded again."""


class DeviceLost(DeviceError):
    """The device no longer responds, or rejects everything: only a new process can use it again."""


class UnusableTraining(CohabitError):
    """The batches of a training have ended, or a checkpoint cannot be written or resumed."""


class CaptureFailed(CohabitError):
    """Capturing a program into a graph failed; the message has the cause."""


class MemoryExceeded(CohabitError):
    """An address or an allocation lies outside its region."""
