"""What fits on a GPU, by `optax_lowmem.plan`: computed, not measured."""

from benchmarks.records import Rows
from benchmarks.render import GIB, markdown
from optax_lowmem.plan import USABLE, decoder, plan_decoder

CARDS = (8, 16, 24, 40, 48, 80)
LLAMA = {"model_type": "llama", "vocab_size": 128_256, "num_key_value_heads": 8}
MODELS = {  # Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B
    "1B": LLAMA | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192,
                   "num_attention_heads": 32, "tie_word_embeddings": True},
    "3B": LLAMA | {"num_hidden_layers": 28, "hidden_size": 3072, "intermediate_size": 8192,
                   "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    "8B": LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14_336,
                   "num_attention_heads": 32, "tie_word_embeddings": False},
}  # fmt: skip
LORA = ("q_proj", "v_proj"), 16
SEQUENCE = 2048


def fits(rows: Rows) -> str:
    del rows
    head = ["GPU", *(f"{name}, {kind}" for name in MODELS for kind in ("all weights", "LoRA"))]
    body = []
    for card in CARDS:
        cells = []
        for config in MODELS.values():
            budget = int(USABLE * card * GIB)
            found = plan_decoder(decoder(config), "flash_adamw", budget, SEQUENCE, LORA)
            *whole, adapters = found.modes
            best = next((mode for mode in whole if mode.batch), None)
            cells.append(f"{best.name}, {best.batch}" if best else "no")
            cells.append(str(adapters.batch) if adapters.batch else "no")
        body.append([f"{card} GB", *cells])
    return markdown(head, body)


TABLES = {"fits": fits}
