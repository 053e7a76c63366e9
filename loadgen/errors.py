"""What can go wrong in loadgen.

LoadgenError
├── UsageError          the command line asks for something impossible; exit code 2
│   └── ModelRefused    no valid request can be made for a model
├── UnavailableModel    a package with a model's code or weights is not installed
└── ServerFailed        the server that was to be measured does not start, or does not answer
"""


class LoadgenError(Exception):
    """Base of all errors that are reported without a traceback."""


class UsageError(LoadgenError):
    pass


class ModelRefused(UsageError):
    pass


class UnavailableModel(LoadgenError):
    pass


class ServerFailed(LoadgenError):
    pass
