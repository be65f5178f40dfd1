"""Every tolerance of the tests, with where it comes from. u = 2^-24 is f32's unit round-off."""

from typing import Any

import jax.numpy as jnp
import numpy as np

# -- codecs, splits, random bits ------------------------------------------------------------------
# Distance of a position z from its exact value, in codes: z = levels * (a few operations), each
# relative u, and x / s within 2 u of the oracle's through the f32 root: 255 * 8 u = 1.2e-4.
CODE_POSITION = 1.5e-4
# Stored scale against the oracle's: an f32 square root (XLA's may be off by 2 ulp), or equal.
SCALE = 2.0**-22
# A decoded value against the oracle's: expand (2 operations), times the scale, squared: 8 u.
DECODE = 8 * 2.0**-24
# A mean over random keys: "4 standard errors".
STANDARD_ERRORS = 4.0
# The largest of 400 such means of one test: 400 * 6e-7 is one seed in 4,000, where 4 would be one
# in 40.
STANDARD_ERRORS_OF_MANY = 5.0
# Codecs of 4 bits: the largest error as a share of a group's maximum, (nearest, stochastic): half
# and all of the last code. Softsign: 1 - z / (14 - z) at 6.5 and 6; sqrt: 1 - (z / 15)^2 at 14.5
# and 14; linear: of 1 / 7, and 1 / 15, all of it where the floor lifts a value to code 1; the maps
# are linear between codes: half and all of 1 - 0.69619, and of an octave.
LARGEST_ERROR_OF_4_BITS = {
    "softsign-int4": (2 / 15, 1 / 4), "sqrt-uint4": (14.75 / 225, 29 / 225),
    "linear-int4": (1 / 14, 1 / 7), "linear-uint4": (1 / 15, 1 / 15),
    "normal-int4": (0.15191, 0.30381), "log-uint4": (1 / 4, 1 / 2),
}  # fmt: skip
# What a stored scale may be over a group's maximum: E8M8, rounded up; of sqrt(v) it is squared.
SCALE_OVER_MAXIMUM = (1 + 2.0**-8) ** 2
# Variance q = 0.48 gap / v of a second moment in codes a gap apart, of gradients of variance v, in
# shares of it, for gaps up to v / 5: around a v' that varies E |g^2 - v'| is 0.968 + 0.242 q, by
# the density 0.242 of g^2 / v at 1, which is 2.5 % more; and 4 standard errors of 4,032 variances
# that are forgotten 6 times, (2 / 24,192)^(1/2) = 0.9 %.
ROUNDING_NOISE = 0.06
# Growth of the mean of v^(-1/2) beside two terms of a normal v, 3 q / 8 + 105 q^2 / 128: the third,
# 15 * 231 q^3 / 1024, is 8.5 % of the first at q = 0.097; and that of q itself.
ROUNDING_NOISE_ON_STEPS = 0.085 + ROUNDING_NOISE
# Eager, jit and fused expressions differ in the last f32 bit, that is in codes only within
# CODE_POSITION of a tie: 2 * 1.5e-4 of elements.
EAGER_JIT_SHARE = 5e-4
# Bit split, 24 bits: 8 of 24 mantissa bits dropped, half of 2^-15 of the binade's lower end; mean
# 2^-17 ln 2 = 5.29e-6 over mantissas spread evenly.
MASTER_24_MAX = 2.0**-16
MASTER_24_STOCHASTIC = 2.0**-15  # to either neighbour: a whole spacing instead of half of one
MASTER_24_MEAN = 5.4e-6
# ULP split of fp16: half an ulp (2^-11 to 2^-12 of w) in 127 steps, a quarter step in the mean:
# 2^-11 / 127 / 4 = 9.6e-7 at the binade's lower end, times ln 2.
FP16_24_MEAN = 1e-6
# Codes of the ULP split on the other side of a tie than in float64: 127 (32767) * 3 u.
ULP_TIES = {24: 1e-4, 32: 1e-2}
# A new weight reaches itself through f32 addition unless it is under this share of the old one:
# 2^-24 of the old one must be under an eighth of its ulp, 2^-7 or 2^-10 of it.
LANDS = {"bfloat16": 2.0**-15, "float16": 2.0**-12}
# Of the old weight, what a bf16 under 2^-16 of it is off by without its correction: half its ulp is
# 2^-9 of it, and f32 addition misses it by 2^-24 of the old one.
MISSED = 2.0**-24 + 2.0**-25

# -- contract tests (test_contract_*.py) ----------------------------------------------------------
# |change - f32 change| / |f32 change| of a leaf over 8 steps on a fixed stream. Adam and SGD: a
# code is off by at most one, uniform; at a typical |m| of a third of the group maximum that is
# 1/127 * 3 / sqrt(12) = 0.7 %, less for sqrt(v); elements far below are worse but few.
# Lion: one sign that flips in a leaf of 120 elements in one of the 4 steps that MultiSteps leaves
# is 2 / (4 sqrt(120)) = 0.046; room for four such. (A distance of 0.1 is a cosine of 0.995.)
CONTRACT_DISTANCE = 0.1
# The composition and the fused expression differ in the last bits of f32 (FMA, order of products),
# that is in codes only next to a tie; the requirement is one unit in at most 1 % of codes.
COMPOSITION_SHARE = 0.01
# optax takes 1 - b2^t in f32, where b2 = 0.999 is off by 1.3e-8: 1.3e-5 of 1 - b2^t, half of it in
# the root, times a step of at most 3 lr = 3e-3: 2e-8 (ours has no cancellation there).
STEP_ROUNDING = 2e-8
# Of the total change against f32 optax on a fixed stream: the requirements. A code is a fixed share
# of its group's maximum, so it is the spread of gradient sizes *within* a group that costs:
# measured over 200 steps of AdamW, 1 - cos is 4e-5 for equal sizes, 3e-4 for log-normal ones of
# sigma 0.5, 5e-3 for sigma 1 (Lion: 3e-4, 8e-4, 9e-3). The stream has 0.3, and 1 between rows.
COSINE_200 = 0.999
COSINE_6000 = 0.995

# -- golden vectors -------------------------------------------------------------------------------
# The recorded kernels fuse multiply-adds and divide within 2 ulp: sides of rounding boundaries.
GOLDEN_SHARE = 1e-3
# The sign of a sum of two products under this share of them depends on how they are fused: 8 u.
GOLDEN_CANCELS = 2.0**-21
# expand (their division: 2 ulp), times the scale, squared.
GOLDEN_DECODE = 8 * 2.0**-23
# A code of the correction, and the f32 rounding of (code / 127) * 2^k.
GOLDEN_ERROR_BIT = 1.01
# Their b2^3 by repeated squaring moves 1 - b2^3 by 1.4e-5, and the step by half of that; with eps
# and the divisions 2.5e-5 bounds the steps of all five.
GOLDEN_STEP = 2.5e-5
# A master off by c codes of its correction changes its code with probability c; AdamW's steps, of
# 1e-3 on weights of 0.02 (half an ulp / 127 is 2.4e-7), by 2.5e-8: 1 in 10 at worst.
GOLDEN_ERROR_SHARE = 0.1
# Group maxima next to a tie of FP16 scales: theirs has 1 - b = f32(1) - f32(b), 1.3e-5 off at
# b2 = 0.999 and 2e-6 at 0.99, against FP16's 2^-11: at most 1.3 % of the scales of nu, a unit each.
GOLDEN_SCALE_SHARE = 0.013

# -- accumulation and averages (test_accumulate.py, test_ema.py) -----------------------------------
F32_EPS = 2.0**-23
# bf16 stores 7 mantissa bits: neighbours are at most this share of a value apart.
BF16_SPACING = 2.0**-7


def stochastic_sum(steps: int, spacing: float, elements: int) -> float:
    """4 standard errors of the mean of `elements` sums of `steps` roundings to a spacing.

    One stochastic rounding has a standard deviation of at most half the spacing.
    """
    return STANDARD_ERRORS * (steps / elements) ** 0.5 * spacing / 2


# -- error feedback (test_error_feedback.py) -------------------------------------------------------
# Where a weight near 1 comes to rest after 200 steps: 2.5 u in each f32 step that is a normal
# number's, 200 * 2^-24 / 2 = 6e-6 at most; b2 and the bias corrections change d by 2^-20 in a step,
# 10 of which matter to an error of 2^-7; and 0.9^200 of it is left.
REST = 1e-5
# The change of m relative to that of an error as large as the weight: a step of 3 roundings, and 8
# operations after it; and of m's own terms: 12 u.
FEEDBACK = 12 * 2.0**-24

# -- one implementation against another (test_fused_update.py) ------------------------------------
# The same functions under other fusions (FMA): EAGER_JIT_SHARE, doubled for two moments and a
# comparison with noise, which flips within an ulp of P.
REORDERED_CODES = 1e-3
# A master weight on the other side of a rounding boundary: one unit of its last place, which under
# the smallest normal number is that number's; f32 results of a handful of operations otherwise
# (8 u). fp16's ULP scheme has steps of ulp / 254 and 65534.
REORDERED_MASTER = {
    (bits, jnp.dtype(dtype)): unit
    for dtype, units in {
        jnp.bfloat16: {24: 2.0**-15, 32: 2.0**-21, None: 2.0**-7},
        jnp.float16: {24: 2.0**-16, 32: 2.0**-21, None: 2.0**-10},
        jnp.float32: {24: 2.0**-21, 32: 2.0**-21, None: 2.0**-21},
    }.items()
    for bits, unit in units.items()
}

# Master weights of which one evaluation is on either side of the middle between two bf16 numbers:
# the low 8 of their 24 bits are 127 or 128 in 2 of 256, and REORDERED_CODES of those differ.
TORN_SPLITS = REORDERED_CODES * 2 / 256


def reordered_master(bits: int | None, dtype: Any, weights: np.ndarray) -> np.ndarray:
    """REORDERED_MASTER of master weights, absolute."""
    smallest = float(jnp.finfo(dtype).smallest_normal)
    return REORDERED_MASTER[bits, jnp.dtype(dtype)] * np.maximum(np.abs(weights), smallest)


# The step itself, of the learning rate: 16 operations of u each.
REORDERED_STEP = 2.0**-20
# The step, of the learning rate, of expanded moments that a GPU decodes by single instructions for
# a logarithm and a power: the first moment's terms to 2^-18, twice `expansion._SLACK`; the second's
# root, 12 octaves under the largest of its group, to (2^-19 + 12 * 2^-21) / 2 = 2^-18.
APPROXIMATE_STEP = 2.0**-17
# Codes of an expanded group from its largest value to its smallest: 8 an octave of E4M3's 17.8.
EXPANDED_CODES = 143
# A slot in f32, of its own value or of the leaf's largest (its terms may cancel): 8 u.
REORDERED_SLOT = 2.0**-21
# Codes of x (largest / absmax) that are others when the product is not rounded before it is rounded
# to a code: f32 rounds a product within u |code| = 2^-17 of a half to it. Of bf16 values, with 8
# bits of their own, a row's products hit such places together: a row of 1 in 512 at most.
FUSED_TIES = 2.0**-9
# Scales in units of their last place. f32: decoding in either order (see GROUP_DECODE) is 4 u, the
# two terms of a moving average 2 u, where a unit is at least u; 16 bits: the other side of a tie.
REORDERED_SCALE_UNITS = {"f32": 6, "f16": 1, "e8m8": 1}
# The two parts of a word, on the other side of where they are rounded: a step in 24 bits and a
# zero-point, which is a whole number; a maximum in 17 bits (9 of mantissa), and k in 15 (11).
REORDERED_WORDS = {"f24+z8": (2.0**-15, 0), "f17+k15": (2.0**-8, 2.0**-11)}
# A norm over a tree, summed in another order, and a factor applied before or after: 64 u.
REORDERED_NORM = 2.0**-18

# -- stable_adamw and update_clipping (test_stable_adamw.py) ---------------------------------------
# Against float64 or another library over 20 steps in f32: what the issue of both asks for.
STABLE_ADAMW_RTOL = 1e-5
STABLE_ADAMW_ATOL = 1e-6

# -- the fused GPU step (test_step_backends.py, test_kernel_numerics.py, test_gpu_step.py) ---------
# x times 1 / y to an ulp, 2^-23, and a product of u. (XLA's division on a GPU: 2 ulp, 2^-22.)
KERNEL_QUOTIENT = 2.0**-22
# 32 bits rounded to f32 instead of 24 cut off: half a spacing, 2^-25, from what was cut off, 2^-24.
KERNEL_UNIFORM = 2.0**-24 + 2.0**-25
# A step on a GPU, of the learning rate. Adam's directions are at most (1 - b1) / sqrt(1 - b2) =
# 3.2; the quotients are 2^-21 apart, the rest 16 u: 3.2 * 1.5 * 2^-20 < 2^-17.
GPU_STEP = 2.0**-17
# Lion's sign is that of rounding errors where |b1 m + (1 - b1) g| is under what it is off by:
# quotients 2^-21 apart and 4 u, of b1 m. More often than of real numbers: m is 9 bits times a
# ratio of small integers and g of bf16 has 8 bits, so that some sums are 0 but for rounding.
LION_SIGN = 1.5 * 2.0**-21
# How many these are: of a sum of two terms of one size, with a density of at most 0.4 of that size
# around 0, 2 * LION_SIGN * 0.4 = 2^-20.7; twice that for other sizes.
GPU_SIGNS = 2.0**-19
# Scales on either path: units and expansions 2^-21 apart each, squared for a variance (2^-19),
# and 16 u for the average and roots of 2 ulp.
GPU_STATE = 2.0**-18


def rare(share: float, elements: int) -> float:
    """Return the largest allowed count of a rare outcome: the mean plus 4 standard errors.

    At least one, since none is the mean of few.
    """
    mean = share * elements
    return max(1.0, mean + STANDARD_ERRORS * mean**0.5)


# -- encode and decode of one array (test_group_codec.py) -----------------------------------------
# XLA may move the constant 1 / levels to the scale: two products of u each in either order, 4 u
# apart; squared 8 u, and u each for the square. A division of 2 ulp (GPU) and a product: 5 u each.
GROUP_DECODE = 10 * 2.0**-24
# Expanded codes: a logarithm of up to 32 octaves, in f32 to u of it, over a k that is at least 0.3
# where this is used, and 8 u.
GROUP_DECODE_EXPANDED = (32 / 0.3 + 8) * 2.0**-24
# Scales on a GPU in units of their last place: roots of 2 ulp each in f32, and in f16 on the other
# side of a tie; without a root they come from integers.
GPU_SCALE_UNITS = {"f32": 4, "f16": 1, "e8m8": 0}
# How often: 4 ulp (2^-21) in half a spacing of f16 (2^-12), either way.
GPU_F16_SCALE_SHARE = 2.0**-8

# -- Adam-mini and its codec (test_adam_mini.py, test_peers_adam_mini.py) --------------------------
# Against float64 or the package over 20 steps in f32. Of the weight, each step costs u to store it
# and u for 1 - lr wd as f32, always to one side: 40 u. A direction is off by 16 u (a mean over d
# elements is log2(d) u, halved by the root), so a step of 4 lr = 0.04 by 4e-8, 20 of them by 8e-7.
ADAM_MINI_RTOL = 40 * 2.0**-24
ADAM_MINI_ATOL = 1e-6
# Its moments: means and moving averages of terms of one sign, 16 u; m of its leaf's largest.
ADAM_MINI_MOMENT = 2.0**-20
# Delta has 16 mantissa bits, rounded either way, and two f32 operations of u behind it.
AFFINE_DELTA = 2.0**-16 + 2.0**-22
# (code - z) is exact, times Delta.
AFFINE_DECODE = AFFINE_DELTA + 2.0**-24
# x times 1 / Delta, plus z: 3 u of at most 383 codes.
AFFINE_POSITION = 383 * 3 * 2.0**-24

# -- stochastic rounding between powers (test_expansion_rounding.py) -------------------------------
# |dP| of the fourth order in 1 / n, and of the n that stands for all in the third (see
# MinifloatCodec.odds), in float64 over r and u: r up to; n = 1; other subnormal numbers; normal.
ODDS = {
    "e4m3": (
        (2.0, 2.0**-9, 2.0**-12, 2.0**-18),
        (4.0, 2.0**-6, 2.0**-9, 2.0**-14),
        (7.1, 2.0**-3, 2.0**-6, 2.0**-10),
        (14.3, 0.26, 2.0**-4, 2.0**-7),
    ),
    "e5m2": (
        (2.0, 2.0**-10, 2.0**-14, 2.0**-15),
        (4.0, 2.0**-7, 2.0**-10, 2.0**-11),
        (8.0, 2.0**-5, 2.0**-6, 2.0**-7),
    ),
}
# 16 codes an e-fold: octaves of up to 16 in f32 to 2^-21, and a power to 2^-22 of itself.
ODDS_POSITION = 16 * (2.0**-21 + 2.0**-22)
# Logarithms of values near the maximum to 2^-22 twice, times k of up to 320, in codes: 16 ln 2 an
# octave, 320 * 2^-21 * 11 = 1.7e-3 at worst; half of that in the mean.
APPROXIMATE_CODES = 1e-3
# Such a logarithm of 17.8 / 320 octaves moves k by 2^-22 * 18, of a spacing of 2^-12.
APPROXIMATE_WORDS = 0.02

# -- sampled weights (test_gaussws_*.py) -----------------------------------------------------------
# w + R max |w| 2^(1 - b_t): the power to 2 ulp, its product, that with R (R of U(-0.5, 0.5) is
# not a power of two) and the sum: 4 * 2 u of the terms.
SAMPLE = 8 * 2.0**-24
# A sum of 1024 products in any order: 32 + 32 additions at most if rows and columns are summed one
# after the other, u each, and what stands before it, of the sum of magnitudes.
BITS_GRADIENT = (64 + 8) * 2.0**-24

# -- quantized products (test_switchback*.py, test_layers.py) --------------------------------------
# A position x * (largest / absmax) of its exact value: a quotient and a product of u each.
POSITION = 3 * 2.0**-24
# A scaled sum of its exact value: the f32 of an int32, 1 / 127 as f32, two scales (a product of u
# each) and two products with them: 7 u.
SCALED_SUM = 8 * 2.0**-24
# Half the spacing of a dtype next to a number, of it; and what is under its smallest normal one.
HALF_SPACING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
SUBNORMAL = {"float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-24}
# A code of the value it is nearest to: half of 1 (int8); half of 2^-3 (2^-2) of it, but no less
# than half of the smallest code, 2^-9 (2^-16).
HALF_CODE = {"int8": (0.0, 0.5), "e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}
# A maximum under this is taken as this: absolute error of a row that is smaller.
LEAST_MAXIMUM = 2.0**-100


def of_quantizing(x: Any, scale: Any, format: str) -> Any:
    """|x^ - x| at most: half a code, and where f32 put the position on the other side of a tie."""
    of_value, least = HALF_CODE[format]
    size = np.abs(x)
    return np.maximum(of_value * size, least * np.maximum(scale, 2.0**-100 / 57344)) + (
        2 * POSITION * size
    )


def of_product(a: Any, b: Any, of_a: Any, of_b: Any, dtype: str = "float32") -> Any:
    """|a^ b^ - a b| at most, where |a^ - a| <= of_a and |b^ - b| <= of_b, rounded to a dtype.

    a^ b^ - a b = a (b^ - b) + (a^ - a) b + (a^ - a) (b^ - b), summed over the k terms of each; f32
    sums of k terms lose k u of their magnitudes, scaling SCALED_SUM.
    """
    size_a, size_b = np.abs(a), np.abs(b)
    exact = size_a @ of_b + of_a @ size_b + of_a @ of_b
    magnitude = (size_a + of_a) @ (size_b + of_b)
    lost = a.shape[-1] * 2.0**-24 + SCALED_SUM + HALF_SPACING[dtype]
    return exact + lost * magnitude + SUBNORMAL[dtype]


# -- products of FP8 codes (test_quantized_product.py) ---------------------------------------------
# Hopper's tensor cores add 32 products at a time to a sum of which 14 bits count. Measured at
# 16,384 terms: 3.1e-3 of a result's rms; twice that.
HOPPER_FLOAT8_RMS = 2.0**-7


def float8_sum(dtype: str) -> float:
    """Of a row's largest result: f32 sums of at most 1280 terms in another order (2^-14).

    Both are rounded to the result's dtype, and may fall on either side: a whole spacing.
    """
    return 2.0**-14 + 2 * HALF_SPACING[dtype]


def hopper_float8_sum(length: int, dtype: str) -> float:
    """And for each 32 terms 2^-13 of the sum under way, and of the products added to it.

    Sums under way are at most about as large as a row's largest.
    """
    return float8_sum(dtype) + 2 * length / 32 * 2.0**-13


# -- the FP8 precision flow (test_fp8_flow.py) -----------------------------------------------------
U = 2.0**-24


def of_row_sum(length: int) -> float:
    """Bound the f32 rounding error of a norm's output, relative to its largest terms.

    A mean of n squares loses n u, half of it in the root; 16 operations of u around it.
    """
    return (length / 2 + 16) * U


# f(x) of |x|, and f'(x), in f32: exponentials, tanh and erf to 2^-21 of what they are at most, and
# a few operations; near -inf 1 + tanh cancels to that.
ACTIVATION = 2.0**-19
# Another compilation puts EAGER_JIT_SHARE of codes on the other side of a tie, each 2^-4 of its
# value away: sqrt(5e-4) / 16 of an array's norm, for each of the 7 arrays that lie one behind the
# other in a block, forward and backward.
FLIPPED_CODES = 14**0.5 * EAGER_JIT_SHARE**0.5 / 16

# Gradients of a layer whose norms and gates are computed from their inputs again, beside autodiff's
# of the same forward pass. A number that travels back may be rounded to the other side each time,
# 2^-8 of it in bf16 and 2^-24 in f32; as noise, through the 16 operations of a layer one behind the
# other. In f32 sums of 128 in another order count four times that.
RECOMPUTED = {"bfloat16": 16**0.5 * 2.0**-8, "float32": 4 * 16**0.5 * 2.0**-24}

# Loss after 60 steps of another package's loop, relative to that of the same loop with optax's own
# optimizer in f32: what a user would notice of an exchange. Measured: 0.63 % with bf16 weights and
# no master weights, 0.1 % otherwise. A learning rate 10 % lower is seen in every loop.
LOSS_OF_LOOPS = 0.01

# -- the loss of a head whose products run in FP8 (test_cross_entropy.py) --------------------------
# Root mean square of a code's error, of the number: uniform in half a spacing, 2^-4 (2^-3) of
# a number with a mantissa of 1, and less with a larger one (3/4 of it if those are log-uniform).
CODE_RMS = {"e4m3": 2.0**-4 / 3**0.5, "e5m2": 2.0**-3 / 3**0.5}


def fp8_logits(hidden: Any, head: Any) -> Any:
    """|logit^ - logit| at most: rows of hidden and the whole head [width, vocab] share scales."""
    of_h = of_quantizing(hidden, np.abs(hidden).max(-1, keepdims=True) / 448, "e4m3")
    return of_product(hidden, head, of_h, of_quantizing(head, np.abs(head).max() / 448, "e4m3"))


def fp8_loss(logits: Any, labels: Any, of_logits: Any, z_loss: float) -> Any:
    """Of losses, at most, where logits are off by `of_logits` [tokens, vocab].

    log(sum(exp)) moves by the largest error, the label's logit by its own; a soft cap makes errors
    no larger. z L^2 moves by z (2 |L| + d) d where L moves by d. f32 adds 2^-20 of each term.
    """
    most = of_logits.max(-1)
    highest = logits.max(-1)
    log_sum = np.log(np.exp(logits - highest[:, None]).sum(-1)) + highest
    rows = np.arange(len(labels))
    moved = most + of_logits[rows, labels] + z_loss * (2 * np.abs(log_sum) + most) * most
    size = np.abs(log_sum) + np.abs(logits[rows, labels]) + z_loss * log_sum**2
    return moved + 2.0**-20 * size


def fp8_loss_rms(hidden: Any, head: Any, of_logits: Any) -> float:
    """Of losses as root mean square, where the loss's gradient of the logits is `of_logits`.

    A loss moves by sum_v g_v d_v, where d_v = sum_k h_k w_kv (e_k + e_kv) with independent errors e
    of codes: one for each number of hidden, which all logits share, and one for each of the head.
    """
    shared = hidden**2 * (of_logits @ head.T) ** 2
    own = of_logits**2 * (hidden**2 @ head**2)
    return CODE_RMS["e4m3"] * np.sqrt((shared.sum(-1) + own.sum(-1)).mean())


def fp8_head_gradients(hidden: Any, head: Any, of_logits: bool) -> float:
    """Of the norm of a gradient: a code of E4M3 times one of E5M2, and probabilities of FP8 logits.

    p_v moves by p_v d_v; d is sqrt(2) CODE_RMS of a logit's terms as root mean square.
    """
    codes = CODE_RMS["e4m3"] ** 2 + CODE_RMS["e5m2"] ** 2
    d = 2 * CODE_RMS["e4m3"] ** 2 * (hidden**2 @ head**2).mean() if of_logits else 0.0
    return (codes + d) ** 0.5


# Of the norm of a gradient beside the same one from other scales: both have errors of their codes.
FP8_OTHER_SCALES = (2 * (CODE_RMS["e4m3"] ** 2 + CODE_RMS["e5m2"] ** 2)) ** 0.5

# -- Muon (test_muon.py) --------------------------------------------------------------------------
# |change - optax's| / |optax's| with f32 products and moments. A product rounds by u = 2^-24 of its
# result at random, and a change of a small singular value is lifted by a = 3.4445 an iteration:
# u (1 + a + ... + a^4) = 200 u; twice that for two programs, and 2^-20 of optax's bias correction
# 1 - b^t, which cancels in f32 (b = 0.999: up to 6e-5 at step 1, in Adam's v and less in its root).
MUON_EXACT = 1e-4
# The same after one step at a rate of 1e-2 with stochastic 24-bit master weights: a change d off by
# MUON_EXACT lands in another unit e of the weight with the probability MUON_EXACT d / e, so the
# distance is sqrt(MUON_EXACT e / d). Weights under 1 have e = 2^-16, d is 1e-3 or more: 1.2e-3.
MUON_ROUNDED = 2e-3
# The difference of two values of a polynomial whose terms' sizes sum to 49, each term rounded five
# times in float64 (digits, powers of 1.01 and what they multiply and divide): 2 * 49 * 5 * 2^-53.
POLYNOMIAL = 2.0**-44
# bf16 momentum, of which each keeps its own rounding: 2^-9 of an element, in a different order.
MUON_BF16_MOMENTUM = 0.05
# bf16 products against f32 ones, of the norm of the direction. Rounding an operand is noise of
# 2^-9 / sqrt(3) of it, in directions of small singular values too, where what is added before
# iteration k is lifted by a^(5 - k) until it is near 1: (1 + a + a^2 + a^3) 2^-9 / sqrt(3) = 0.064.
# (Measured: 0.046 to 0.057.)
MUON_BF16 = 0.1

# -- bf16 weights that are rounded stochastically (test_rounded_weights.py) -----------------------
# The mean over 32,768 weights of what 64 steps of ulp / 16 sum to, of what it is in f32: one
# rounding has a standard deviation of at most ulp / 2, 64 of them 4 ulp where the sum is 4 ulp, so
# their mean has 1 / sqrt(32768) = 0.006 of it; five of those.
ROUNDED_WEIGHTS = 0.03

# -- passes over tensors (test_fp8_passes.py) ------------------------------------------------------
# Bytes of a layer's program over those of one compiled without a GPU, in MiB: half of the smallest
# pass, 8 MiB of a weight in bf16; small arrays that XLA reduces in one step more are under 1 MiB.
PASS_MIB = 4
# The same in the program of the GPU at hand, without attention. cuDNN asks for layouts of queries,
# keys and their gradients, which XLA fuses in other ways than beside the kernel that stands for it:
# an H200 moves 21.4 MiB more. Three quarters of the smallest pass over an activation, 32 MiB.
PASS_HERE_MIB = 24
# Launches over those: another XLA may compute up to four scalars or tables apart.
LAUNCHES = 4

# -- planned memory (test_planned_peaks.py) --------------------------------------------------------
# A plan over the compiler's, or over the peak of a run: less than the 7 % of a card that is left
# free. Leaving out an array of a whole model is more: gradients of 8B are 27 % of its weights and
# state.
PLANNED = 0.05

# -- exported weights (test_finetune_folders.py) ---------------------------------------------------
# Weights into which adapters of rank 3 are merged, relative and absolute, in eps of their dtype:
# half of one for the sum and half to store it; before that, in f32, 8 roundings by u of products
# below 1/4, 2 u.
MERGED_EPS = 1

# -- seeds in one program (test_examples.py) -------------------------------------------------------
# Loss of a convnet after three steps in f32 beside that of the same seed alone, where sums of up to
# 576 terms may be in another order: 3 * sqrt(576) * 2^-24 = 4e-6. (Measured: equal.)
SEEDS_TOGETHER = 1e-5

# -- NF4 (test_nf4.py) -----------------------------------------------------------------------------
# Levels published in f32 beside float64: the outermost probability has 7 digits; its error of 3e-8
# is 3e-8 / 0.073 (the density there) / 1.85 of the largest, 2.5e-7.
NF4_LEVELS = 2.5e-7
# Values of the 8-bit map: centres between two f32 numbers (u each), times a power of ten, rounded.
DYNAMIC_MAP = 4 * 2.0**-24
# Codes other than the nearest in float64: x / absmax is off by 2 u and the bound between two levels
# by 2^-23, of a range of 2 that 15 bounds divide: 15 * 3 * 2^-23 < 1e-5, and one code of the few of
# a test. In bf16 numbers repeat, and so do the ratios of two that are halfway.
NF4_TIES = 1e-5
# A mean of 1,000 absmax in f32: 10 levels of a sum of pairs, or 1,000 terms in a row of which each
# is off by u / 2 at random: 32 u; of a difference from it, which may be 30 times smaller.
NF4_OFFSET = 1e-4
# A decoded value: the levels, 2^-23 / 0.0796 of the smallest, and 4 roundings of u.
NF4_DECODE = 2e-6
# Products of 256 terms in another order: sqrt(256) * 2^-24, of sums of which a tenth is left.
NF4_SUM_ORDER = 1e-5

# -- micro-batches in f32 (test_finetune.py) -------------------------------------------------------
# Norm of the gradient of 4 rows of 95 tokens at once, over that of one row after another: sums of
# 380 terms in another order, through ten products: 10 * sqrt(380) * 2^-24 = 1.2e-5.
F32_SUM_ORDER = 2e-5

# -- stored curves (test_training_suites.py) -------------------------------------------------------
# The first losses and RMS of a run on a CPU beside those of an H100, which are stored in f16: half
# an ulp each, 2^-11, and the H100's TF32 products, 2^-11 of an operand. First losses of other seeds
# differ by 1 % or more.
SPIKE_CURVES = 2.0**-9

# SOAP's direction in f32 beside f64, relative to its largest element. An eigenvector of P is off by
# u |P| / gap: gradients have singular values 1 to 0.2 in 24 steps of 7 %, so squared ones differ by
# 14 % of at least 0.04: 2^-24 / 0.0056 = 1.1e-5; the QR iteration and 24-term sums add as much. An
# element of v, a mean of squares, may be small where the eigenvector is off: ten times.
SOAP = 3e-4
