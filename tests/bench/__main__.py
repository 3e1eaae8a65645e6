"""`python -m tests.bench`."""

import os
import sys

from tests.bench.command import main

if __name__ == "__main__":
    os.environ["FDTENSOR_CACHE"] = "off"  # what is measured is the choice
    sys.exit(main(sys.argv[1:]))
