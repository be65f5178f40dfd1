"""Models with their runs, and optimizers with how weights are stored, to be trained in pairs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from _gpt.config import ModelShape
from _gpt.train import stored_dtype
from _llama.config import FP8, STANDARD
from _llama.config import PRESETS as LLAMAS

import optax_lowmem as lowmem
from benchmarks.suites.pairs.trials import factored
from optax_lowmem import Storage, codecs

ADAM, LION = "adam", "lion"
Factory = Callable[..., optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer to train with.

    Attributes:
      says: what it is, for a legend.
      rule: whose learning rate, decays and baseline it has.
      make: (schedule, **arguments) -> transformation.
      split: whether matrices are bf16 weights with corrections; else all weights are f32.
      activations: of a Llama's layers, as of `--activations`.
      blocks: whether it has blocks, and is told the heads of fused projections.
      rounded: whether the initial weights lose their last 8 bits, to see how far runs come apart.
    """

    says: str
    rule: str
    make: Factory
    split: bool = True
    activations: str = STANDARD
    blocks: bool = False
    rounded: bool = False

    @property
    def plain(self) -> bool:
        """Return whether the optimizer is optax's own."""
        return getattr(self.make, "func", self.make) in (optax.adamw, optax.lion, _scaled)

    def dtype(self) -> Any:
        """The weights' dtype, as `lowmem.init` takes it."""
        return stored_dtype if self.split else jnp.float32


def _adam(says: str, storage: Storage, **more: Any) -> Variant:
    return Variant(says, ADAM, functools.partial(lowmem.flash_adamw, storage=storage), **more)


def _scaled(by: float, schedule: optax.Schedule, **arguments: Any) -> optax.GradientTransformation:
    """AdamW with so many times the learning rate."""
    return optax.adamw(lambda count: by * schedule(count), **arguments)


def _control(says: str, by: float) -> Variant:
    return Variant(f"AdamW, f32, rates {says}", ADAM, functools.partial(_scaled, by), split=False)


def _factored(says: str, storage: Storage) -> Variant:
    make = functools.partial(lowmem.flash_factored_adamw, storage=storage)
    return Variant(f"flash_factored_adamw, {says}", ADAM, make)


def _on_trial(says: str, **more: Any) -> Variant:
    return Variant(f"{says}, f32 weights", ADAM, functools.partial(factored, **more), split=False)


_PAPER = Storage.paper()
_LINEAR = Storage.paper(nu=codecs.linear_paper(signed=False))
_ROUNDED: dict[str, Any] = {"master_weight_bits": None, "master_rounding": "stochastic"}

# The first of each rule is what the others are compared with.
VARIANTS: dict[str, Variant] = {
    "adamw": Variant("AdamW, f32", ADAM, optax.adamw, split=False),
    "adamw-rounded": Variant(
        "AdamW, f32, from rounded weights", ADAM, optax.adamw, split=False, rounded=True
    ),
    "adamw-nudged": _control("a thousandth higher", 1.001),
    "adamw-lower": _control("a tenth lower", 0.9),
    "adamw-higher": _control("a tenth higher", 1.1),
    "flash_adamw": Variant("flash_adamw", ADAM, lowmem.flash_adamw),
    "flash_adamw-paper": _adam("flash_adamw as published", _PAPER),
    "flash_adamw-linear": _adam("as published, but linear codes of v", _LINEAR),
    "split": _adam("bf16 weights and corrections, f32 moments", Storage.full_precision()),
    "flash_adamw-four-bit": _adam("flash_adamw, 4-bit moments", Storage.four_bit()),
    "flash_adamw-four-bit-sqrt": _adam(
        "4-bit moments, v by its root", Storage.four_bit(nu=codecs.sqrt4())
    ),
    "flash_adamw-four-bit-normal": _adam(
        "4-bit moments, m at normal quantiles", Storage.four_bit(mu=codecs.normal4())
    ),
    "flash_adamw-four-bit-log": _adam(
        "4-bit moments, v in octaves", Storage.four_bit(nu=codecs.log4())
    ),
    "flash_adamw-four-bit-nu": _adam(
        "4-bit moments, m rounded to nearest", Storage.four_bit(rounding="nu")
    ),
    "flash_adamw-four-bit-sqrt-nu": _adam(
        "4-bit moments, v by its root, m rounded to nearest",
        Storage.four_bit(nu=codecs.sqrt4(), rounding="nu"),
    ),
    "flash_adamw-four-bit-nearest": _adam(
        "4-bit moments, both rounded to nearest", Storage.four_bit(rounding="nearest")
    ),
    "flash_adamw-bf16-rounded": _adam(
        "bf16 weights rounded stochastically, no corrections", Storage(**_ROUNDED)
    ),
    "flash_adamw-four-bit-bf16-rounded": _adam(
        "4-bit moments, bf16 weights rounded stochastically", Storage.four_bit(**_ROUNDED)
    ),
    "flash_adam_mini": Variant("flash_adam_mini", ADAM, lowmem.flash_adam_mini, blocks=True),
    "flash_adam_mini-four-bit": Variant(
        "flash_adam_mini, 4-bit m",
        ADAM,
        functools.partial(lowmem.flash_adam_mini, storage=Storage.four_bit(nu=None)),
        blocks=True,
    ),
    "flash_factored_adamw": Variant("flash_factored_adamw", ADAM, lowmem.flash_factored_adamw),
    "flash_factored_adamw-four-bit": _factored(
        "4-bit m to nearest", Storage.four_bit(nu=None, rounding="nearest")
    ),
    "flash_factored_adamw-four-bit-stochastic": _factored("4-bit m", Storage.four_bit(nu=None)),
    "flash_factored_adamw-four-bit-stochastic-32": _factored(
        "4-bit m in groups of 32", Storage.four_bit(nu=None, group_size=32)
    ),
    "flash_factored_adamw-four-bit-32": _factored(
        "4-bit m to nearest in groups of 32",
        Storage.four_bit(nu=None, group_size=32, rounding="nearest"),
    ),
    "coat_adamw": Variant("coat_adamw", ADAM, lowmem.coat_adamw),
    "coat_adamw-f32": Variant("coat_adamw, f32 weights", ADAM, lowmem.coat_adamw, split=False),
    "adamw-factored": _on_trial("AdamW, factored v"),
    "adamw-factored-four-bit": _on_trial("AdamW, factored v, 4-bit m", mu=codecs.softsign4()),
    "adamw-factored-four-bit-nearest": _on_trial(
        "AdamW, factored v, 4-bit m to nearest", mu=codecs.softsign4(), rounding="nearest"
    ),
    "adamw-ratio": _on_trial("AdamW, v factored with 4-bit ratios", ratio=codecs.sqrt4()),
    "adamw-ratio-four-bit": _on_trial(
        "AdamW, 4-bit m, v factored with 4-bit ratios", mu=codecs.softsign4(), ratio=codecs.sqrt4()
    ),
    "adamw-ratio-four-bit-nearest": _on_trial(
        "AdamW, 4-bit m to nearest, v factored with 4-bit ratios",
        mu=codecs.softsign4(),
        ratio=codecs.sqrt4(),
        rounding="nearest",
    ),
    "adamw-shrunk-four-bit-nearest": _on_trial(
        "AdamW, 4-bit m to nearest, v factored with 4-bit ratios halfway to 1",
        mu=codecs.softsign4(),
        ratio=codecs.linear4(signed=False),
        rounding="nearest",
        shrink=1.0,
    ),
    "lion": Variant("Lion, f32", LION, optax.lion, split=False),
    "lion-rounded": Variant(
        "Lion, f32, from rounded weights", LION, optax.lion, split=False, rounded=True
    ),
    "flash_lion": Variant("flash_lion", LION, lowmem.flash_lion),
    "flash_lion-paper": Variant(
        "flash_lion as published", LION, functools.partial(lowmem.flash_lion, storage=_PAPER)
    ),
}
# COAT's other half: each of these with FP8 activations too
VARIANTS |= {
    f"{name}+fp8": dataclasses.replace(
        VARIANTS[name], says=f"{VARIANTS[name].says}; FP8 activations", activations=FP8
    )
    for name in ("adamw", "split", "coat_adamw", "coat_adamw-f32")
}
BASES = {ADAM: "adamw", LION: "lion"}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """A model and its run.

    Attributes:
      preset: its name.
      model: `gpt2`, `gpt2-qk` (with QK normalization), or the examples' `gpt` or `llama`.
      shape: the model's.
      vocab: tokens of the BPE tokenizer; 256 with a tokenizer of bytes.
      context: tokens in a window.
      batch: windows in a step.
      micro: windows whose gradients are computed at once.
      steps: of the run.
      every: steps of a call.
      validations: evaluations of a run, but for the first.
      held_out_batches: of `batch` windows each, of an evaluation.
      held_out_group: windows whose mean loss an evaluation gives.
      rates: rule -> peak learning rate.
      betas: rule -> b1 and b2.
      decays: rule -> weight decay of matrices.
      warm_up: share of the steps, up to the peak.
      floor: share of the peak at the end of the cosine.
      text: which.
      tokenizer: `bpe` or `byte`.
      compute: dtype of activations and products.
      attention: `xla` or `cudnn`.
    """

    preset: str
    model: str
    shape: Any
    vocab: int
    context: int
    batch: int
    micro: int
    steps: int
    every: int
    validations: int
    held_out_batches: int
    held_out_group: int
    rates: Mapping[str, float]
    betas: Mapping[str, tuple[float, float]]
    decays: Mapping[str, float]
    warm_up: float
    floor: float
    text: str = "installed"
    tokenizer: str = "bpe"
    compute: str = "bfloat16"
    attention: str = "xla"

    @property
    def tokens(self) -> int:
        """In a step."""
        return self.batch * self.context

    def schedule(self, rule: str, steps: Any) -> optax.Schedule:
        """Linear warm-up, then a cosine; `steps` of the run may be traced."""
        peak, floor = self.rates[rule], self.floor
        warm_up = jnp.maximum(1.0, jnp.round(self.warm_up * steps))

        def rate(count: Any) -> Any:
            done = jnp.clip((count - warm_up) / jnp.maximum(1.0, steps - warm_up), 0, 1)
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
PRESETS = {
    run.preset: run
    for run in (
        GPT2_124M,
        GPT2_124M_300,
        GPT_42M,
        LLAMA_58M,
        LLAMA_134M,
        _SMOKE,
        dataclasses.replace(_SMOKE, preset="smoke-gpt", model="gpt"),
        dataclasses.replace(_SMOKE, preset="smoke-gpt2-qk", model="gpt2-qk"),
        dataclasses.replace(
            _SMOKE, preset="smoke-llama", model="llama",
            shape=dataclasses.replace(LLAMAS["tiny"].shape, layers=2),
        ),
    )
}  # fmt: skip
