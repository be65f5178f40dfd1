"""Claims of FlashOptim, with our measurements or why we have none: the table of docs/claims.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.claims import checkpoint as claims_checkpoint
from benchmarks.claims import findings
from benchmarks.claims.findings import Finding, Measure, Rows

NOT_MEASURED, NOT_TRIED = "not measured yet", "not tried here"
LLAMA, GPT2_ADAMW, GPT2_LION = "llama-3.1-8b/adamw", "gpt2-124m/adamw", "gpt2-124m/lion"
SPLIT_ALONE = "lowmem, weight split alone"
CODES_ALONE = "lowmem, 8-bit moments alone (paper's)"


@dataclass(frozen=True)
class Claim:
    """A claim: where in the paper, what it says, and how to measure it or why that can't be."""

    where: str
    says: str
    how: Measure | str

    def finding(self, rows: Rows) -> Finding:
        """Return the finding of the claim from the records."""
        if isinstance(self.how, str):
            return Finding(self.how, NOT_TRIED, [])
        return self.how(rows) or Finding("", NOT_MEASURED, [])


def _memory() -> Iterator[Claim]:
    both = findings.bytes_a_parameter
    yield Claim(
        "Table 1, AdamW",
        "16 → 7 bytes a parameter (weights, gradients, state; no scales)",
        both(LLAMA, "16", "7", gradients=True),
    )
    yield Claim(
        "Table 1, SGD with momentum",
        "12 → 6 bytes a parameter",
        both("llama-3.1-8b/sgd", "12", "6", gradients=True),
    )
    yield Claim("Table 1, gradient release", "5 bytes (SGD: 4)", findings.gradient_release)
    yield Claim(
        "§3.2, scales", "1/16 = 0.0625 bytes a parameter and moment", findings.scale_overhead
    )
    yield Claim(
        "§3.4, checkpoint with AdamW",
        "12 → 5 bytes a parameter (no scales)",
        both(LLAMA, "12", "5", gradients=False),
    )
    yield Claim(
        "§3.4, checkpoint of a 7B model",
        "84 → 35 GB (no scales)",
        claims_checkpoint.of_7b(84, 35),
    )
    yield Claim("Abstract, checkpoint size", "cut by more than half", claims_checkpoint.on_disk)
    gib = findings.gib
    llama, gpt2 = "Llama-3.1-8B, AdamW", "GPT-2 124M"
    rows = [
        ("4", f"{llama}: weights", LLAMA, "params_gib", "29.9", "15.0", findings.PAPER),
        ("4", f"{llama}: state", LLAMA, "state_gib", "59.8", "23.4", findings.PAPER),
        ("4", f"{llama}: state, weight split alone", LLAMA, "state_gib", "59.8", "67.3",
         SPLIT_ALONE),
        ("4", f"{llama}: state, 8-bit moments alone", LLAMA, "state_gib", "59.8", "15.9",
         CODES_ALONE),
        ("6", "ResNet-50, SGD: state", "resnet-50/sgd", "state_gib", "0.10", "0.05",
         findings.PAPER),
        ("6", "ResNet-50, AdamW: state", "resnet-50/adamw", "state_gib", "0.19", "0.08",
         findings.PAPER),
        ("8", f"{gpt2}, AdamW: state", GPT2_ADAMW, "state_gib", "0.93", "0.36", findings.PAPER),
        ("8", f"{gpt2}, Lion: state", GPT2_LION, "state_gib", "0.46", "0.24", findings.PAPER),
    ]  # fmt: skip
    for table, what, case, metric, plain, flash, impl in rows:
        yield Claim(
            f"Table {table}, {what}",
            f"{plain} → {flash} GiB",
            gib(case, metric, plain, flash, impl),
        )
    yield Claim(
        "Table 4 and Figure 1, peak of finetuning Llama-3.1-8B",
        "175.2 → 112.9 GiB",
        "needs several GPUs with the weights sharded over them, and the finetuning itself",
    )


def _speed() -> Iterator[Claim]:
    rows = [
        ("8", "GPT-2 124M, AdamW", GPT2_ADAMW, 5.7, 5.9),
        ("8", "GPT-2 124M, Lion", GPT2_LION, 4.3, 4.5),
        ("6", "ResNet-50, SGD", "resnet-50/sgd", 8.4, 9.0),
        ("6", "ResNet-50, AdamW", "resnet-50/adamw", 11.9, 12.2),
        ("4", "Llama-3.1-8B, AdamW (ours: Llama-3.2-1B)", "llama-3.2-1b/adamw", 12.5, 11.5),
    ]
    for table, what, case, plain, flash in rows:
        yield Claim(
            f"Table {table}, step of {what}",
            f"{plain} → {flash} ms (x {flash / plain:.2f})",
            findings.step_time(case, plain, flash),
        )


def _training() -> Iterator[Claim]:
    yield Claim(
        "Table 3, AdamW",
        "validation loss 3.263 ± 0.001 → 3.265 ± 0.001 (+0.06 %)",
        findings.training("gpt-42m batch=8/adamw", "val_loss"),
    )
    yield Claim(
        "Table 3, Figures 2 and 7, Lion",
        "validation loss 3.240 ± 0.002 → 3.240 ± 0.001 (0.00 %)",
        findings.training("gpt-42m batch=8/lion", "val_loss"),
    )
    yield Claim(
        "Table 2, SGD",
        "no loss: ImageNet accuracy 77.01 ± 0.02 → 77.16 ± 0.09 %",
        findings.training("digits-convnet/sgd", "val_accuracy"),
    )
    yield Claim(
        "Figure 2b, SGD",
        "nearly identical loss curves",
        findings.training("digits-convnet/sgd", "val_loss"),
    )
    reasons = [
        ("Table 3, the same model and text", "GPT-2 124M, 20,000 steps of 0.5M tokens",
         "needs FineWeb's 10 billion tokens and days of a GPU; above, a smaller model"),
        ("Table 3, in-context learning", "AdamW 44.0 → 45.0, Lion 44.0 → 44.7 %",
         "needs that model and eight benchmarks' data"),
        ("Table 2, Figures 2 and 6, ImageNet", "SGD 77.01 → 77.16, AdamW 75.51 → 75.67 % accuracy",
         "needs ImageNet; above, a convnet on digits"),
        ("Table 2, Figures 2 and 8, GSM8k", "75.09 ± 0.40 → 74.98 ± 0.77 % accuracy",
         "needs the weights of Llama-3.1-8B, 26 billion tokens and many GPUs"),
    ]  # fmt: skip
    yield from (Claim(*row) for row in reasons)


def _codes() -> Iterator[Claim]:
    def split(target: str, scheme: str, says: str, holds: findings.Holds) -> Claim:
        where = f"Figure 3, {target} weight: mean relative error of an f32"
        return Claim(where, says, findings.split_error(target, scheme, holds))

    yield split("bf16", "ulp-32", "16-bit correction: under 1e-9", lambda e: e < 1e-9)
    yield split("bf16", "float", "bf16 correction: over 1e-6", lambda e: e > 1e-6)
    yield split("bf16", "ulp-24", "8-bit correction: like the bf16 one", lambda e: 1e-6 < e < 1e-5)
    yield Claim("§4.4, 16-bit correction of bf16", "99.92 % bit for bit", findings.exact_share)
    yield split("fp16", "ulp-32", "16-bit correction: none (normal range)", lambda e: e == 0)
    yield split("fp16", "ulp-24", "8-bit correction: under 1e-6", lambda e: e < 1e-6)
    yield Claim(
        "Figure 4, momentum",
        "companding lowers the error for every optimizer",
        findings.companding("SGD-m", "AdamW-m", "Lion-m"),
    )
    yield Claim(
        "Figure 4, variance",
        "companding lowers the error substantially (taken as: to under half)",
        findings.companding("AdamW-v", metric="p95_nmse", share=0.5),
    )
    yield Claim(
        "Figure 5", "a linear variance diverges, a companded one trains", findings.divergence
    )


CLAIMS = (*_training(), *_memory(), *_speed(), *_codes())


def table(rows: Rows, claims: Sequence[Claim] = CLAIMS) -> tuple[list[list[str]], Rows]:
    """The rows of the table, and the records that they rest on."""
    found = [claim.finding(rows) for claim in claims]
    body = [
        [claim.where, claim.says, one.measured, one.verdict]
        for claim, one in zip(claims, found, strict=True)
    ]
    return body, [row for one in found for row in one.rows]
