"""A real headless browser over the DevTools pipe: no driver, no port, no package."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # there is none inside a container, and the page is ours
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)
START = """
import os, sys
from fcntl import F_DUPFD, fcntl
for place, end in enumerate([fcntl(int(end), F_DUPFD, 10) for end in sys.argv[1:3]], 3):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and writes answers to descriptor 4."""
ANSWER_S = 60.0
"""A page of ours is there in a second; a loaded machine may take many times that."""


def find_browser():
    """Return the path of a Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process; `events` holds what it told of each page."""

    def __init__(self, path, folder):
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        ends = [str(to_read), str(from_write)]
        words = [sys.executable, "-c", START, *ends, path, *FLAGS, f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(
            words,
            pass_fds=(to_read, from_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        self.commands, self.answers = to_write, from_read
        self.buffer = b""
        self.numbers = itertools.count(1)
        self.events = defaultdict(list)

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.process.terminate()
        self.process.wait(10)
        os.close(self.commands)
        os.close(self.answers)

    def call(self, method, session=None, **params):
        """Send one command and return its answer; events on the way are kept."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self.events[answer.get("sessionId")].append(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, url, *, width, scheme):
        """Open a page in a tab of its own and return it when it is drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable", session)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", session, features=features)
        self.call("Page.navigate", session, url=url)
        page = Page(self, session)
        end = time.monotonic() + ANSWER_S
        while page.value("document.readyState") != "complete" or page.value("location.href") != url:
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.05)
        return page

    def _receive(self):
        while b"\0" not in self.buffer:
            part = os.read(self.answers, 1 << 20)
            assert part, "the browser ended"
            self.buffer += part
        line, _end, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)


class Page:
    """One open page."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def value(self, expression):
        """Return what an expression gives in the page; the page's own policy does not bind it."""
        found = self.browser.call(
            "Runtime.evaluate", self.session, expression=expression, returnByValue=True
        )
        return found["result"].get("value")

    def screenshot(self):
        """Return the whole page as PNG bytes."""
        width, height = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.browser.call(
            "Page.captureScreenshot", self.session, clip=clip, captureBeyondViewport=True
        )
        return base64.b64decode(shot["data"])

    def requests(self):
        """Return the addresses that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.browser.events[self.session]
            if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self):
        """Return what the console shows: errors, warnings, a policy that was violated."""
        return [
            event["params"]
            for event in self.browser.events[self.session]
            if event["method"]
            in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]
