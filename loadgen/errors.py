"""Errors of loadgen.

LoadgenError
├── UsageError          a wrong command line; exit status 2
│   └── ModelRefused    no valid request can be made for a model
├── UnavailableModel    a package with a model's code or weights is not installed
└── ServerFailed        the server does not start, or does not answer
"""


class LoadgenError(Exception):
    """Base of loadgen's errors, reported without a traceback."""


class UsageError(LoadgenError):
    pass


class ModelRefused(UsageError):
    pass


class UnavailableModel(LoadgenError):
    pass


class ServerFailed(LoadgenError):
    pass
