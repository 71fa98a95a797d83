"""The report in a real browser: no errors, no requests, and its interactions."""

import json

import pytest
from browser import CHROMIUM, Browser
from report_sections import LEDGER, TUNE

import bitwright as bw
from bitwright import demo
from bitwright.report.html.data import ReportData

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
HOSTILE = "</script><img src=https://example.invalid/x onerror=alert(1)><b>bold</b>"
COLUMN = """[...document.querySelectorAll("#layer-table tbody tr.row")].map(
    (row) => row.cells[{column}].textContent.trim())"""
SELECTED = "[...document.querySelectorAll('.node[aria-pressed=true]')].map((n) => +n.dataset.node)"
FOCUSED = "+document.activeElement.dataset.node"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The path of a report with every section, and its data."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    quantized = bw.quantize(demo.model_path(), data=demo.calibration(), threads=2)
    made = bw.write_report(path, quantized, ledger=LEDGER, tune=TUNE, command="bitwright report")
    for number, node in enumerate(made.graph["nodes"]):
        node["seconds"] = 1e-5 * (number + 1)
    made.layers[2] |= {"name": HOSTILE, "scheme": "float", "reason": HOSTILE}
    made.title = HOSTILE
    made.worst_inputs = [{"batch": 3, "sqnr_db": 20.0, "cosine": 0.99, "max_error": 0.1}]
    made.skipped = [{"kind": "float layer", "name": "a", "op": "conv", "reason": HOSTILE}]
    made.notes = ["one note"]
    made.save(path)
    return path, made.to_json()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def page(browser, report):
    found = browser.open(report[0].as_uri())
    yield found
    assert found.errors == []
    assert found.requests == [report[0].as_uri()]


def test_every_section_is_there(page):
    found = page.evaluate("[...document.querySelectorAll('main > section')].map((s) => s.id)")
    names = ["summary", "graph", "layers", "ledger", "pareto", "skipped", "worst", "reproduce"]
    assert found == names
    links = page.evaluate("[...document.querySelectorAll('#nav a')].map((a) => a.hash)")
    assert links == [f"#{name}" for name in names]


def test_text_of_the_model_never_becomes_html(page):
    assert page.evaluate("document.querySelectorAll('main img, main b').length") == 0
    assert page.evaluate("document.querySelector('h1').textContent") == HOSTILE
    assert HOSTILE in page.evaluate("document.title")


def test_sorting(page):
    page.click("[data-sort=sqnr]")
    rising = page.evaluate(COLUMN.format(column=2))
    assert rising == sorted(rising, key=float)
    assert page.evaluate("document.querySelector('[data-sort=sqnr]').parentNode.ariaSort") == (
        "ascending"
    )
    page.click("[data-sort=sqnr]")
    assert page.evaluate(COLUMN.format(column=2)) == rising[::-1]
    page.evaluate("document.querySelector('[data-sort=name]').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelectorAll('[aria-sort=ascending]').length") == 1
    names = page.evaluate("[...document.querySelectorAll('button.name')].map((b) => b.textContent)")
    assert names.index("block1.conv1") < names.index("head") < names.index("stem")


def test_filtering(page, report):
    total = len(report[1]["layers"])
    page.write("#filter", "BLOCK2")
    assert page.evaluate("document.querySelectorAll('#layer-table tr.row').length") == 2
    assert page.evaluate("document.getElementById('layer-count').textContent") == (
        f"2 of {total} layers"
    )
    page.evaluate("document.getElementById('filter').select()")
    page.call("Input.insertText", text="no such layer")
    assert page.evaluate("document.querySelectorAll('#layer-table tr.row').length") == 0
    page.evaluate("""(() => {
        const [text, scheme] = ["filter", "scheme-filter"].map((id) => document.getElementById(id));
        text.value = ""; text.dispatchEvent(new Event("input"));
        scheme.value = "float"; scheme.dispatchEvent(new Event("change"));
    })()""")
    assert page.evaluate("document.querySelectorAll('#layer-table tr.row').length") == 1


def test_a_row_opens_and_leads_to_the_graph(page, report):
    page.click("[data-layer='0']")
    opened = "document.querySelector('[data-layer=\"0\"]').ariaExpanded"
    assert page.evaluate(opened) == "true"
    assert page.evaluate("document.querySelectorAll('tr.detail svg.histogram').length") == 2
    page.click("tr.detail .go")
    assert page.evaluate(SELECTED) == [report[1]["layers"][0]["node"]]
    page.click("[data-layer='0']")
    assert page.evaluate(opened) == "false"


def test_nodes_are_selected_by_mouse(page, report):
    node = report[1]["layers"][0]["node"]
    assert page.evaluate("document.querySelector('.side').hidden")
    page.click(f"[data-node='{node}']")
    assert page.evaluate(SELECTED) == [node]
    assert page.evaluate("document.getElementById('node-name').textContent") == "stem"
    assert page.evaluate("document.querySelectorAll('.edge.lit').length") >= 2
    page.click("#node-detail .go")
    assert page.evaluate("document.activeElement.dataset.layer") == "0"
    page.click(".side .close")
    assert page.evaluate(SELECTED) == []


def test_nodes_are_reached_by_keyboard(page):
    page.evaluate("document.querySelector('.node[tabindex=\"0\"]').focus()")
    page.press("ArrowDown")
    first = page.evaluate(FOCUSED)
    assert first == 1
    page.press("Enter")
    assert page.evaluate(SELECTED) == [first]
    page.press("End")
    last = page.evaluate(FOCUSED)
    page.press(" ")
    assert page.evaluate(SELECTED) == [last] != [first]
    page.press("ArrowUp")
    assert page.evaluate(FOCUSED) == last - 1
    page.press("Home")
    assert page.evaluate(FOCUSED) == 0
    assert page.evaluate("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1
    before = page.evaluate("document.getElementById('graph-svg').getAttribute('viewBox')")
    page.press("+")
    assert page.evaluate("document.getElementById('graph-svg').getAttribute('viewBox')") != before
    page.press("Escape")
    assert page.evaluate(SELECTED) == []


def test_colours(page):
    for mode, letter in (("error", "e"), ("time", "t")):
        page.click(f"[data-mode={mode}]")
        painted = f"document.querySelectorAll('.node[class*=\" {letter}\"]').length"
        assert page.evaluate(painted) > 2
        assert page.evaluate("document.querySelectorAll('#legend .ramp i').length") == 7
    page.click("[data-mode=scheme]")
    assert page.evaluate("document.querySelectorAll('#legend .ramp i').length") == 0


def test_themes(browser, report):
    page = browser.open(report[0].as_uri(), scheme="dark")
    shade = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(shade)
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    light = page.evaluate(shade)
    assert light != dark
    page.click("#theme")
    assert page.evaluate(shade) == dark
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") is None
    assert page.errors == []


@pytest.mark.parametrize("width", [320, 390, 768, 1600])
def test_the_page_is_not_wider_than_the_screen(page, report, width):
    page.resize(width, 800, is_phone=width < 500)
    page.goto(report[0].as_uri())
    page.click("[data-layer='1']")
    page.evaluate("document.querySelector('.node').dispatchEvent("
                  "new MouseEvent('click', {bubbles: true}))")  # fmt: skip
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.browser.events.clear()
    page.goto(report[0].as_uri())


def test_controls_and_pictures_have_names(page):
    nameless = """[...document.querySelectorAll("button, input, select, svg[role], section")]
        .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby")))
        .map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    headings = page.evaluate("[...document.querySelectorAll('h1, h2')].map((e) => e.tagName)")
    assert headings[0] == "H1" and set(headings[1:]) == {"H2"}
    assert page.evaluate("document.documentElement.lang") == "en"
    first = page.evaluate("document.querySelector('a').getAttribute('href')")
    assert page.evaluate(f"Boolean(document.querySelector({json.dumps(first)}))")


def test_text_has_contrast(browser, report):
    """Text of both themes reaches 4.5 to 1 against the page, WCAG's level AA."""
    names = ["--ink", "--soft", "--accent", "--good", "--act"]
    script = f"""(() => {{
        const light = (name) => {{
            const e = document.createElement("i");
            e.style.color = `var(${{name}})`;
            document.body.append(e);
            const parts = getComputedStyle(e).color.match(/[0-9.]+/g).slice(0, 3);
            e.remove();
            const linear = (v) => (v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
            const [r, g, b] = parts.map((v) => linear(v / 255));
            return .2126 * r + .7152 * g + .0722 * b;
        }};
        const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        return {json.dumps(names)}.flatMap((name) => ["--bg", "--card", "--sunk"].map(
            (under) => [name, under, ratio(light(name), light(under))]));
    }})()"""
    for scheme in ("light", "dark"):
        page = browser.open(report[0].as_uri(), scheme=scheme)
        low = [one for one in page.evaluate(script) if one[2] < 4.5]
        assert low == []


def test_it_prints(page, tmp_path):
    page.click("[data-layer='1']")
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_a_report_of_nothing_opens(browser, tmp_path):
    ReportData("empty").save(tmp_path / "empty.html")
    page = browser.open((tmp_path / "empty.html").as_uri())
    assert page.errors == []
    assert page.evaluate("document.querySelectorAll('main > section').length") == 2
