"""The page of an op trace in headless Chromium: what it shows and does.

Needs Chromium, chromedriver and selenium. If one is missing, the tests are skipped with the reason; if the environment
variable CI is set, they fail instead.
"""

from __future__ import annotations

import re

import pytest
from page_browser import Browser
from page_documents import HOSTILE, HOSTILE_TEXT, LINEAR, MODEL, documents, large, rendered


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "small.html"
    path.write_text(rendered(), encoding="utf-8")
    return path


@pytest.fixture
def browser(chromium, file):
    """Shows the small page; afterwards, there must have been no errors and no requests."""
    chromium.show(file)
    yield chromium
    said, sent = chromium.logs()
    assert said == []
    assert {address.split("#")[0] for address in sent} <= {chromium.address, "data:,"}
    assert chromium.driver.title == "small on cuda: op trace"


def keys():
    from selenium.webdriver.common.keys import Keys

    return Keys


ALL = ["SmallForCausalLM", "layer()", "q_proj()", "attn()", "mlp()", "gelu()", f"{HOSTILE}()", "draft()"]


def test_the_logs_tell_of_errors_and_requests(chromium, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('wrong')</script>")
    chromium.show(path)
    said, sent = chromium.logs()
    assert any("wrong" in text for text in said) and "http://127.0.0.1:9/x.png" in sent


def test_the_page_refuses_what_is_not_its_own(chromium, file, tmp_path):
    path = tmp_path / "changed.html"
    path.write_text(file.read_text("utf-8").replace("</main>", "</main><script>document.title = 'owned'</script>"))
    chromium.show(path)
    said, _ = chromium.logs()
    assert chromium.driver.title != "owned" and any("Content Security Policy" in text for text in said)


def test_it_opens_with_header_and_graph(browser):
    assert browser.text("#model") == "small cuda"
    assert browser.text("#summary") == "3 ops in the forward, 1 outside it; 5 kernels, 1 with a Definition"
    browser.click("#versions")
    assert browser.text("#hashes").count("ab" * 32) == 2
    browser.click("#expand")
    assert browser.names() == ALL
    row = browser.row("layer()").text
    assert "Layer.forward" in row and "for i in range(len(self.layers))" in row and "m.py:90" in row
    assert "m.py:12 self.fused m.py:13 not (self.fused)" in browser.row("q_proj()").text
    assert "plain torch" in browser.row("gelu()").text


def test_the_mouse_opens_and_closes(browser):
    browser.click("#collapse")
    assert browser.names() == ["SmallForCausalLM"]
    assert browser.row("SmallForCausalLM").get_attribute("aria-expanded") == "false"
    browser.choose("SmallForCausalLM")
    assert browser.names() == ["SmallForCausalLM", "layer()", "draft()"]
    browser.row("layer()").find_element("css selector", ".twisty").click()
    assert browser.names() == [name for name in ALL if name != "gelu()"]
    browser.choose("layer()")
    assert browser.names() == ["SmallForCausalLM", "layer()", "draft()"]


def test_the_keyboard_opens_and_closes(browser):
    k = keys()
    browser.click("#collapse")
    browser.press(k.TAB)  # to the tabs
    browser.press(k.TAB)
    assert browser.focused() == "SmallForCausalLM"
    browser.press(k.ARROW_RIGHT, k.ARROW_RIGHT)
    assert browser.focused() == "layer()"
    browser.press(k.ENTER, k.ARROW_DOWN)
    assert browser.focused() == "q_proj()"
    browser.press(k.END)
    assert browser.focused() == "draft()"
    browser.press(k.ARROW_UP, k.ARROW_LEFT)
    assert browser.focused() == "layer()"
    browser.press(" ")
    assert browser.names() == ["SmallForCausalLM", "layer()", "draft()"]
    browser.press(k.HOME, k.ARROW_LEFT)
    assert browser.names() == ["SmallForCausalLM"]
    assert browser.run("return document.querySelectorAll('[role=tree] [tabindex=\"0\"]').length") == 3


def test_an_op_shows_its_kernels(browser):
    browser.choose("q_proj()")
    assert browser.text("#subject h2") == "q_proj()"
    assert browser.row("q_proj()").get_attribute("aria-selected") == "true"
    assert [e.text for e in browser.find(".sites li")] == [
        f"{MODEL}:12 Layer.forward\nself.fused",
        f"{MODEL}:13 Layer.forward\nnot (self.fused)",
    ]
    browser.click(".others summary")
    assert browser.find(".sites li")[2].text == f"{MODEL}:44 Draft.forward"
    first, second = (e.text.split("\n") for e in browser.find(".kernel"))
    assert first[:3] == ["fp8_gemm", "sgl-kernel", "quantization=fp8"] and first[3] == "or 2 other conditions"
    assert first[4] == "Definitions: gemm_0 gemm_1 gemm_2 gemm_3 and 3 more"
    assert second == ["fp8_gemm", "triton", "Always possible", "Definitions: none yet"]


def test_a_kernel_shows_its_chains(browser):
    browser.choose("q_proj()")
    assert not browser.run("return document.querySelectorAll('.chain').length")  # created on demand
    browser.click(".kernel button")
    assert [e.text for e in browser.find(".alternatives li")] == [
        "quantization=fp8",
        "or quantization=w8a8",
        "or 1 more",
    ]
    assert "Defined at sgl_kernel/gemm.py:7" in browser.text(".more")
    assert browser.text(".more h5") == "2 call chains through q_proj()"
    assert [e.text.split("\n")[0] for e in browser.find(".chain")[1].find_elements("css selector", ".frame")] == [
        "fp8_gemm(x, w)",
        "self.q_proj(x)",
        "self.layer(x)",
    ]
    assert browser.find(".frame")[0].text == f"fp8_gemm(x, w)\n{LINEAR}:40 Linear.forward\nquantization=fp8"
    assert [e.text.split("\n")[0] for e in browser.find(".frame.here")] == ["self.q_proj(x)"] * 2
    browser.click(".more summary")
    browser.wait(lambda: len(browser.find(".chain")) == 3)
    browser.click(".kernel button")
    assert browser.find(".chain") == []


def test_chains_come_a_few_at_a_time_and_complete(browser):
    browser.choose("attn()")
    assert len(browser.find(".chain")) == 5
    browser.click(".next")
    browser.click(".next")
    assert browser.find(".next") == []
    calls = [e.text.split("\n")[0] for e in browser.find(".chain")]
    assert calls == [f"attend_{n}(q)" for n in range(1, 13)]


def test_every_chain_is_read_back(browser):
    shown = browser.run(
        "return trace.kernels.map((kernel) => kernel.chains().map((chain) => chain.map((frame) => "
        "[frame.file, frame.line, frame.where, frame.call, frame.annotation])))"
    )
    fields = ("file", "line", "function", "call")
    _, kernels = documents()
    expected = [
        [
            [[*(frame[x] for x in fields), "" if position else chain["needs"]] for position, frame in enumerate(frames)]
            for chain in kernel["chains"]
            for frames in [chain["frames"]]
        ]
        for kernel in kernels["kernels"]
    ]
    assert shown == expected


def test_the_keyboard_goes_into_the_op_and_back(browser):
    k = keys()
    browser.choose("layer()")
    browser.press(k.ARROW_RIGHT, k.ARROW_RIGHT, " ")
    assert browser.text("#subject h2") == "q_proj()" and browser.focused() == "q_proj()"
    browser.press(k.ARROW_DOWN, k.ENTER)
    assert browser.text("#subject h2") == "attn()" and browser.focused() == "attn()"
    assert browser.driver.switch_to.active_element.tag_name == "h2"
    browser.press(k.ESCAPE)
    assert browser.focused() == "attn()" and browser.driver.switch_to.active_element.tag_name == "li"
    assert browser.find("#subject") == [] and "#" not in browser.driver.current_url


def test_search_keeps_matches_and_their_way(browser):
    k = keys()
    before = browser.names()
    browser.choose("SmallForCausalLM")
    browser.choose("SmallForCausalLM")
    browser.press("/")
    assert browser.focused() == "search"
    browser.press("MLA")
    assert browser.names() == ["SmallForCausalLM", "layer()", "attn()"]
    assert browser.text("#status") == "1 match in the forward, 0 outside it, 0 direct kernels"
    assert browser.run("return document.getElementById('status').ariaLive") == "polite"
    browser.press(k.ENTER)
    assert browser.focused() == "attn()"
    browser.press("/", k.BACKSPACE, "fp8_gemm q_")
    assert browser.names() == ["SmallForCausalLM", "layer()", "q_proj()"]
    assert [e.text for e in browser.find(".hits mark")] == ["fp8_gemm", "fp8_gemm"]
    browser.press(k.ESCAPE)
    assert browser.names() == before and browser.text("#tab-graph .count") == "3" and browser.find("mark") == []


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("gelu", ["gelu()"]),
        ("mlp.forward", ["mlp()"]),
        ("m.py:25", ["gelu()"]),
        ("flash", []),
        ("attend", ["attn()"]),
        ("gelu attend", []),
    ],
)
def test_search_finds(browser, query, found):
    browser.press("/", query)
    assert [name for name in browser.names() if name in found] == found
    assert browser.text("#tab-graph .count") == str(len(found))


def test_a_match_keeps_what_it_holds(browser):
    browser.press("/", "mlp")
    assert browser.names()[-1] == "mlp()"
    browser.choose("mlp()")
    assert browser.names()[-2:] == ["mlp()", "gelu()"]


def test_search_without_a_match(browser):
    browser.press("/", HOSTILE[:8], "zz")
    assert browser.names() == []
    assert browser.text("#status").startswith(f"Nothing matches “{HOSTILE[:8]}zz”.")
    browser.press(keys().ESCAPE)
    assert browser.names()[0] == "SmallForCausalLM"


def test_the_other_parts(browser):
    k = keys()
    browser.click("#tab-outside")
    assert browser.names() == ["sampling", "sampler()"] and "after every forward" in browser.row("sampler()").text
    browser.choose("sampler()")
    assert "Outside the forward: sampling" in browser.text("#subject") and "sample(p)" in browser.text(".chain")
    browser.click("#tab-outside")
    browser.press(k.ARROW_RIGHT)
    assert browser.focused() == "tab-direct" and browser.names() == ["fp8_gemm"]
    browser.choose("fp8_gemm")
    assert f"{MODEL}:50 Layer.forward" in browser.text("#subject")
    assert browser.find(".kernel .alternatives, .always") == []


def test_the_address_names_an_op(browser, file):
    browser.choose("attn()")
    assert browser.driver.current_url == f"{file.as_uri()}#op/attn"
    browser.choose("q_proj()")
    browser.driver.back()
    browser.wait(lambda: browser.text("#subject h2") == "attn()")
    for fragment, title in (
        ("#outside/sampler", "sampler()"),
        ("#kernel/sgl-kernel/fp8_gemm", "fp8_gemm"),
        ("#op/q_proj", "q_proj()"),
    ):
        browser.show(file, fragment)
        assert browser.text("#subject h2") == title
        assert len(browser.find("[aria-selected=true] .name")) >= 1
    browser.choose(f"{HOSTILE}()")
    address = browser.driver.current_url
    browser.show(file, address.partition("#")[1] + address.partition("#")[2])
    assert browser.text("#subject h2") == f"{HOSTILE}()"
    browser.show(file, "#op/none%")
    assert browser.text("#status") == "There is no “op/none%” in this trace." and browser.find("#subject") == []


def test_hostile_texts_are_shown_as_text(browser):
    browser.choose(f"{HOSTILE}()")
    shown = browser.run("return document.getElementById('subject').textContent")
    assert shown.count(HOSTILE_TEXT) >= 4
    assert HOSTILE_TEXT in browser.run("return [...document.querySelectorAll('.case')].map((e) => e.textContent)")
    browser.choose("q_proj()")
    browser.click(".kernel button")
    assert browser.run("return document.querySelector('.definitions').textContent").strip().endswith(HOSTILE_TEXT)
    browser.press("/", HOSTILE)
    assert f"{HOSTILE}()" in browser.names()
    assert browser.run("return document.querySelectorAll('img, main script').length") == 0


#: Gives the number of visible texts, and those whose contrast with their background is less than 4.5.
CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                        if (c.length === 3 || c[3] > 0) return c; } throw new Error('nothing behind'); };
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const poor = []; let seen = 0;
while (walker.nextNode()) {
  const e = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !e.checkVisibility() || e.closest('script')) continue;
  seen += 1;
  const [color, ground] = [parse(getComputedStyle(e).color), behind(e)];
  const [a, b] = [light(color.slice(0, 3)), light(ground.slice(0, 3))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) poor.push([e.className, e.textContent, contrast]);
}
return [seen, poor];
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(browser, file, scheme):
    browser.show(file, "#op/q_proj", scheme=scheme)
    browser.click("#expand")
    browser.click(".kernel button")
    browser.press("/", "fp8")
    seen, poor = browser.run(CONTRAST)
    assert seen > 60 and poor == []
    background = browser.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background)[:3])) < 200) == (scheme == "dark")
    browser.run("document.getElementById('summary').style.color = '#777'")
    assert browser.run(CONTRAST)[1] != []


def test_the_focus_can_be_seen(browser):
    browser.choose("layer()")
    browser.press(keys().ARROW_UP)
    style = "return getComputedStyle(document.activeElement.querySelector('.row')).outlineStyle"
    assert browser.focused() == "SmallForCausalLM" and browser.run(style) == "solid"


#: Gives the elements that are wider than the space available to them.
WIDTHS = """
return [document.documentElement, ...document.querySelectorAll('#detail, #detail *, .browse, .row, .tabs, header')]
  .filter((e) => e.clientWidth && e.scrollWidth > e.clientWidth).map((e) => e.outerHTML.slice(0, 200))
"""


def test_a_narrow_screen(browser, file):
    browser.show(file, width=360, height=740)
    browser.click("#expand")
    assert browser.run(WIDTHS) == []
    browser.choose("q_proj()")
    assert browser.driver.switch_to.active_element.tag_name == "h2"
    browser.click(".kernel button")
    assert browser.run(WIDTHS) == []
    assert browser.run("return document.getElementById('browse').inert")
    browser.click(".close")
    assert browser.focused() == "q_proj()" and not browser.run("return document.getElementById('browse').inert")


def test_a_large_trace(browser, tmp_path):
    path = tmp_path / "large.html"
    path.write_text(rendered(large), encoding="utf-8")
    browser.show(path, "#op/op_7")
    assert len(browser.find(".kernel")) == 12
    browser.click("#tab-direct")
    assert browser.text("#panel-direct .empty") == "None." and browser.find("#tree-direct") == []
    browser.click("#tab-graph")
    browser.press("/", "kernel_30")
    matches = int(browser.text("#tab-graph .count"))
    assert matches == len(browser.find(".hits mark")) == 60
    took = browser.run(
        "const start = performance.now(); search('layer_1'); search(''); return performance.now() - start"
    )
    assert took < 1000
