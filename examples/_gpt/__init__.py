"""The parts of `train_gpt.py`: configuration, model, data, training loop, report."""
