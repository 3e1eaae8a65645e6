"""`python -m fdtensor`: the command line."""

import sys

from fdtensor.cli import main

sys.exit(main())
