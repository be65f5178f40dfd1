"""The size of a checkpoint (FlashOptim, section 3.4), from the records of checkpoint."""

from benchmarks.claims.findings import F32, NOT, OURS, PAPER, SAME, Finding, Measure, Rows, all_of
from benchmarks.records import last

SHAPES, FILE = "llama-2-7b/adamw", "normal/adamw"
BILLION = 7  # parameters, as the paper rounds them


def of_7b(plain_gb: float, flash_gb: float) -> Measure:
    """GB of a model of 7 billion parameters, from bytes a parameter of Llama-2-7B.

    The paper leaves out the scales, an eighth of a byte a parameter.
    """

    def measure(rows: Rows) -> Finding | None:
        wanted = {"bench": "checkpoint", "case": SHAPES, "metric": "bytes_per_param"}
        found = all_of(*(last(rows, impl=name, **wanted) for name in (F32, PAPER, OURS)))
        if found is None:
            return None
        before, after, default = (BILLION * row["value"] for row in found)
        same = round(before) == plain_gb and round(after - BILLION / 8) == flash_gb
        text = (
            f"{before:.1f} → {after:.1f} GB with scales ({default:.1f} with our default storage); "
            f"{after - BILLION / 8:.1f} GB without"
        )
        return Finding(text, SAME if same else NOT, found)

    return measure


def on_disk(rows: Rows) -> Finding | None:
    """Bytes of files a parameter: Orbax compresses both."""
    wanted = {"bench": "checkpoint", "case": FILE, "metric": "disk_bytes_per_param"}
    found = all_of(*(last(rows, impl=name, **wanted) for name in (F32, PAPER, OURS)))
    if found is None:
        return None
    before, after, default = (row["value"] for row in found)
    text = (
        f"{before:.2f} → {after:.2f} bytes of files a parameter ({default:.2f} with our default "
        "storage), compressed by Orbax"
    )
    return Finding(text, SAME if after / before <= 0.5 else NOT, found)
