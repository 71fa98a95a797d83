"""Drives an installed Chromium headless through its DevTools pipe, with the standard library only.

with Browser(tmp_path) as browser:
    page = browser.open("file:///report.html")
    page.evaluate("document.title")
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
START = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
KEYS = {"Enter": ("\r", 13), " ": (" ", 32), "Tab": ("", 9)}
ARROWS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35}
SECONDS = 60


class Browser:
    def __init__(self, folder):
        self.folder = Path(folder) / "profile"

    def __enter__(self):
        reads, self._commands = os.pipe()
        self._answers, writes = os.pipe()
        command = [sys.executable, "-c", START, str(reads), str(writes), CHROMIUM, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self.folder}", "about:blank"],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._number, self._buffer, self.events = 0, b"", []
        return self

    def __exit__(self, *_):
        self._process.terminate()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _read(self):
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method, session=None, **params):
        """The result of a command; events that arrive before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        text = json.dumps(message).encode() + b"\0"
        while text:  # a pipe takes a long command in parts
            text = text[os.write(self._commands, text) :]
        while True:
            found = self._read()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self.events.append(found)

    def open(self, url, width=1280, height=900, scheme="light"):
        page = Page(self)
        page.resize(width, height)
        page.emulate(scheme)
        page.goto(url)
        return page


class Page:
    """One tab, with its console errors and requests."""

    def __init__(self, browser):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        found = browser.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def goto(self, url):
        self.call("Page.navigate", url=url)
        end = time.monotonic() + SECONDS
        while self.evaluate("document.readyState") != "complete":
            if time.monotonic() > end:
                raise RuntimeError(f"{url} does not finish loading")
            time.sleep(0.02)

    def _events(self, method):
        own = (e for e in self.browser.events if e.get("sessionId") == self.session)
        return [event["params"] for event in own if event["method"] == method]

    @property
    def errors(self):
        """Exceptions, console errors and warnings, and refusals of the security policy."""
        self.evaluate("0")  # events come before this answer
        console = [e for e in self._events("Runtime.consoleAPICalled") if e["type"] != "log"]
        return [*self._events("Runtime.exceptionThrown"), *console, *self._events("Log.entryAdded")]

    @property
    def requests(self):
        self.evaluate("0")
        return [e["request"]["url"] for e in self._events("Network.requestWillBeSent")]

    def evaluate(self, expression):
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def resize(self, width, height, is_phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def emulate(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def click(self, selector):
        """A real click in the middle of an element."""
        place = f"""(() => {{
            const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center", behavior: "instant"}});
            const b = e.getBoundingClientRect();
            return [b.left + b.width / 2, b.top + b.height / 2];
        }})()"""
        x, y = self.evaluate(place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        text, number = KEYS.get(key, ("", ARROWS.get(key, 0)))
        if len(key) == 1:
            text, number = key, ord(key.upper())
        facts = {"key": key, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **facts)
        self.call("Input.dispatchKeyEvent", type="keyUp", **facts)

    def write(self, selector, text):
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def screenshot(self, path, is_whole=False):
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=is_whole)
        Path(path).write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path):
        found = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        Path(path).write_bytes(base64.b64decode(found["data"]))
