"""The hand-written Triton kernel's rounding, default codecs, and split of weights on the bits.

What `codecs` and `reference.move` say, which are the specification, in fewer instructions: a
weight's bits stay in the upper half of 32, and 2^24 goes to the side of a comparison where it costs
nothing.
"""

# mypy: disable-error-code="no-untyped-def"
# Triton reads the annotations: what has none is a value on the GPU.

import zlib

import triton
import triton.language as tl

SALTS = tuple(zlib.crc32(name) | 1 for name in (b"mu", b"nu", b"correction"))  # random.salt
_MU_SALT = tl.constexpr(SALTS[0])
_NU_SALT = tl.constexpr(SALTS[1])
_MASTER_SALT = tl.constexpr(SALTS[2])

_SIGN = tl.constexpr(0x80000000)
_UPPER = tl.constexpr(0xFFFF0000)
_INF = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_ONE = tl.constexpr(0x3F800000)
_LARGEST = tl.constexpr(3.3895313892515355e38)  # of bf16
_MIN_NORMAL = tl.constexpr(0x00800000)
_MAX_SCALE = tl.constexpr((126 + 127) << 23)
_NOISE_UNIT = tl.constexpr(2.0**32)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def as_float(bits):
    """The f32 values of uint32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reciprocal(x):
    """1 / x to 2^-23 where x is at most 2^126: one instruction; a division proper takes eight."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
    )


# ---- rounding ------------------------------------------------------------------------------------


@triton.jit
def _canonical(x):
    """Bits of a sum with NaN made 0x7fc00000.

    CUDA's additions know one NaN, 0x7fffffff; as signed integers no other number is as large.
    """
    return tl.minimum(x.to(tl.int32, bitcast=True), _NAN).to(tl.uint32, bitcast=True)


@triton.jit
def round_to_bf16(x):
    """Bits of x rounded to nearest even on the upper half; the lower half is zero."""
    bits = tl.where(x == x, _bits(x), _NAN)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & _UPPER


@triton.jit
def mix(x):
    """`random.mix`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _uniforms(row, lane, SALT: tl.constexpr):
    """2^32 times the uniforms of a slot; `lane` has its factor SALT already."""
    return ((row * SALT)[:, None] + lane).to(tl.float32)


# ---- codecs --------------------------------------------------------------------------------------


@triton.jit
def _guard(bits):
    kept = tl.where(bits < _MIN_NORMAL, 0, tl.minimum(bits, _MAX_SCALE))
    return tl.where(bits >= _INF, _NAN, kept)


@triton.jit
def expand_mu(codes):
    """softsign: z / (254 - |z|), of the group's scale."""
    z = codes.to(tl.float32)
    return z * reciprocal(254.0 - tl.abs(z))


@triton.jit
def encode_mu(x, row, lane, STOCHASTIC: tl.constexpr):
    """Codes and stored scales."""
    y = tl.abs(x)
    stored = (_guard(tl.max(_bits(y), axis=1)) + 0x7FFF) >> 15
    inverse = 1.0 / as_float(tl.where(stored == 0, _ONE, stored << 15))
    # 254 y / (s + y) = 254 - 254 / (1 + y / s)
    z = tl.minimum(254.0 - 254.0 * reciprocal(1.0 + y * inverse[:, None]), 127.0)
    if STOCHASTIC:
        lo = tl.floor(z)
        share = (z - lo) * (253.0 * _NOISE_UNIT - lo * _NOISE_UNIT)
        z = lo + (_uniforms(row, lane, _MU_SALT) * (254.0 - z) < share).to(tl.float32)
    signed = as_float(_bits(z) | (_bits(x) & _SIGN))
    codes = _bits(signed + 1.5 * 2.0**23)  # the low byte is the integer
    return codes.to(tl.int8), stored.to(tl.uint16)


@triton.jit
def encode_nu(x, root, row, lane, STOCHASTIC: tl.constexpr):
    """Codes and stored scales, from the values and their square roots."""
    largest = as_float(tl.max(_bits(x), axis=1))  # none has a sign; as integers NaN are the largest
    stored = as_float(_guard(_bits(tl.sqrt(largest))))
    inverse = tl.where(stored == 0, 0.0, 255.0 / tl.where(stored == 0, 1.0, stored))
    z = tl.minimum(root * inverse[:, None], 255.0)
    if STOCHASTIC:
        lo = tl.floor(z)
        noise = _uniforms(row, lane, _NU_SALT)
        raised = lo * (lo + noise * (2.0 / _NOISE_UNIT)) + noise * (1.0 / _NOISE_UNIT)
        z = lo + (raised < z * z).to(tl.float32)
    z = tl.maximum(z, (x >= 2.0**-126).to(tl.float32))
    return _bits(z + 2.0**23).to(tl.uint8), stored


# ---- weights -------------------------------------------------------------------------------------


@triton.jit
def join(weight, correction, BITS: tl.constexpr):
    """f32 master weights of bf16 bits in the upper half and of corrections."""
    joined = weight + (correction.to(tl.int32) << (32 - BITS)).to(tl.uint32, bitcast=True)
    # only a correction under 0 beside a zero weight changes the sign, and counts as 0
    crossed = (joined ^ weight).to(tl.int32, bitcast=True) < 0
    return as_float(tl.where(crossed, weight, joined))


@triton.jit
def lifted(master, row, lane, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Bits; for 24 of them raised so that dropping the lowest 8 rounds."""
    bits = _canonical(master)
    if STOCHASTIC:
        noise = ((row * _MASTER_SALT)[:, None] + lane) >> 24
        bits += tl.where(tl.abs(master) < _LARGEST, noise, 0)
    elif BITS == 24:
        bits += 0x7F + ((bits >> 8) & 1)
    return bits


@triton.jit
def upper_rounded(bits):
    """bf16 bits (upper half), half rounded up."""
    return (bits + 0x8000) & _UPPER


@triton.jit
def reached(old, target):
    """bf16 bits (upper half) of an old weight plus the bf16 update towards another."""
    back = as_float(old) - as_float(target)  # taken off, it leaves even a -0.0 alone where it is 0
    return round_to_bf16(as_float(old) - as_float(round_to_bf16(back)))


@triton.jit
def correction(lifted, target, reached):
    """Correction of a weight, as the upper bits of 16, clamped where it is not the rounding.

    Rounding may stop at 0 on the way to the other side, but never passes it.
    """
    lowest = tl.where(reached == 0, 0, -0x8000)
    c = tl.minimum(tl.maximum((lifted - reached).to(tl.int32, bitcast=True), lowest), 0x7FFF)
    finite = tl.abs(as_float(reached)) < float("inf")
    return tl.where(finite | (as_float(reached) == as_float(target)), c, 0)
