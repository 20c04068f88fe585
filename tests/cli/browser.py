# SPDX-License-Identifier: Apache-2.0
"""A real browser, driven over its debugging pipe with nothing but Python: Chromium or Chrome reads commands on
descriptor 3 and answers on 4, each a JSON text that ends in a zero byte."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find():
    """The path of a browser, or None; NIB_BROWSER names another one, or none where it is empty."""
    names = os.environ.get("NIB_BROWSER", " ".join(NAMES)).split()
    return next((path for path in map(shutil.which, names) if path), None)


class Browser:
    def __init__(self, program, seconds=300):
        self.end = time.monotonic() + seconds
        self.profile = tempfile.mkdtemp(prefix="nib-browser-")
        command, self.write = os.pipe()
        self.read, answer = os.pipe()
        ends = [os.dup2(fd, 200 + i) for i, fd in enumerate((command, answer))]  # not in the way of 3 and 4

        def arrange():
            os.dup2(200, 3)
            os.dup2(201, 4)

        self.log = open(os.path.join(self.profile, "log"), "w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--hide-scrollbars", "--disable-extensions", "--disable-dev-shm-usage", f"--user-data-dir={self.profile}", "about:blank"],
            preexec_fn=arrange, close_fds=False, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            env={**os.environ, "HOME": self.profile})
        for fd in (command, answer, *ends):
            os.close(fd)
        self.rest, self.number, self.events = b"", 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _next(self):
        while b"\0" not in self.rest:
            left = self.end - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise RuntimeError("the browser does not answer")
            data = os.read(self.read, 1 << 16)
            if not data:
                self.log.seek(0)
                raise SystemExit("the browser ended:\n" + self.log.read()[-2000:])
            self.rest += data
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, session=None, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def wait(self, session, method):
        while True:
            for i, event in enumerate(self.events):
                if event.get("sessionId") == session and event.get("method") == method:
                    return self.events.pop(i)
            self.events.append(self._next())


class Page:
    """One page as one reader sees it: a width, light or dark, with scripts or without."""

    def __init__(self, browser, path, width=1200, height=900, dark=False, scripts=True, printed=False):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", media="print" if printed else "screen",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url="file://" + os.path.abspath(path))
        browser.wait(self.session, "Page.loadEventFired")

    def call(self, method, **parameters):
        return self.browser.call(method, session=self.session, **parameters)

    def run(self, script):
        """The value of a JavaScript expression; also where the page's own scripts are off."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise SystemExit(f"{script[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def said(self):
        """What the page wrote to the console, threw, was denied, or asked the network for."""
        time.sleep(0.03)
        self.run("0")  # whatever was on its way is here before the answer
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        own = [e for e in self.browser.events if e.get("sessionId") == self.session]
        asked = [e["params"]["request"]["url"] for e in own if e["method"] == "Network.requestWillBeSent"]
        return [e["params"] for e in own if e["method"] in kinds] + \
            [url for url in asked if not url.startswith(("file://", "data:"))] + \
            [url for url in asked if url.startswith("file://") and not url.split("#")[0].endswith(".html")]

    def picture(self, path, clip=None):
        more = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        data = self.call("Page.captureScreenshot", format="png", **more)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.browser.call("Target.closeTarget", targetId=self.target)
