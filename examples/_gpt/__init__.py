"""The parts of `train_gpt.py`, some of which `train_llama.py` and `finetune.py` share."""
