"""A headless Chromium, controlled over a pipe: the DevTools protocol as JSON texts that end with a zero byte."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    f"The tests of pages need a browser: one of {', '.join(NAMES)}. On Debian: apt-get install chromium."
)
_LIMIT_S = 60


def path_of_browser():
    """The browser that is installed; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page."""

    def __init__(self, profile):
        path = path_of_browser()
        assert path is not None, MISSING
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        options = [
            "--headless",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ]
        options += ["--no-sandbox"] if os.geteuid() == 0 else []

        def as_3_and_4():  # where the browser looks for them
            first, second = os.dup(commands), os.dup(answers)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [path, *options, "--remote-debugging-pipe", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=as_3_and_4,
        )
        os.close(commands)
        os.close(answers)
        self._rest, self._number = b"", 0
        self.errors = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = None
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    # --- what tests do ------------------------------------------------------------------------------------

    def show(self, url, *, width=1280, height=900, is_dark=False):
        """Opens a page in a window of this size."""
        self.errors.clear()
        self.resize(width, height, is_dark=is_dark)
        self._call("Page.navigate", url=url)
        self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def resize(self, width, height=900, *, is_dark=False):
        """Changes the size of the window."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression):
        """The value of an expression in JavaScript, as JSON has it."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector):
        """The texts of all elements that a selector of CSS finds."""
        return self.value(
            f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)"
        )

    def wait_until(self, expression):
        """Waits until an expression in JavaScript is true."""
        deadline = time.monotonic() + _LIMIT_S
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not become true in {_LIMIT_S} s"
            time.sleep(0.05)

    def picture(self, path):
        """Writes a PNG of the whole page."""
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self):
        """Ends the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._call("Browser.close")
        os.close(self._write)
        os.close(self._read)
        try:
            self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- the protocol -------------------------------------------------------------------------------------

    def _call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if getattr(self, "_session", None) is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _LIMIT_S
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(event["params"]["exceptionDetails"]["text"])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])

    def _receive(self, deadline):
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], max(0, deadline - time.monotonic()))[0], "no answer"
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)
