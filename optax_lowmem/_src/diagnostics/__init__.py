"""Training diagnostics: codes and stalls, RMS_t, spikes, weight norms."""
