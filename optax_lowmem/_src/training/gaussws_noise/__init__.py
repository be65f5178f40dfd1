"""`gaussws_noise`: noise on the weights of an optimizer, and its bitwidths."""
