"""The step of several parameters as a GPU kernel."""
