"""`python -m fdtensor.bench`."""

import sys

from fdtensor.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
