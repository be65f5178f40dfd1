"""The parts of `train_llama.py`."""
