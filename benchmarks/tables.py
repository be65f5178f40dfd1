"""Writes the tables of the README and docs/ from the records, between `table:` markers."""

import argparse
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    activation_tables,
    claims_coat,
    claims_coat_activations,
    claims_gaussws,
    claims_q_adam_mini,
    claims_stable_adamw,
    claims_switchback,
    end_to_end_tables,
    findings,
    formats_tables,
    linear_tables,
    mesh_tables,
    noise_tables,
    records,
    release_tables,
    step_tables,
    targets,
)
from benchmarks import claims as claims_of_papers
from benchmarks.records import on_gpus

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/activations.md",
    "docs/architecture.md",
    "docs/choosing.md",
    "docs/cpu_speed.md",
    "docs/gpu_speed.md",
    "docs/layers.md",
    "docs/memory.md",
    "docs/noise.md",
    "docs/sharding.md",
    "docs/training_speed.md",
    "docs/claims.md",
)
MARKED = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def newest(rows: list[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    """Records that match, the last one of each case, implementation, metric, seed and device."""
    latest: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if all(row.get(key) == value for key, value in wanted.items()):
            key = tuple(row.get(k) for k in ("device", "case", "impl", "metric", "seed", "jax"))
            latest[key] = row
    return list(latest.values())


def markdown(head: list[str], body: list[list[str]]) -> str:
    """A table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


def source(rows: list[dict[str, Any]]) -> str:
    """Return the line with the device, JAX version and commit of records."""
    where = sorted({f"{r['device']}, jax {r['jax']}, commit {r['commit']}" for r in rows})
    return "\n" + "; ".join(where) + ".\n"


def memory(rows: list[dict[str, Any]]) -> str:
    """GiB of weights and state of Llama-3.1-8B, beside the paper's Table 4."""
    found = newest(rows, bench="memory", case="llama-3.1-8b/adamw")
    impls = list(dict.fromkeys(r["impl"] for r in found))
    value = {(r["impl"], r["metric"]): r["value"] for r in found}
    paper = {r["impl"]: r.get("paper") for r in found if r["metric"] == "state_gib"}
    body = [
        [
            impl,
            f"{value[impl, 'params_gib']:.1f}",
            f"{value[impl, 'state_gib']:.1f}",
            f"{value[impl, 'bytes_per_param']:.2f}",
            f"{paper[impl]:.1f}" if paper[impl] else "",
        ]
        for impl in impls
    ]
    head = ["Llama-3.1-8B, AdamW", "weights GiB", "state GiB", "bytes/param", "paper: state GiB"]
    return markdown(head, body) + source(found)


def cpu_step(rows: list[dict[str, Any]]) -> str:
    """Milliseconds and compile seconds of a step on a CPU."""
    found = [r for r in newest(rows, bench="step") if r["device"].startswith("cpu")]
    body = [
        [
            r["case"],
            r["impl"],
            r["jax"],
            {"device_ms": "step", "compile_s": "compilation"}[r["metric"]],
            f"{r['value']:.1f} {r['unit']}",
            f"{r['ratio_to_optax']:.2f}",
        ]
        for r in found
    ]
    columns = ["case", "implementation", "jax", "of", "time", "x optax"]
    return markdown(columns, body) + source(found)


def cpu_compile(rows: list[dict[str, Any]]) -> str:
    """CPU time and temporaries of compiling steps of many leaves."""
    found = newest(rows, bench="compile")
    value = {(r["case"], r["impl"], r["jax"], r["metric"]): r["value"] for r in found}
    body = [
        [
            *(case, impl, version),
            f"{value[case, impl, version, 'cpu_ms_per_leaf']:.1f} ms",
            f"{value[case, impl, version, 'temp_bytes'] / 2**20:.2f} MiB",
        ]
        for case, impl, version in dict.fromkeys(key[:3] for key in value)
    ]
    columns = ["leaves", "step", "jax", "CPU time a leaf", "temporaries"]
    return markdown(columns, body) + source(found)


def masters(rows: list[dict[str, Any]]) -> str:
    """Time of a step by how its master weights are rounded."""
    found = newest(rows, bench="masters")
    body = [
        [row["case"], row["impl"], f"{row['value']:.2f} ms", f"{row['ratio_to_nearest']:.3f}"]
        for row in found
    ]
    return markdown(["step", "kernel and rounding", "time", "to nearest"], body) + source(found)


def checksums(rows: list[dict[str, Any]]) -> str:
    """Time of saving a checkpoint with checksums and without."""
    found = newest(rows, bench="checkpoint", metric="save_s")
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
    return markdown(head, body) + source(found)


def train(rows: list[dict[str, Any]]) -> str:
    """Validation loss of the demo over seeds, ours and f32."""
    found = newest(rows, bench="train", metric="val_loss", case="demo/adamw")
    runs: dict[tuple[str, str, str], list[float]] = {}
    for row in found:
        runs.setdefault((row["case"], row["device"], row["impl"]), []).append(row["value"])
    body = []
    for (case, device, impl), values in runs.items():
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
        mean = f"{statistics.mean(values):.4f} ± {error:.4f}"
        body.append([case, device, impl, str(len(values)), mean])
    return markdown(["model", "device", "optimizer", "seeds", "validation loss"], body) + source(
        found
    )


def claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of FlashOptim's claims and our measurements."""
    body, used = claims_of_papers.table(newest(rows))
    head = ["FlashOptim", "the paper says", "we measured", ""]
    return markdown(head, body) + source(used)


def stable_adamw_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of StableAdamW's claims on loss spikes and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_stable_adamw.CLAIMS)
    head = ["StableAdamW", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def q_adam_mini_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of Q-Adam-mini's claims on 8-bit moments and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_q_adam_mini.CLAIMS)
    head = ["Q-Adam-mini", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def coat_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of COAT's claims on 8-bit states and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_coat.CLAIMS)
    head = ["COAT", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def coat_activations_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of COAT's claims on FP8 activations and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_coat_activations.CLAIMS)
    head = ["COAT", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def switchback_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of SwitchBack's claims on 8-bit linear layers and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_switchback.CLAIMS)
    head = ["SwitchBack", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def gaussws_claims(rows: list[dict[str, Any]]) -> str:
    """Return the table of GaussWS' claims on noise on weights and our measurements."""
    body, used = claims_of_papers.table(newest(rows), claims_gaussws.CLAIMS)
    head = ["GaussWS", "the paper says", "we measured", ""]
    return markdown(head, body) + (source(used) if used else "")


def pairs(rows: list[dict[str, Any]]) -> str:
    """Every training run in two implementations over the same seeds."""
    body, used = findings.all_pairs(newest(rows, bench="train"))
    head = ["run", "device", "against", "metric", "seeds", "means and paired difference", ""]
    return markdown(head, body) + source(used)


def release(rows: list[dict[str, Any]]) -> str:
    """Return the table of the memory of an 8B model's step."""
    head, body, used = release_tables.table(rows)
    if not used:
        return "Nothing is recorded yet: `python -m benchmarks.bench_release` on a GPU of 80 GB.\n"
    return markdown(head, body) + source(used)


def _of_linear(
    rows: list[dict[str, Any]],
    make: Callable[[list[dict[str, Any]]], tuple[list[str], list[list[str]]]],
) -> str:
    """A table of bench_linear's records on GPUs."""
    used = on_gpus(newest(rows, bench="linear"))
    head, body = make(used)
    if not body:
        return "Nothing is recorded yet: `python -m benchmarks.bench_linear --alone` on a GPU.\n"
    return markdown(head, body) + source(used)


def _of(module: Any, name: str, usual: str) -> Callable[[list[dict[str, Any]]], str]:
    """A table of a module that has `TABLES`, and the `COMMANDS` that make their records."""

    def table(rows: list[dict[str, Any]]) -> str:
        head, body, used = module.TABLES[name](newest(rows))
        if not body:
            command = module.COMMANDS.get(name, usual)
            return f"Nothing is recorded yet: `python -m benchmarks.{command} --record` on a GPU.\n"
        return markdown(head, body) + source(used)

    return table


TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "memory": memory,
    "cpu_step": cpu_step,
    "cpu_compile": cpu_compile,
    "masters": masters,
    "checksums": checksums,
    "train": train,
    "claims": claims,
    "claims_stable_adamw": stable_adamw_claims,
    "claims_q_adam_mini": q_adam_mini_claims,
    "claims_coat": coat_claims,
    "claims_coat_activations": coat_activations_claims,
    "claims_switchback": switchback_claims,
    "claims_gaussws": gaussws_claims,
    "pairs": pairs,
    "release": release,
    "linear": lambda rows: _of_linear(rows, linear_tables.layers),
    "linear_targets": lambda rows: _of_linear(rows, linear_tables.targets),
    "linear_operations": lambda rows: _of_linear(rows, linear_tables.operations),
    "gpu_step": step_tables.gpu_step,
    "gpu_step_details": step_tables.gpu_step_details,
    "gpu_targets": targets.table,
    "fsdp": mesh_tables.fsdp,
    **{
        name: _of(activation_tables, name, "bench_activations") for name in activation_tables.TABLES
    },
    **{name: _of(end_to_end_tables, name, "bench_end_to_end") for name in end_to_end_tables.TABLES},
    **{name: _of(noise_tables, name, "bench_noise") for name in noise_tables.TABLES},
    **formats_tables.TABLES,
}


def rendered(text: str, rows: list[dict[str, Any]]) -> str:
    """A page with its tables written anew."""
    return MARKED.sub(lambda m: m[1] + TABLES[m[2]](rows) + m[3], text)


def all_records() -> list[dict[str, Any]]:
    """Every stored record."""
    return [row for path in sorted(records.RESULTS.glob("*.jsonl")) for row in records.load(path)]


def main() -> None:
    """Rewrites the pages; with --check, fails where one is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    rows, stale = all_records(), []
    for page in (ROOT / name for name in PAGES):
        if not page.exists():
            continue
        text = page.read_text(encoding="utf-8")
        new = rendered(text, rows)
        stale += [page.name] if new != text else []
        if not check:
            page.write_text(new, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run python -m benchmarks.tables")


if __name__ == "__main__":
    main()
