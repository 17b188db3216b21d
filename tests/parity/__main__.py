"""`python -m tests.parity`: the rows; `python -m tests.parity ROW [FIRST_SEED [SEEDS]]`: runs one, by default five
seeds of each engine.
"""

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.parity import rows


def main(arguments: list[str]) -> int:
    if not arguments:
        for name, row in rows.ROWS.items():
            print(f"{name:12} {row.about}")
        return 0
    name, first, seeds = arguments[0], 0, rows.SEEDS
    if arguments[1:]:
        first, seeds = map(int, [*arguments[1:], seeds][:2])
    if name not in rows.ROWS:
        print(f"there is no row {name!r}: {', '.join(rows.ROWS)}", file=sys.stderr)
        return 2
    print(f"{name}: {rows.ROWS[name].about}")
    checks = rows.run(name, range(first, first + seeds))
    for check in checks:
        verdict = "holds  " if check.holds else f"DIFFERS [{', '.join(check.failed)}]"
        print(f"  {verdict} {check.name}: {check.seen} ({check.bound})")
    print(f"{time.process_time():.0f} s of processor time; versions: {rows.versions()}")
    return int(not all(check.holds for check in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
