"""A headless Chromium that tests drive with the DevTools protocol over two pipes: clicks, keys, pictures."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-quic",
    "--no-first-run", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 30.0
"""Seconds to wait for an answer of the browser, or for a condition of the page."""


class Browser:
    """One tab. `console` has the errors, warnings and refusals that the page has caused."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._number, self._rest = 0, b""
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []

    # -- protocol ----------------------------------------------------------------------------------------

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self._note(answer)
        raise AssertionError(f"the browser did not answer {method}")

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, event: Mapping[str, Any]) -> None:
        method, values = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning", "assert"):
            self.console.append(" ".join(str(one.get("value")) for one in values["args"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    # -- what a reader does ------------------------------------------------------------------------------

    def size(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, after the promise that it may be."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        element = f"(async (found) => (await found) instanceof Node || found)({script})"
        while time.monotonic() < deadline:
            if value := self.evaluate(element):
                return value
            time.sleep(0.05)
        text = self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {script}\n{self.console}\n{text}")

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def click(self, selector: str) -> None:
        """Click the first visible element, as a mouse does: at its middle, whatever lies there."""
        place = self.wait(
            f"""(() => {{
                const every = [...document.querySelectorAll({json.dumps(selector)})];
                const found = every.find((one) => one.offsetParent);
                if (!found || found.disabled) return null;
                found.scrollIntoView({{ block: 'center' }});
                const box = found.getBoundingClientRect();
                const place = {{ x: box.x + box.width / 2, y: box.y + box.height / 2 }};
                return found.contains(document.elementFromPoint(place.x, place.y)) ? place : null;
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace the content of an input by typing."""
        self.wait(f"document.querySelector({json.dumps(selector)})")
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"((one) => {{ one.focus(); one.select?.(); }})({found})")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key)
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        values: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": codes[key]}
        if text is not None:
            values["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown", **values)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def save_downloads_in(self, folder: Path) -> None:
        self.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def picture(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def overflow(self) -> list[str]:
        """Return the elements that reach beyond the right edge of the screen."""
        return list(
            self.evaluate(
                """(() => {
                    const right = (one) => one.getBoundingClientRect().right;
                    const fits = (one) => right(one) <= innerWidth + 1;
                    const boxes = [...document.querySelectorAll('.scroll, .log')].filter((box) => fits(box)
                        && getComputedStyle(box).overflowX !== 'visible');
                    const wide = [...document.querySelectorAll('body *')].filter((one) => !fits(one)
                        && !one.closest('.skip, .unseen, svg') && !boxes.some((box) => box.contains(one)));
                    const page = document.documentElement.scrollWidth > innerWidth ? ['page'] : [];
                    return [...wide.map((one) => `${one.tagName}.${one.className}`), ...page];
                })()"""
            )
        )


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with one empty tab."""
    assert CHROMIUM is not None
    commands_read, commands = os.pipe()
    answers, answers_write = os.pipe()
    # The protocol's pipes have to be the descriptors 3 and 4.
    script = f'exec "$0" "$@" 3<&{commands_read} 4>&{answers_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(commands_read, answers_write),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands_read)
    os.close(answers_write)
    tab = Browser(commands, answers)
    try:
        tab.attach()
        yield tab
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        os.close(commands)
        os.close(answers)
