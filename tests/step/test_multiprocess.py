"""Two processes, each with its devices: the bits of one device, and a checkpoint of both."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

REPO = Path(__file__).parents[2]
WORKER = Path(__file__).parents[1] / "multiprocess_worker.py"
PROCESSES, LIMIT = 2, 150


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def wait(processes, until):
    """Until all have ended, one has failed, or the time is over."""
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(codes):
            return
        time.sleep(0.1)


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_mesh_over_two_processes(tmp_path, platform):
    if platform == "cuda" and jax.device_count() < PROCESSES:
        pytest.skip("needs a GPU for each process")
    env = {**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": platform}
    env["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process has the GPUs too
    port, logs, processes = free_port(), [tmp_path / f"{i}.log" for i in range(PROCESSES)], []
    try:
        for i, log in enumerate(logs):
            own = {"CUDA_VISIBLE_DEVICES": str(i)} if platform == "cuda" else {}
            words = [str(tmp_path / "saved"), str(port), str(i), platform]
            command = [sys.executable, str(WORKER), *words]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env=env | own, stdout=file, stderr=subprocess.STDOUT)
                )
        wait(processes, time.monotonic() + LIMIT)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    said = [log.read_text() for log in logs]
    parts = (f"--- process {i}: {code}\n{text[-4000:]}" for i, (code, text) in
             enumerate(zip(codes, said, strict=True)))  # fmt: skip
    assert codes == [0] * PROCESSES, "exit codes (None: killed here)\n" + "\n".join(parts)
    for text in said:
        assert "trained" in text and "restored" in text, text
