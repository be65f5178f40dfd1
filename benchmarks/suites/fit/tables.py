"""Table 8's shape: what fits on one GPU by optimizer and activations, from fit's records."""

from benchmarks.records import Rows, alike, grouped, on_gpus, select
from benchmarks.render import GIB, Rendered, Table, cell

BASE = "optax.adamw"
COAT = "coat_adamw+fp8"
SPLIT, COAT_STATES_F32, COAT_F32 = "split_adamw", "coat_adamw-f32", "coat_adamw-f32+fp8"
ALL = "all"


def fits(rows: Rows) -> dict[str, dict[str, dict[str, dict]]]:
    """case -> configuration -> metric -> record, of the device measured last for each case."""
    here = select(on_gpus(rows), bench="fit")
    cases = dict.fromkeys(row["case"] for row in here)
    newest = [row for case in cases for row in alike(select(here, case=case))]
    return grouped(newest, "case", "impl", "metric")


def table(rows: Rows) -> Table:
    found, body, used = fits(rows), [], []
    for case, own in found.items():
        base = None
        for name, of in own.items():
            if "max_batch" not in of:
                continue
            most = int(of["max_batch"]["value"])
            rate = found.get(f"{case}-b{most}", {}).get(name, {}).get("tokens_per_s")
            base = base or rate
            body.append([
                case, f"`{name}`", cell(of["own_bytes"], "{:.1f}", GIB),
                cell(of["sequence_bytes"], "{:.2f}", GIB) if most else "",
                str(most) if most else "out of memory", cell(rate, "{:,.0f}"),
                cell(rate, "{:.2f} x", base["value"]) if base else "",
            ])  # fmt: skip
            used += [of[metric] for metric in ("own_bytes", "sequence_bytes", "max_batch")]
            used += [rate] if rate else []
    head = ["model", "optimizer, activations", "weights and state, GiB", "a sequence more, GiB",
            "largest batch", "tokens/s", "relative to the baseline"]  # fmt: skip
    return head, body, used


TABLES = {"activation_fit": Rendered(table, "fit")}
