"""Llamas by name, and what a run is."""

from dataclasses import dataclass
from typing import Any

from optax_lowmem import layers

PLAIN = "optax.adamw"
SPLIT = "split_adamw"  # the same with f32 moments, and weights split as all others split them
STANDARD = "standard"
LEAN, FP8 = "lean", "fp8"  # --activations
AUTO = "auto"  # what suits the model and the machine
XLA, CUDNN = "xla", "cudnn"  # --attention
NONE, DOTS, FULL = "none", "dots", "full"  # --remat
# --head: the `products` of its loss
STATE, WEIGHTS, ON_DEVICE = "pinned_host", "weights", "device"  # --offload
HEADS = {STANDARD: "input", FP8: "fp8", "fp8-gradients": "fp8-gradients"}
NF4 = "nf4"  # --base
NOISE = ("od", "qkv", "out", "up", "down", "all")  # --noise
# --linear: the dot_general of the layers' matrices; None: JAX's. Embedding and head keep it.
# `-auto`: in 8 bits where that is faster.
LINEARS: dict[str, Any] = {STANDARD: None} | {
    f"{variant}-{format}{more}": layers.switchback_dot_general(variant, format, implementation=how)
    for variant in ("switchback", "switchback_m")
    for format in ("int8", "fp8")
    for more, how in (("", "quantized"), ("-auto", "auto"))
}


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies divided by `factor`.

    With `original` (Llama 3), those of wavelengths below original / high stay, those above
    original / low are divided, and those between are interpolated.
    """

    factor: float
    original: int = 0
    low: float = 1.0
    high: float = 4.0


@dataclass(frozen=True)
class Shape:
    """A decoder: Llama, and what Mistral, Qwen and Gemma add to it."""

    layers: int
    width: int
    hidden: int  # width of the MLP
    heads: int
    kv_heads: int  # heads of keys and values; each serves heads / kv_heads queries
    vocab: int
    rope: float = 10_000.0  # base of the rotary frequencies
    tied: bool = False  # whether the output head is the embedding
    head: int | None = None  # width of a head; None: width / heads
    epsilon: float = 1e-6  # of the norms
    scaling: RopeScaling | None = None  # of the rotary frequencies
    bias: bool = False  # whether queries, keys and values have biases (Qwen2)
    head_norms: bool = False  # whether queries and keys are normalized (Qwen3, Gemma 3)
    # norms with scale 1 + w, before and after attention and MLP; GELU; a scaled embedding
    gemma: bool = False
    query_scale: float | None = None  # factor of the attention scores; None: head^-0.5
    score_cap: float | None = None  # c replaces scores s by c tanh(s / c)
    logit_cap: float | None = None  # likewise, of the logits
    window: int = 0  # positions that a sliding layer attends to
    sliding: tuple[bool, ...] = ()  # which layers slide; empty: none
    local_rope: float | None = None  # base of the frequencies of sliding layers; None: as others
    local_scaling: RopeScaling | None = None  # of these

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head or self.width // self.heads

    def flops_per_token(self, sequence: int) -> float:
        """Of a training step: 6 for each weight of a matrix, and those of causal attention."""
        heads = self.heads * self.head_width
        kept = 2 * heads * (1 + self.kv_heads / self.heads) + 3 * self.hidden
        matrices = self.layers * self.width * kept + self.width * self.vocab
        return 6.0 * (matrices + self.layers * heads * sequence)


@dataclass(frozen=True)
class Preset:
    """A model and the run that suits it; `learning_rate` is AdamW's peak."""

    shape: Shape
    sequence: int
    batch: int
    steps: int
    learning_rate: float
    text: str = "standard-library"
    remat: str = AUTO


# 60m to 350m are the sizes that papers on low-memory training compare on; 1b, 3b, 8b, 14b, 32b and
# 30b are Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, Qwen2.5-14B, Qwen2.5-32B and LLaMA-30B (2023).
# 14b and 32b are without attention's biases, which layers with lean activations do not have.
PRESETS: dict[str, Preset] = {
    "tiny": Preset(Shape(4, 64, 192, 4, 2, 256), 64, 8, 60, 1e-2),
    "60m": Preset(Shape(8, 512, 1376, 8, 8, 32_000), 256, 128, 2_000, 2e-3),
    "134m": Preset(Shape(12, 768, 2048, 12, 12, 32_000), 256, 128, 2_000, 1e-3),
    "350m": Preset(Shape(24, 1024, 2736, 16, 16, 32_000), 1024, 32, 2_000, 6e-4),
    "1b": Preset(
        Shape(16, 2048, 8192, 32, 8, 128_256, 500_000.0, tied=True),
        2048, 8, 1_000, 3e-4, "random",
    ),
    "3b": Preset(
        Shape(28, 3072, 8192, 24, 8, 128_256, 500_000.0, tied=True),
        2048, 4, 500, 2e-4, "random",
    ),
    "8b": Preset(
        Shape(32, 4096, 14_336, 32, 8, 128_256, 500_000.0),
        2048, 1, 100, 1e-4, "random",
    ),
    "14b": Preset(
        Shape(48, 5120, 13_824, 40, 8, 152_064, 1e6, epsilon=1e-5),
        2048, 1, 20, 1e-4, "random",
    ),
    "32b": Preset(
        Shape(64, 5120, 27_648, 40, 8, 152_064, 1e6, epsilon=1e-5),
        2048, 1, 20, 1e-4, "random",
    ),
    "30b": Preset(Shape(60, 6656, 17_920, 52, 52, 32_000), 2048, 1, 20, 1e-4, "random"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings(Preset):
    """A run: a preset with the command line's changes."""

    preset: str
    optimizer: str
    compute: str
    seed: int
    clip: float = 1.0
    attention: str = AUTO
    linear: str = STANDARD
    activations: str = AUTO
    head: str = STANDARD
    noise: str | None = None
    implementation: str = "auto"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: bool = False
    release: bool = False
    offload: str | None = None  # STATE, or WEIGHTS and state, in host memory; ON_DEVICE: neither
    accumulate: int = 1
    unroll: int | str = AUTO
    stacked: bool | str = AUTO  # layers, in one array
    quantize_once: bool | str = AUTO  # weights, for all micro-batches of a step
    f32_weights: bool = False  # whatever the optimizer

    @property
    def rows(self) -> int:
        """Sequences whose activations a device keeps at once."""
        return self.batch // (self.data * self.fsdp * self.accumulate)

    @property
    def devices(self) -> int:
        """Number of devices of the run."""
        return self.data * self.fsdp * self.tensor
