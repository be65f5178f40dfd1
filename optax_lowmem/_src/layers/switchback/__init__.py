"""SwitchBack's 8-bit linear layers, and the converter of models."""
