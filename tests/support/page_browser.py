"""Headless Chromium that shows one page and answers questions about it."""

from __future__ import annotations

import json
import os
import shutil

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def missing(reason):
    if os.environ.get("CI"):
        pytest.fail(f"CI is set, and {reason}")
    pytest.skip(reason)


class Browser:
    """Headless Chromium that shows one page."""

    def __init__(self, profile):
        try:
            from selenium import webdriver
        except ImportError:
            missing("selenium is not installed: it is in the test extra")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        chromedriver = shutil.which("chromedriver")
        if not (chromium and chromedriver):
            missing("Chromium or chromedriver is not installed: .ci/install-browser installs both on Debian")
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))

    def show(self, path, fragment="", width=1280, height=800, scheme="light"):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get("about:blank")
        self.logs()
        self.address = path.as_uri()
        self.driver.get(self.address + fragment)

    def logs(self):
        """Console messages and requested addresses since the last call."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return said, sent

    def find(self, selector):
        script = "return [...document.querySelectorAll(arguments[0])].filter((found) => found.checkVisibility())"
        return self.driver.execute_script(script, selector)

    def text(self, selector):
        (found,) = self.find(selector)
        return found.text

    def click(self, selector, number=0):
        self.find(selector)[number].click()

    def names(self):
        """The visible names in the tree, in order."""
        script = "return arguments[0].map((found) => found.textContent)"
        return self.driver.execute_script(script, self.find("[role=tree] .name"))

    def row(self, name):
        (found,) = [e for e in self.find("[role=treeitem]") if e.get_attribute("data-name") == name]
        return found

    def choose(self, name):
        self.row(name).find_element("css selector", ".name").click()

    def press(self, *keys):
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def focused(self):
        """The name of the tree item that has the focus, or the text of the other element that has it."""
        active = self.driver.switch_to.active_element
        return active.get_attribute("data-name") or active.get_attribute("id") or active.text

    def wait(self, condition):
        """Waits for an effect that may appear after the call that causes it has returned."""
        from selenium.webdriver.support.wait import WebDriverWait

        WebDriverWait(self.driver, 10, poll_frequency=0.02).until(lambda _: condition())

    def run(self, script):
        return self.driver.execute_script(script)
