"""Programs compiled for TPUs on a machine without one: traffic, memory and estimates of cycles."""
