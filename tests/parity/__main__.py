"""Compares whole runs of vit_jax with those of other engines (docs/fidelity.md).

python -m tests.parity list
python -m tests.parity run ROW [--first_seed=20] [--seeds=10] [--folder=tests/parity/runs]
python -m tests.parity judge [--folder=tests/parity/runs]
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# PyTorch's networks are so small here that several threads need seven times the processor time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.parity import comparison, rows

RUNS = pathlib.Path(__file__).parent / "runs"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names the rows")
    run = commands.add_parser("run", help="trains a row's runs with both engines")
    run.add_argument("row", choices=rows.ROWS)
    run.add_argument("--first_seed", type=int, default=rows.FIRST_SEED)
    run.add_argument("--seeds", type=int, default=rows.SEEDS)
    judge = commands.add_parser("judge", help="says by the rule which rows differ")
    for command in (run, judge):
        command.add_argument("--folder", type=pathlib.Path, default=RUNS)
    options = parser.parse_args()
    if options.command == "list":
        for name, row in rows.ROWS.items():
            print(f"{name:16} {row.about}")
    elif options.command == "judge":
        for family, names in rows.families().items():
            _judge(family, names, options.folder)
    elif rows.ROWS[options.row].judge:
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        rows.run(options.row, seeds, options.folder)
        print(f"{time.process_time():.0f} s of processor time; versions: {rows.versions()}")
    else:
        _compare_draws(rows.ROWS[options.row], options.first_seed)


def _judge(family: str, names: list[str], folder: pathlib.Path) -> None:
    print(f"{family}: {2 * len(names)} tests, corrected by Holm at {comparison.LEVEL:.0%}\n")
    print("\n".join(rows.table(names, folder)))
    print("\ndifferences of each tenth in standard errors, which judge nothing:")
    for name in filter(lambda name: rows.is_complete(name, folder), names):
        curves = rows.stored(name, folder)
        for quantity in curves["ours"]:
            both = (curves[engine][quantity] for engine in rows.ENGINES)
            print(f"  {name:16} {quantity:9} {comparison.describe_tenths(*both)}")
    print()


def _compare_draws(row: rows.Row, seed: int) -> None:
    draws = (row.engine("ours")(seed), row.engine("theirs")(seed + rows.OTHER_SEEDS))
    for compared in comparison.compare_draws(*draws):
        verdict = "DIFFERS" if compared.differs else "no difference found"
        print(
            f"  {compared.name}: {compared.seen}, p = {compared.p_value:.2g} "
            f"(bound {compared.bound:.1g}): {verdict}"
        )


if __name__ == "__main__":
    main()
