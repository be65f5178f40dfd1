"""Float64 NumPy oracles, written from the FlashOptim paper independent of what they check."""
