"""The site in headless Chromium: lookups, filters, the keyboard, both color schemes, and accessibility.

Needs Chromium, chromedriver and selenium. If one is missing, the tests are skipped with the reason; if the environment
variable CI is set, they fail instead.
"""

from __future__ import annotations

import json

import pytest
from page_browser import Browser

from flashinfer_trace import find_root

LOOKUPS = json.loads((find_root() / "tests/support/lookups.json").read_text(encoding="utf-8"))
STEP = "runs/deepseek_v3-fp8-flashinfer.html"
#: One page of each kind.
PAGES = (
    "index.html",
    "catalog.html",
    "definitions/fp8_blockwise_scaled_mm_n2112_k7168.html",
    "families/rmsnorm.html",
    "models/deepseek-v3.html",
    STEP,
    "kernels/flashinfer-norm-rmsnorm.html",
    "findings.html",
    "reference/tags.html",
    "docs/glossary.html",
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium):
    """Afterwards, there must have been no errors and no requests to the network."""
    chromium.logs()
    yield chromium
    said, sent = chromium.logs()
    assert said == []
    assert [address for address in sent if not address.startswith(("file:", "data:", "about:", "blob:"))] == []


def keys():
    from selenium.webdriver.common.keys import Keys

    return Keys


def found(browser):
    return [one.text for one in browser.find("#found a")]


@pytest.mark.parametrize("lookup", LOOKUPS, ids=lambda one: one["what"])
def test_two_actions_answer_each_lookup(browser, site_folder, lookup):
    """Search on the home page, then choose what is found."""
    browser.show(site_folder / "index.html")
    (box,) = browser.find(".search-home input")
    box.send_keys(lookup["words"], keys().ENTER)
    browser.wait(lambda: found(browser))
    (link, *_) = (one for one in browser.find("#found a") if one.text.startswith(lookup["finds"]))
    name = link.text
    link.click()
    browser.wait(lambda: browser.find("h1"))
    assert browser.text("h1").startswith(name) and name.startswith(lookup["finds"])


def choose(browser, select, value):
    browser.driver.find_element("css selector", f"#{select} option[value='{value}']").click()


def test_filters_combine_and_the_address_keeps_them(browser, site_folder):
    browser.show(site_folder / "catalog.html")
    browser.wait(lambda: found(browser))
    counts = []
    choices = {"op": "gqa_paged", "model": "llama-3.1-70b", "tp": "8", "dtype": "bfloat16", "state": "verified"}
    for select, value in choices.items():
        choose(browser, select, value)
        counts.append(int(browser.text("#count").split()[0]))
    assert counts == sorted(counts, reverse=True) and counts[-1] >= 1 and counts[1] > counts[2]
    names = found(browser)
    assert all(name.startswith("gqa_paged_") and "_h8_kv1_" in name for name in names)
    address = browser.driver.current_url
    browser.show(site_folder / "index.html")
    browser.driver.get(address)
    browser.wait(lambda: found(browser) == names)
    choose(browser, "gpu", "H100")
    choose(browser, "ep", "8")
    assert browser.text("#count") == "0 Definitions" and found(browser) == []


def test_the_keyboard_alone_finds_a_definition(browser, site_folder):
    k = keys()
    browser.show(site_folder / "catalog.html")
    for _ in range(30):
        browser.press(k.TAB)
        if browser.focused() == "q":
            break
    browser.press("rmsnorm_h7168")
    browser.wait(lambda: "rmsnorm_h7168" in found(browser) and len(found(browser)) < 10)
    for _ in range(20):
        browser.press(k.TAB)
        if browser.focused() == "rmsnorm_h7168":
            break
    browser.press(k.ENTER)
    browser.wait(lambda: browser.find("h1") and browser.text("h1").startswith("rmsnorm_h7168"))


def test_a_long_list_grows_on_demand(browser, site_folder):
    browser.show(site_folder / "catalog.html")
    browser.wait(lambda: found(browser))
    before = len(found(browser))
    browser.click("#more")
    assert before == 60 < len(found(browser))


def test_the_search_of_the_site_answers_without_a_server(browser, site_folder):
    browser.show(site_folder / "index.html")
    browser.press("/")
    (box,) = browser.find(".md-search__input")
    box.send_keys("vacuous")
    browser.wait(lambda: any("Glossary" in one.text for one in browser.find(".md-search-result__item")))


def test_the_decode_step_of_deepseek_v3_in_order(browser, site_folder):
    """The home page links to it; the shares add up, and the order is that of the layer."""
    browser.show(site_folder / "index.html")
    (link,) = (one for one in browser.find("article a") if "decode step of DeepSeek-V3" in one.text)
    link.click()
    browser.wait(lambda: browser.find("#decode"))
    tables = [
        [
            [cell.text for cell in row.find_elements("css selector", "td")]
            for row in one.find_elements("css selector", "tbody tr")
        ]
        for one in browser.find("article table.data")[:2]
    ]
    top = {row[0]: float(row[2].rstrip("%")) for row in tables[0]}
    assert top["fused_moe_kernel"] > 70 and 5 < top["fp8_gemm_nt"] < 20 and "BatchMLAPagedAttentionWrapper.run" in top
    kernels = [row[3] for row in tables[1]]
    places = [kernels.index(name) for name in ("embedding", "fp8_gemm_nt", "BatchMLAPagedAttentionWrapper.run")]
    places += [kernels.index(name) for name in ("fused_moe_kernel", "matmul", "top_k_top_p_sampling_from_probs")]
    assert places == sorted(places)
    assert sum(float(row[6].rstrip("%")) for row in tables[1]) == pytest.approx(100, abs=2)
    assert "moe_fp8_block_scale_expert_gemm_topk9_r1_e257_n4096_k7168" in {row[4] for row in tables[1]}


def test_findings_are_filtered(browser, site_folder):
    browser.show(site_folder / "findings.html")
    every = len(browser.find(".finding"))
    choose(browser, "filter-library", "sglang")
    some = browser.find(".finding")
    assert 0 < len(some) < every
    assert {one.get_attribute("data-library") for one in some} == {"sglang"}
    findings = json.loads((find_root() / "findings/kernels.json").read_text(encoding="utf-8"))["findings"]
    states = {one["id"]: (one["library"], {defect["state"] for defect in one["defects"]}) for one in findings}
    empty = []
    for library in sorted({library for library, _ in states.values()}):
        choose(browser, "filter-library", library)
        for state in sorted({state for _, found in states.values() for state in found}):
            choose(browser, "filter-state", state)
            wanted = [name for name, (of, found) in states.items() if of == library and state in found]
            assert [one.get_attribute("id") for one in browser.find(".finding h2")] == wanted
            if not wanted:
                assert browser.find(".finding") == []
                empty.append((library, state))
    assert empty, "no pair of a library and a state is without findings"


def test_another_server_is_chosen_on_the_page(browser, site_folder):
    browser.show(site_folder / STEP)
    (select,) = browser.find("select.go")
    options = select.find_elements("css selector", "option")
    assert len(options) > 3
    options[1].click()
    browser.wait(lambda: not browser.driver.current_url.endswith(STEP))
    assert browser.text("h1").startswith("DeepSeek-V3")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", PAGES)
def test_pages_fit_the_screen(browser, site_folder, page, width):
    browser.show(site_folder / page, width=width)
    assert browser.run("return document.scrollingElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_pages_are_accessible(browser, site_folder, page, scheme):
    axe_selenium = pytest.importorskip("axe_selenium_python", reason="axe-selenium-python is in the test extra")
    browser.show(site_folder / page, scheme=scheme)
    assert browser.run("return document.body.dataset.mdColorScheme") == {"light": "default", "dark": "slate"}[scheme]
    axe = axe_selenium.Axe(browser.driver)
    axe.inject()
    # The hidden switches of the color scheme are the theme's; people use the visible button.
    found = axe.run({"exclude": [[".md-option"]]}, {"runOnly": ["wcag2a", "wcag2aa"]})
    problems = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in problems] == []
