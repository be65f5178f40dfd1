"""An 8B Llama on one GPU: with gradient release, without, and with optax.adamw in f32.

python -m benchmarks.run release --record FILE --profiles DIR   # on a GPU of 80 GB
python -m benchmarks.run release --draw                         # the picture, from the records

Each run is one of examples/train_llama.py in a process of its own. What does not fit is recorded
too. On a GPU, compiling is minutes shorter with
XLA_FLAGS="--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false".
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT, records
from benchmarks.suites.release import tables as release_tables

# name of the profile -> what differs
RUNS = {
    "release": "--optimizer flash_adamw --release",
    "ordinary": "--optimizer flash_adamw --clip 0",
    "optax": "--optimizer optax.adamw --clip 0",
}
FITS, OUT_OF_MEMORY = 0, 3  # exit codes


def command(name: str, args: argparse.Namespace) -> list[str]:
    """The command line of a run."""
    own = f"--preset {args.preset} --steps {args.steps} --account {RUNS[name]}".split()
    if args.record:
        own += ["--record", str(args.record)]
    if args.profiles:
        own += ["--memory-profile", str(args.profiles / f"llama-{args.preset}-{name}.pprof")]
    return [sys.executable, str(ROOT / "examples/train_llama.py"), *own]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", default="8b", help="of the example (default: 8b)")
    add("--steps", type=int, default=12, help="of each run (default: 12)")
    add("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="default: all")
    add("--record", type=Path, metavar="FILE", help="append records to a file")
    add("--profiles", type=Path, metavar="DIR", help="where to put memory profiles (pprof)")
    add("--draw", action="store_true", help=f"only draw {release_tables.PICTURE.name}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs each; ends with an error where one fails for anything but memory."""
    args = parse_arguments(arguments)
    if args.draw:
        files = sorted(records.RESULTS.glob("*.jsonl"))
        release_tables.draw([row for file in files for row in records.load(file)])
        return
    if args.profiles:
        args.profiles.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.runs:
        print(f"== {name}", flush=True)
        code = subprocess.run(command(name, args), cwd=ROOT, check=False).returncode
        failed += [name] if code not in (FITS, OUT_OF_MEMORY) else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")
