"""The time that checksums of a checkpoint take, from checkpoint."""

from benchmarks.records import Rows, select
from benchmarks.render import Rendered, Table


def checksums(rows: Rows) -> Table:
    """Time of saving a checkpoint with checksums and without."""
    found = select(rows, bench="checkpoint", metric="save_s")
    body = [
        [
            row["impl"],
            f"{row['value']:.2f} s",
            f"{100 * row['share']:.1f} %",
            f"{100 * (row['ratio'] - 1):+.1f} %",
        ]
        for row in found
    ]
    head = ["saving", "time", "summing, of the rest", "median of pairs"]
    return head, body, found


TABLES = {"checksums": Rendered(checksums, "checkpoint")}
