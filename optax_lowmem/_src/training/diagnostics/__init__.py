"""Code use and stalls, RMS_t, loss spikes, norms per parameter."""
