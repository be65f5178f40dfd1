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
        common, base = own.get(ALL, {}).get("common_batch"), None
        for name, of in own.items():
            if "max_batch" not in of:
                continue
            most = int(of["max_batch"]["value"])
            batches = (int(common["value"]) if common else 0, most)
            at = [found.get(f"{case}-b{b}", {}).get(name, {}) if b else {} for b in batches]
            rates = [one.get("tokens_per_s") for one in at]
            base = base or rates[1]
            peak = at[0].get("peak_bytes") or at[0].get("planned_bytes")
            body.append([
                case, f"`{name}`", cell(of["own_bytes"], "{:.1f}", GIB),
                cell(of["sequence_bytes"], "{:.2f}", GIB) if most else "",
                cell(peak, f"{{:.1f}} (batch {batches[0]})", GIB),
                str(most) if most else "out of memory",
                *(cell(rate, "{:,.0f}") for rate in rates),
                cell(rates[1], "{:.2f} x", base["value"]) if base else "",
            ])  # fmt: skip
            used += [*of.values(), *(row for one in at for row in one.values())]
    head = ["model", "optimizer, activations", "weights and state, GiB", "a sequence more, GiB",
            "peak, GiB", "largest batch", "tokens/s at the same batch", "tokens/s at the largest",
            "relative to the baseline"]  # fmt: skip
    return head, body, used


TABLES = {"activation_fit": Rendered(table, "fit")}
