"""The table of training frameworks: their AdamW and `flash_adamw`, by `make test-frameworks`."""

from benchmarks.records import Rows, grouped, select
from benchmarks.render import Table, alone

IMPLS = {  # as recorded -> as shown
    "its AdamW, f32": "the framework's AdamW, f32",
    "flash_adamw, f32 weights": "`flash_adamw`, f32 weights",
    "flash_adamw, bf16 weights": "`flash_adamw`, bf16 weights",
}


def frameworks(rows: Rows) -> Table:
    used = select(rows, bench="frameworks")
    head = ["framework", "loss of step 1"]
    head += [f"{what}: {impl}" for what in ("last losses", "bytes") for impl in IMPLS.values()]
    body = []
    for case, impls in sorted(grouped(used, "case", "impl", "metric").items()):
        rows_of = [impls[impl] for impl in IMPLS]
        losses = [f"{row['loss']['value']:.3f}" for row in rows_of]
        sizes = [f"{row['bytes_per_parameter']['value']:.2f}" for row in rows_of]
        body.append([case, f"{rows_of[0]['first_loss']['value']:.3f}", *losses, *sizes])
    return head, body, used


TABLES = {"frameworks": alone(frameworks)}
