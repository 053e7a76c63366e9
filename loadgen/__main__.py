"""`python -m cohabit.loadgen`."""

import sys

from cohabit.loadgen.cli import main

if __name__ == "__main__":  # sender processes import this module again
    sys.exit(main())
