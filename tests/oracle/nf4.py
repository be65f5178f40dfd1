"""NF4 with double quantization in float64, from its definitions, an element at a time."""

import numpy as np
from scipy.stats import norm

BLOCK, NESTED_BLOCK = 64, 256


def levels():
    """QLoRA, section 3: quantiles of N(0, 1) at equal distances in probability.

    8 of the negative half and 9 of the positive one have 0 in common; the outermost probability is
    halfway between the ends of a map with 2^4 and of one with 2^4 - 1 equal parts.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    negative = norm.ppf(np.linspace(1 - outermost, 0.5, 8))
    positive = norm.ppf(np.linspace(0.5, outermost, 9))
    found = np.concatenate([negative, positive[1:]])
    return found / found[-1]


def dynamic_map():
    """8-bit approximations (2015): a code's leading zeros are its decade, the rest its place."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade
        for i in range(count):
            centre = (0.1 + 0.9 * (i + 0.5) / count) * 10.0 ** (decade - 6)
            values += [centre, -centre]
    return np.array(sorted(values))


def nearest(x, values):
    """Return the index of the nearest value, of two equally near ones the lower."""
    distances = np.abs(x[..., None] - values)
    return np.argmin(distances, -1)


def quantize(w):
    """Return codes [rows, columns], absmax codes, the scales of 256 blocks and the offset."""
    w = np.float64(w)
    blocks = w.reshape(-1, BLOCK)
    absmax = np.abs(blocks).max(1)
    codes = nearest(blocks / np.where(absmax, absmax, 1)[:, None], levels())
    offset = absmax.mean()
    padded = np.zeros(-(-len(absmax) // NESTED_BLOCK) * NESTED_BLOCK)
    padded[: len(absmax)] = absmax - offset
    above = padded.reshape(-1, NESTED_BLOCK)
    nested = np.abs(above).max(1)
    absmax_codes = nearest(above / np.where(nested, nested, 1)[:, None], dynamic_map())
    return codes.reshape(w.shape), absmax_codes.ravel()[: len(absmax)], nested, offset


def dequantize(codes, absmax_codes, nested, offset):
    """Return the matrix that the parts stand for."""
    scale = np.repeat(np.float64(nested), NESTED_BLOCK)[: absmax_codes.size]
    absmax = dynamic_map()[absmax_codes.ravel()] * scale + offset
    return (levels()[codes].reshape(-1, BLOCK) * absmax[:, None]).reshape(codes.shape)
