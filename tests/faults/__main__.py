"""`python -m tests.faults [PHASE ...] [--fault F] [--timeout S]`: the table of faults."""

from __future__ import annotations

import argparse

from tests.faults.cell import run_cell
from tests.faults.partition import possible
from tests.faults.phases import DIFFER, PHASES
from tests.faults.rank import FAULTS
from tests.faults.table import printed, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("phases", nargs="*", metavar="PHASE", help=", ".join(PHASES))
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--timeout", type=float, default=4.0, help="seconds that ranks wait")
    parser.add_argument("--texts", action="store_true", help="every error in full")
    options = parser.parse_args()
    faults = options.fault or [f for f in FAULTS if f != "partition" or possible()]
    cells = []
    for phase in options.phases or PHASES:
        for fault in faults:
            nothing = phase not in DIFFER if fault == "differ" else phase == "load"
            if fault in ("differ", "swap") and nothing:  # to differ in, or to swap it with
                continue
            cell = run_cell(phase, fault, options.timeout)
            cells.append(cell)
            print(printed(cell), flush=True)
            if options.texts:
                print("\n\n".join([*cell.errors, ""]), flush=True)
                for answer in cell.answers:
                    print(answer.get("trace", ""), end="")
    print(f"\n{table(cells)}")


if __name__ == "__main__":
    main()
