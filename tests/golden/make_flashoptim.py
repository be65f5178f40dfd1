"""Write golden vectors from flashoptim's own Triton kernels.

Needs a CUDA GPU, torch and ``pip install flashoptim==0.1.4``:

    python make_flashoptim.py --out flashoptim.npz

Every input is stored beside its outputs, so a test needs neither torch nor a GPU. Names in it:

    meta               one JSON string: versions, GPU, formulas, hyperparameters, notes on arrays
    quant.<case>.x     f32 input of the momentum codec; the variance codec was given x * x in f32
    quant.<case>.<mu|nu>_<codes|scales|decoded>
    ecc.x              f32 weights
    ecc.<bf16|fp16>.<narrow|error8|error16|joined8|joined16>   narrow: raw 16 bits as uint16
    opt.w0, opt.grads  initial f32 master weights; bf16 bits of the gradient of each step
    opt.<name>.<weight|error|mu_codes|mu_scales[|nu_codes|nu_scales]>
                       weight: bf16 bits; row 0 is the initial state, row t the state after step t
"""

import argparse
import json

import flashoptim
import numpy as np
import torch
import triton
from flashoptim.optimizers import dequantize, quantize

SEED, STEPS, SIZE = 20261121, 5, 2048 + 40
CODECS = {  # slot -> keywords of flashoptim's quantize and dequantize, as its AdamW uses them
    "mu": dict(signed=True, sqrt=False, softsign=True),
    "nu": dict(signed=False, sqrt=True, softsign=False),
}
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
SGD = dict(lr=1e-2, momentum=0.9, weight_decay=1e-2)
OPTIMIZERS = {  # name -> (class, keywords, state field -> our slot)
    "adamw": ("FlashAdamW", ADAMW, {"exp_avg": "mu", "exp_avg_sq": "nu"}),
    "lion": ("FlashLion", dict(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1), {"exp_avg": "mu"}),
    "sgd": ("FlashSGD", SGD, {"momentum_buffer": "mu"}),
    "sgd_nesterov": ("FlashSGD", dict(SGD, nesterov=True), {"momentum_buffer": "mu"}),
}
FORMULAS = {
    "groups": "32 neighbours of the flattened tensor; the last may be shorter (padded with zeros)",
    "mu_encode": "a = max(max|x|, 1e-12); n = x/a; y = 2n/(1+|n|); code = floor(127y + 0.5); "
    "scale = fp16(a). Both codecs divide by the f32 a, not by the stored fp16 scale",
    "mu_decode": "y = code/127; x = y/(2-|y|) * f32(scale)",
    "nu_encode": "s = sqrt(x); a = max(max s, 1e-12); code = floor(255 s/a + 0.5); scale = fp16(a)",
    "nu_decode": "s = code/255 * f32(scale); x = s*s",
    "ecc_split": "p = narrow(w), nearest even; k = log2(ulp(p)) - 1 (zero and subnormal p: the "
    "ulp of the smallest normal); r = clip((w - p) * 2^-k, -1, 1) * M; error = copysign(floor(|r| "
    "+ 0.5), r); M = 127 or 32767",
    "ecc_join": "w = p + (error/M) * 2^k",
    "step": "f32 throughout: w = join(weight, error), moments decoded from the stored codes and "
    "scales, g = f32(grad); the update uses the new moments before encoding; 1-b means f32(1) - "
    "f32(b); D = 1 - f32(lr*wd), lr*wd in float64",
    "adamw": "m = m*b1 + g*(1-b1); v = v*b2 + g*g*(1-b2); w = w*D; w = w - (lr*(m/(1-b1^t))) / "
    "(sqrt(v/(1-b2^t)) + eps), t = 1 on the first step; b^t by repeated squaring in f32, which "
    "moves 1-b2^3 by 1.4e-5 relative",
    "lion": "u = sign(m*b1 + g*(1-b1)), sign(0) = 0; m = m*b2 + g*(1-b2); w = w*D; w = w - u*lr",
    "sgd": "g = g + w*wd (coupled decay, so m holds it); m = m*momentum + g; w = w - m*lr",
    "sgd_nesterov": "g = g + w*wd; m = m*momentum + g; w = w - (g + momentum*m)*lr",
    "precision": "division is approximate (div.full.f32: 2 ulp, about a * (1/b)), sqrt too; "
    "fused: m = fma(1-b1, g, m*b1), v = fma(1-b2, g*g, v*b2), code = floor(fma(y, 127, 0.5)), "
    "AdamW and Lion w = fma(w, D, -update), SGD g = fma(w, wd, g), m = fma(m, momentum, g), w = "
    "fma(-step, lr, w). Plain f32 may differ by one code or error bit on a rounding boundary "
    "(bf16 gradients make exact nu ties in step 1), and by more error bits where w nearly cancels",
}
NOTES = {
    "quant.range": "per group max|x|: 1e6 (fp16 scale inf, decodes to inf and NaN), 65000, 1e-7 "
    "(subnormal scale), 1e-9 (scale 0, decodes to 0), 1e-13 (below the floor on a)",
    "ecc.x": "768 normal*0.02; 320 log-uniform 1e-3..10; 160 with exponents -20..14; ties, edges",
    "opt.grads": "the same for every optimizer; elements 0:32 are always 0; 32:64 are +-0.01 * "
    "(1, -0.8, 0.1, -0.1, 0.1) but for element 40, only 2e-5 in step 2: its nu code is 0 then and "
    "its mu code is not, so AdamW then moves it by hundreds of lr; 5 % of the others are 0",
    "row 0": "codes and scales are 0, error = ecc_split(opt.w0); weights 64:72 are 0",
}


def quant_cases(rng):
    lognormal = rng.choice([-1.0, 1.0], 1024) * np.exp(3 * rng.standard_normal(1024)) * 1e-3
    constant = rng.standard_normal(96) * 1e-2
    constant[32:64] = 3e-3
    spread = rng.standard_normal((5, 32))
    spread *= [[1e6], [65000], [1e-7], [1e-9], [1e-13]] / np.abs(spread).max(1, keepdims=True)
    spread[:, 5] = 0
    cases = {
        "normal": rng.standard_normal(2048) * 1e-3,
        "lognormal": lognormal,
        "tail": rng.standard_normal(1000 + 17) * 1e-3,
        "zeros": np.zeros(64),
        "constant": constant,
        "range": spread.ravel(),
    }
    return {name: x.astype(np.float32) for name, x in cases.items()}


def ecc_weights(rng):
    edges = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000]  # 0, -0, 1, -1
    edges += [0x3F808000, 0x3F818000, 0x3F7F8000, 0x3F7FFFFF]  # bf16 ties, and just under 1
    edges += [0xBF808000, 0xBF818000, 0x3F801000, 0x3F803000]  # negative bf16 ties; fp16 ties
    edges += [0x3F7FF000, 0xBF801000, 0xBF803000, 0x477FE000]  # more, and the largest fp16
    edges += [0x3F807FFF, 0x3F808001, 0x3F800001, 0x3F7F7FFF, 0x3F7F8001]  # one ulp beside a tie
    parts = [
        rng.standard_normal(768) * 0.02,
        rng.choice([-1.0, 1.0], 320) * 10 ** rng.uniform(-3, 1, 320),
        rng.choice([-1.0, 1.0], 160) * rng.uniform(1, 2, 160) * 2.0 ** rng.integers(-20, 15, 160),
    ]
    return np.concatenate([*map(np.float32, parts), np.array(edges, np.uint32).view(np.float32)])


def opt_inputs(rng):
    weights = rng.standard_normal(SIZE) * 0.02
    weights[72:200] = rng.choice([-1.0, 1.0], 128) * 10 ** rng.uniform(-3, 1, 128)
    weights[64:72] = 0
    scale = 10 ** rng.uniform(-4, -1, (SIZE + 31) // 32).repeat(32)[:SIZE]
    grads = rng.standard_normal((STEPS, SIZE)) * scale
    grads[rng.uniform(size=grads.shape) < 0.05] = 0
    grads[:, :32] = 0
    pattern = 0.01 * np.array([[1], [-0.8], [0.1], [-0.1], [0.1]])
    grads[:, 32:64] = pattern * rng.choice([-1.0, 1.0], 32)
    grads[:, 40] = [0, 2e-5, 0, 0, 0]
    return weights.astype(np.float32), torch.from_numpy(grads.astype(np.float32)).to(torch.bfloat16)


def host(x):
    return x.detach().cpu().numpy().copy()


def quant_vectors(rng):
    out = {}
    for case, x in quant_cases(rng).items():
        out[f"quant.{case}.x"] = x
        for slot, how in CODECS.items():
            value = torch.from_numpy(x if slot == "mu" else x * x).cuda()
            codes, scales = quantize(value, **how)
            parts = {"codes": codes, "scales": scales, "decoded": dequantize(codes, scales, **how)}
            out.update({f"quant.{case}.{slot}_{part}": host(a) for part, a in parts.items()})
    return out


def ecc_vectors(rng):
    x = ecc_weights(rng)
    out, wide = {"ecc.x": x}, torch.from_numpy(x).cuda()
    for name, dtype in {"bf16": torch.bfloat16, "fp16": torch.float16}.items():
        narrow = wide.to(dtype)
        out[f"ecc.{name}.narrow"] = host(narrow.view(torch.uint16))
        for width in (8, 16):
            error = flashoptim.compute_ecc_bits(wide, narrow, master_bytewidth=2 + width // 8)
            out[f"ecc.{name}.error{width}"] = host(error)
            joined = flashoptim.reconstruct_fp32_param(narrow, error)
            out[f"ecc.{name}.joined{width}"] = host(joined)
    return out


def snapshot(param, state, slots):
    row = {"weight": host(param.detach().view(torch.uint16)), "error": host(state["error_bits"])}
    for field, slot in slots.items():
        row[f"{slot}_codes"] = host(state[field].quantized)
        row[f"{slot}_scales"] = host(state[field].scales)
    return row


def opt_vectors(rng):
    weights, grads = opt_inputs(rng)
    out = {"opt.w0": weights, "opt.grads": host(grads.view(torch.uint16))}
    wide = torch.from_numpy(weights).cuda()
    for name, (cls, keywords, slots) in OPTIMIZERS.items():
        param = torch.nn.Parameter(wide.to(torch.bfloat16))
        tx = getattr(flashoptim, cls)([param], master_weight_bits=24, **keywords)
        # Without these the first step would start from error bits that are zero.
        tx.state[param]["error_bits"] = flashoptim.compute_ecc_bits(wide, param.detach(), 3)
        tx._ensure_state_initialized(param, tx.param_groups[0])
        rows = [snapshot(param, tx.state[param], slots)]
        for grad in grads:
            param.grad = grad.cuda()
            tx.step()
            rows.append(snapshot(param, tx.state[param], slots))
        out.update({f"opt.{name}.{key}": np.stack([row[key] for row in rows]) for key in rows[0]})
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="flashoptim.npz")
    args = parser.parse_args()
    meta = {
        "versions": {m.__name__: str(m.__version__) for m in (flashoptim, torch, triton, np)},
        "gpu": torch.cuda.get_device_name(),
        "settings": {"seed": SEED, "fused": True, "master_weight_bits": 24, "group_size": 32},
        "hyperparameters": {k: {"class": cls, **kw} for k, (cls, kw, _) in OPTIMIZERS.items()},
        "formulas": FORMULAS,
        "notes": NOTES,
    }
    rng = np.random.default_rng(SEED)
    arrays = {**quant_vectors(rng), **ecc_vectors(rng), **opt_vectors(rng)}
    np.savez_compressed(args.out, meta=np.array(json.dumps(meta)), **arrays)


if __name__ == "__main__":
    main()
