"""A headless Chromium, driven through the pipe of its debugging protocol."""

import fcntl
import json
import os
import shutil
import subprocess
import time

BINARIES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, BINARIES)), None)


def _high(descriptor):
    """The descriptor under a number that Chromium's own 3 and 4 do not touch."""
    copy = fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10)
    os.close(descriptor)
    return copy


class Page:
    """One page of a Chromium of its own; close it after use."""

    def __init__(self, directory, *, width=1280, height=800, dark=False):
        theirs_in, ours_out = map(_high, os.pipe())
        ours_in, theirs_out = map(_high, os.pipe())

        def connect():
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        self._process = subprocess.Popen(
            [
                find_chromium(),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
                f"--user-data-dir={directory}",
                "about:blank",
            ],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "wb", 0), os.fdopen(ours_in, "rb")
        self._number, self._session = 0, None
        #: errors that the page's console has shown
        self.errors = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height, dark=dark)

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            data += byte
        message = json.loads(data)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"]["text"])
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(entry["text"])
        return message

    def resize(self, width, height, *, dark=False):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def allow_scripts(self, allowed):
        """Whether pages that are opened from here on run their scripts."""
        self._call("Emulation.setScriptExecutionDisabled", value=not allowed)

    def move_mouse(self, x, y):
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def open(self, url):
        self._call("Page.navigate", url=url)

    def reload(self):
        self._call("Page.reload")

    def evaluate(self, expression):
        """The JSON-ready value of a JavaScript expression."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=60):
        """The first true value of an expression."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = self.evaluate(expression)
            if value:
                return value
            time.sleep(0.05)
        raise AssertionError(f"{expression} is not true after {seconds} s")

    def type(self, text):
        """Type into what has the focus."""
        self._call("Input.insertText", text=text)

    def press_enter(self):
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r", **key)
        self._call("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self):
        self._out.close()
        self._process.terminate()
        self._process.wait(timeout=20)
        self._in.close()
