"""The parts of `train_gpt.py`, some of which `train_digits.py` and `train_llama.py` share."""
