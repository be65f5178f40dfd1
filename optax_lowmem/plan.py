"""Plan the memory of a known decoder: `python -m optax_lowmem.plan --params FOLDER --gpu 24GiB`."""

from optax_lowmem._src.training.memory.command import USABLE, bytes_of, main, plan_decoder
from optax_lowmem._src.training.memory.decoders import Decoder, decoder, lora_names

__all__ = ["USABLE", "Decoder", "bytes_of", "decoder", "lora_names", "main", "plan_decoder"]

if __name__ == "__main__":
    main()
