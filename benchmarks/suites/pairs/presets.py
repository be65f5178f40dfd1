"""Models with their runs, and optimizers with how weights are stored, to be trained in pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from _gpt.config import ModelShape, hidden
from _gpt.train import stored_dtype
from _llama.config import FP8, STANDARD
from _llama.config import PRESETS as LLAMAS

import optax_lowmem as lowmem
from benchmarks import package_text
from optax_lowmem import Storage, codecs

ADAM, LION, MUON = "adam", "lion", "muon"
Factory = Callable[..., optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Variant:
    says: str  # what it is, for a legend
    rule: str  # whose learning rate, decays and baseline it has
    make: Factory  # (schedule, **arguments) -> transformation
    split: bool = True  # whether matrices are bf16 weights with corrections; else all are f32
    activations: str = STANDARD  # of a Llama's layers, as of `--activations`
    blocks: bool = False  # whether it has blocks, and is told the heads of fused projections
    rounded: bool = False  # whether the initial weights lose their last 8 bits, as a control

    @property
    def plain(self) -> bool:
        return getattr(self.make, "func", self.make) in (
            optax.adamw,
            optax.lion,
            _scaled,
            _muon,
            _soap,
        )

    @property
    def dtype(self) -> Any:
        """The weights' dtype, as `lowmem.init` takes it; None for optax's own."""
        return None if self.plain else stored_dtype if self.split else jnp.float32


def _scaled(by: float, schedule: optax.Schedule, **arguments: Any) -> optax.GradientTransformation:
    """AdamW with so many times the learning rate."""
    return optax.adamw(lambda count: by * schedule(count), **arguments)


def _arguments_of_muon(
    b1: float, b2: float, weight_decay: float, mask: Any, **more: Any
) -> dict[str, Any]:
    """AdamW's arguments as Muon's: its rates and decays fit updates of an RMS of 0.2."""
    return {
        "weight_decay": weight_decay,
        "weight_decay_mask": mask,
        "consistent_rms": 0.2,
        "adam_b1": b1,
        "adam_b2": b2,
        "muon_weight_dimension_numbers": hidden,
        **more,
    }


def _muon(schedule: optax.Schedule, **arguments: Any) -> optax.GradientTransformation:
    return optax.contrib.muon(schedule, **_arguments_of_muon(**arguments))


def _flash_muon(schedule: optax.Schedule, **arguments: Any) -> optax.GradientTransformation:
    return lowmem.flash_muon(schedule, **_arguments_of_muon(**arguments))


def _soap(
    schedule: optax.Schedule, *, b1: float, b2: float, weight_decay: float, mask: Any
) -> optax.GradientTransformation:
    """SOAP in f32."""
    return optax.chain(
        lowmem.scale_by_soap(b1, b2),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )


def _plain(says: str, make: Factory = optax.adamw, rule: str = ADAM, **more: Any) -> Variant:
    return Variant(says, rule, make, split=False, **more)


def _control(says: str, by: float) -> Variant:
    return _plain(f"AdamW, f32, rates {says}", functools.partial(_scaled, by))


def _adam(says: str, storage: Storage, make: Factory = lowmem.flash_adamw, **more: Any) -> Variant:
    return Variant(says, ADAM, functools.partial(make, storage=storage), **more)


def _factored(says: str, **more: Any) -> Variant:
    """One with a 4-bit m."""
    storage = Storage.four_bit(nu=None, **more)
    return _adam(f"flash_factored_adamw, 4-bit m{says}", storage, lowmem.flash_factored_adamw)


_PAPER, _FOUR, _SQRT = Storage.paper(), Storage.four_bit, codecs.sqrt4()
_LINEAR = Storage.paper(nu=codecs.linear_paper(signed=False))
_ROUNDED: dict[str, Any] = {"master_weight_bits": None, "master_rounding": "stochastic"}


def _rounded(says: str, weights: str, **more: Any) -> Variant:
    """One whose weights have no corrections, and the values of a format."""
    return _adam(says, Storage(weights=weights, **_ROUNDED, **more))


def _fed(says: str, weights: str) -> Variant:
    return _rounded(says, weights, error_feedback=True)


# The first of each rule is what the others are compared with.
VARIANTS: dict[str, Variant] = {
    "adamw": _plain("AdamW, f32"),
    "adamw-rounded": _plain("AdamW, f32, from rounded weights", rounded=True),
    "adamw-nudged": _control("a thousandth higher", 1.001),
    "adamw-lower": _control("a tenth lower", 0.9),
    "adamw-higher": _control("a tenth higher", 1.1),
    "flash_adamw": Variant("flash_adamw", ADAM, lowmem.flash_adamw),
    "flash_adamw-paper": _adam("flash_adamw as published", _PAPER),
    "flash_adamw-linear": _adam("as published, but linear codes of v", _LINEAR),
    "split": _adam("bf16 weights and corrections, f32 moments", Storage.full_precision()),
    "flash_adamw-four-bit": _adam("flash_adamw, 4-bit moments", _FOUR()),
    "flash_adamw-four-bit-sqrt": _adam("4-bit moments, v by its root", _FOUR(nu=_SQRT)),
    "flash_adamw-four-bit-sqrt-nu": _adam(
        "4-bit moments, v by its root, m rounded to nearest", _FOUR(nu=_SQRT, rounding="nu")
    ),
    "flash_adamw-four-bit-nearest": _adam(
        "4-bit moments, both rounded to nearest", _FOUR(rounding="nearest")
    ),
    "flash_adamw-bf16-rounded": _adam(
        "bf16 weights rounded stochastically, no corrections", Storage(**_ROUNDED)
    ),
    "flash_adamw-four-bit-bf16-rounded": _adam(
        "4-bit moments, bf16 weights rounded stochastically", _FOUR(**_ROUNDED)
    ),
    "flash_adamw-bf16-fed": _fed("bf16 weights, errors fed into m", "bfloat16"),
    "flash_adamw-int8": _rounded("int8 weights rounded stochastically", "int8"),
    "flash_adamw-int8-fed": _fed("int8 weights, errors fed into m", "int8"),
    "flash_adamw-e4m3": _rounded("FP8 weights rounded stochastically", "e4m3"),
    "flash_adamw-e4m3-fed": _fed("FP8 weights, errors fed into m", "e4m3"),
    "flash_factored_adamw-four-bit-int8-fed": _factored(
        ", int8 weights, errors fed into m",
        group_size=32,
        weights="int8",
        error_feedback=True,
        **_ROUNDED,
    ),
    "stable_adamw": Variant("stable_adamw", ADAM, lowmem.stable_adamw),
    "soap": _plain("SOAP, f32", _soap),
    "flash_soap": Variant("flash_soap", ADAM, lowmem.flash_soap),
    "adam_mini": _plain("adam_mini, f32", lowmem.adam_mini, blocks=True),
    "q_adam_mini": Variant("q_adam_mini", ADAM, lowmem.q_adam_mini, blocks=True),
    "flash_adam_mini": Variant("flash_adam_mini", ADAM, lowmem.flash_adam_mini, blocks=True),
    "flash_adam_mini-four-bit": _adam(
        "flash_adam_mini, 4-bit m", _FOUR(nu=None), lowmem.flash_adam_mini, blocks=True
    ),
    "flash_factored_adamw": Variant("flash_factored_adamw", ADAM, lowmem.flash_factored_adamw),
    "flash_factored_adamw-four-bit": _factored(" to nearest", rounding="nearest"),
    "flash_factored_adamw-four-bit-stochastic": _factored(""),
    "flash_factored_adamw-four-bit-stochastic-32": _factored(" in groups of 32", group_size=32),
    "flash_factored_adamw-four-bit-32": _factored(
        " to nearest in groups of 32", group_size=32, rounding="nearest"
    ),
    "coat_adamw": Variant("coat_adamw", ADAM, lowmem.coat_adamw),
    "coat_adamw-f32": _plain("coat_adamw, f32 weights", lowmem.coat_adamw),
    "lion": _plain("Lion, f32", optax.lion, LION),
    "flash_lion": Variant("flash_lion", LION, lowmem.flash_lion),
    "flash_lion-paper": Variant(
        "flash_lion as published", LION, functools.partial(lowmem.flash_lion, storage=_PAPER)
    ),
    "muon": _plain("Muon, f32", _muon, MUON),
    "flash_muon": Variant("flash_muon", MUON, _flash_muon),
    "flash_muon-turbo": Variant(
        "flash_muon, four iterations (`turbo`)",
        MUON,
        functools.partial(_flash_muon, ns_coeffs="turbo", preconditioning="aol"),
    ),
    "flash_muon-polar": Variant(
        "flash_muon, Polar Express",
        MUON,
        functools.partial(_flash_muon, ns_coeffs="polar_express"),
    ),
    "flash_muon-normuon": Variant(
        "flash_muon, NorMuon", MUON, functools.partial(_flash_muon, normuon_b2=0.95)
    ),
}
# COAT's other half: each of these with FP8 activations too
VARIANTS |= {
    f"{name}+fp8": dataclasses.replace(
        VARIANTS[name], says=f"{VARIANTS[name].says}; FP8 activations", activations=FP8
    )
    for name in ("adamw", "split", "coat_adamw", "coat_adamw-f32")
}


def case_of(preset: str, rule: str, steps: int | None = None, lr: float | None = None) -> str:
    """Return the case of records; a length or a rate that is not the preset's is in it."""
    more = {"steps": steps, "lr": lr}
    changed = [f"{name}={value:g}" for name, value in more.items() if value is not None]
    return " ".join([preset, *changed]) + f"/{rule}"


def stem_of(case: str) -> str:
    """Return the name of the file of a case's curves, without its ending."""
    return "pairs-" + case.replace("steps=", "").replace(" ", "-").replace("/", "-")


BASES = {ADAM: "adamw", LION: "lion", MUON: "muon"}


@dataclasses.dataclass(frozen=True)
class Pairs:
    preset: str  # its name
    model: str  # `gpt2`, `gpt2-qk` (with QK normalization), or the examples' `gpt` or `llama`
    shape: Any  # the model's
    vocab: int  # tokens of the BPE tokenizer; 256 with a tokenizer of bytes
    context: int  # tokens in a window
    batch: int  # windows in a step
    micro: int  # windows whose gradients are computed at once
    steps: int  # of the run
    every: int  # steps of a call
    validations: int  # evaluations of a run, but for the first
    held_out_batches: int  # of `batch` windows each, of an evaluation
    held_out_group: int  # windows whose mean loss an evaluation gives
    rates: Mapping[str, float]  # rule -> peak learning rate
    betas: Mapping[str, tuple[float, float]]  # rule -> b1 and b2
    decays: Mapping[str, float]  # rule -> weight decay of matrices
    warm_up: float  # share of the steps, up to the peak
    floor: float  # share of the peak at the end of the cosine
    text: str = "installed"  # which
    tokenizer: str = "bpe"  # or `byte`
    compute: str = "bfloat16"  # dtype of activations and products
    attention: str = "xla"  # or `cudnn`

    @property
    def tokens(self) -> int:
        return self.batch * self.context

    def schedule(self, rule: str) -> optax.Schedule:
        """Linear warm-up, then a cosine."""
        peak, floor = self.rates[rule], self.floor
        warm_up = max(1, round(self.warm_up * self.steps))

        def rate(count: Any) -> Any:
            done = jnp.clip((count - warm_up) / max(1, self.steps - warm_up), 0, 1)
            cosine = floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * done))
            return peak * jnp.where(count < warm_up, (count + 1) / warm_up, cosine)

        return rate


# FlashOptim, appendix B.2 and Table 7, but for the batch (its half a million tokens) and the steps
# (its 20,000): 210 million tokens in as many steps as the optimizers' errors have to add up.
GPT2_124M = Pairs(
    "gpt2-124m", "gpt2", ModelShape(12, 12, 768), 50_257, 1024, batch=128, micro=32, steps=1_600,
    every=10, validations=20, held_out_batches=4, held_out_group=8,
    rates={ADAM: 6e-4, LION: 2e-4}, betas={ADAM: (0.9, 0.95), LION: (0.9, 0.95)},
    decays={ADAM: 0.1, LION: 0.1}, warm_up=700 / 20_000, floor=0.0, text="all-sources",
    attention="cudnn",
)  # fmt: skip
# The same for 503 million tokens, of text that is the same on every machine. The warm-up is longer:
# pairs with the one above come apart in their first 50 steps.
GPT2_124M_LONG = dataclasses.replace(
    GPT2_124M, preset="gpt2-124m-long", steps=3_840, every=20, held_out_batches=8, warm_up=0.1,
    text=package_text.NAME,
)  # fmt: skip
# A setting in which runs of one optimizer differ little by chance: of eight that were tried with
# AdamW alone, paired with AdamW at rates a thousandth higher or lower, the one that differs least.
GPT2_124M_300 = dataclasses.replace(
    GPT2_124M, preset="gpt2-124m-300", model="gpt2-qk", steps=300, warm_up=1 / 3, validations=6,
    held_out_batches=16, rates={ADAM: 3e-4, LION: 1e-4},
)  # fmt: skip
# the run of docs/results/claims.md since its first records: examples/train_gpt.py's, batch=8
GPT_42M = Pairs(
    "gpt-42m", "gpt", ModelShape(8, 8, 512), 32_000, 256, batch=8, micro=8, steps=3_000, every=100,
    validations=6, held_out_batches=200, held_out_group=8,
    rates={ADAM: 1e-3, LION: 3e-4}, betas={ADAM: (0.9, 0.99), LION: (0.9, 0.99)},
    decays={ADAM: 0.1, LION: 0.5}, warm_up=1 / 20, floor=1 / 20,
)  # fmt: skip
# the same, with Muon too, and rates to be found
GPT_42M_MUON = dataclasses.replace(
    GPT_42M, preset="gpt-42m-muon", rates={ADAM: 1e-3, MUON: 1e-3},
    betas={ADAM: (0.9, 0.99), MUON: (0.9, 0.99)}, decays={ADAM: 0.1, MUON: 0.1},
)  # fmt: skip
GPT2_124M_MUON = dataclasses.replace(
    GPT2_124M_300, preset="gpt2-124m-muon", warm_up=0.1, held_out_batches=4,
    rates={ADAM: 6e-4, MUON: 6e-4}, betas={ADAM: (0.9, 0.95), MUON: (0.9, 0.95)},
    decays={ADAM: 0.1, MUON: 0.1},
)  # fmt: skip
LLAMA_58M = dataclasses.replace(
    GPT_42M, preset="llama-58m", model="llama", shape=LLAMAS["60m"].shape, attention="cudnn"
)
# 25 million tokens: as many as the text has, nearly
LLAMA_134M = dataclasses.replace(
    LLAMA_58M, preset="llama-134m", shape=LLAMAS["134m"].shape, batch=32, micro=32
)
_SMOKE = Pairs(
    "smoke-gpt2", "gpt2", ModelShape(2, 2, 64), 256, 32, batch=8, micro=4, steps=40, every=5,
    validations=4, held_out_batches=2, held_out_group=4,
    rates={ADAM: 1e-2, LION: 3e-3}, betas={ADAM: (0.9, 0.95), LION: (0.9, 0.95)},
    decays={ADAM: 0.1, LION: 0.1}, warm_up=0.1, floor=0.0, text="standard-library",
    tokenizer="byte", compute="float32",
)  # fmt: skip
_LLAMA = dataclasses.replace(LLAMAS["tiny"].shape, layers=2)
PRESETS = {
    run.preset: run
    for run in (
        GPT2_124M, GPT2_124M_LONG, GPT2_124M_300, GPT2_124M_MUON, GPT_42M, GPT_42M_MUON,
        LLAMA_58M, LLAMA_134M,
    )
}  # fmt: skip
PRESETS |= {
    f"smoke-{name}": dataclasses.replace(_SMOKE, preset=f"smoke-{name}", model=name, **more)
    for name, more in (("gpt2", {}), ("gpt2-qk", {}), ("gpt", {}), ("llama", {"shape": _LLAMA}))
}
