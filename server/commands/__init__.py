"""The commands, one module each: `add_flags` declares the flags, `run` returns the exit status."""

from cohabit.planner.errors import CohabitError
from cohabit.server.errors import ConfigError, RepositoryError

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def exit_status(error: CohabitError) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError | RepositoryError) else EXIT_FAILED
