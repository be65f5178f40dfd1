"""Plan the memory of a known decoder: `python -m optax_lowmem.plan --params FOLDER --gpu 24GiB`."""

from optax_lowmem._src.memory.command import USABLE as USABLE
from optax_lowmem._src.memory.command import bytes_of as bytes_of
from optax_lowmem._src.memory.command import main as main
from optax_lowmem._src.memory.command import plan_decoder as plan_decoder
from optax_lowmem._src.memory.decoders import Decoder as Decoder
from optax_lowmem._src.memory.decoders import decoder as decoder

__all__ = ["USABLE", "Decoder", "bytes_of", "decoder", "main", "plan_decoder"]

if __name__ == "__main__":
    main()
