"""A headless Chromium, spoken to in its DevTools protocol over pipes: no driver, no package."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

# the pipes of the protocol are 3 and 4
START = """
import os, sys
for given, wanted in zip(map(int, sys.argv[1:3]), (3, 4)):
    os.dup2(given, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """Return the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a Chromium of its own; a context manager."""

    def __init__(self, program: str, profile: Path):
        from_us, self._write = os.pipe()
        self._read, from_it = os.pipe()
        names = "headless=new no-sandbox disable-gpu disable-dev-shm-usage hide-scrollbars"
        more = "remote-debugging-pipe", f"user-data-dir={profile}"
        flags = [f"--{name}" for name in (*names.split(), *more)]

        # A function between fork and the program would run in a copy of JAX's threads, which warns.
        ours = [fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 10) for pipe in (from_us, from_it)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ours), program, *flags, "about:blank"],
            pass_fds=ours,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for pipe in ours:
            os.close(pipe)
        os.close(from_us)
        os.close(from_it)
        self._buffer, self._count, self._session = b"", 0, None
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")
        self.width(1280)

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser did not answer")
            got = os.read(self._read, 1 << 20)
            if not got:
                raise RuntimeError("the browser ended")
            self._buffer += got
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        sent = {"id": self._count, "method": method, "params": params}
        if self._session:
            sent["sessionId"] = self._session
        os.write(self._write, json.dumps(sent).encode() + b"\0")
        until = time.monotonic() + 60
        while True:
            message = self._message(until)
            if message.get("id") == self._count:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def width(self, pixels: int, height: int = 900) -> None:
        """Make the window that wide."""
        self._call("Emulation.setDeviceMetricsOverride", width=pixels, height=height,
                   deviceScaleFactor=1, mobile=pixels < 600)  # fmt: skip

    def open(self, url: str) -> None:
        """Load a page, and wait until it and its pictures are there."""
        self._call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)})")
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return what JavaScript makes of an expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20) -> Any:
        """Return the first true value of an expression."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)
        return value
