"""Two processes with two devices each: the bits of one device, and a checkpoint of both."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_mesh_over_two_processes(tmp_path):
    env = {**os.environ, "PYTHONPATH": str(REPO), "JAX_PLATFORMS": "cpu"}
    port, logs, processes = free_port(), [tmp_path / f"{i}.log" for i in range(PROCESSES)], []
    try:
        for i, log in enumerate(logs):
            command = [sys.executable, str(WORKER), str(tmp_path / "saved"), str(port), str(i)]
            with log.open("w") as file:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
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
