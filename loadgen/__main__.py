"""`python -m cohabit.loadgen`."""

import sys

from cohabit.loadgen.cli import main

sys.exit(main())
