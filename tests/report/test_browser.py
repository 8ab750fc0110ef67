"""The page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.browser import Browser

_TITLES = "[...document.querySelectorAll('#trust tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].textContent)"
_FOCUS = "(e => e.closest('#trust tbody') && [e.parentElement.rowIndex, e.cellIndex])(document.activeElement)"
_TIP = "document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent"


def _column(name: str) -> str:
    return f"[...document.querySelectorAll('#trust thead th')].findIndex(h => h.textContent.startsWith('{name}'))"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 740, 768, 840, 900, 1600])
@pytest.mark.parametrize("name", ["realistic", "odd", "empty", "untested"])
def test_a_page_opens_from_a_file_without_an_error_a_request_or_sideways_scrolling(
    browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    browser.open(pages[name], width=width, scheme=scheme)
    assert browser.run("document.readyState") == "complete"
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith("data:")] == [pages[name].as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= width


def test_the_two_schemes_differ_in_the_page_and_in_the_drawings(browser: Browser, pages: dict[str, Path]) -> None:
    script = (
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('figure.wide svg text')).fill]"
    )
    browser.open(pages["realistic"])
    light = browser.run(script)
    browser.open(pages["realistic"], scheme="dark")
    dark = browser.run(script)
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_text_of_the_user_stays_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["odd"])
    assert "pwned" not in browser.run("document.title").replace("document.title='pwned'", "")
    assert browser.run("document.querySelectorAll('img, script[src], iframe').length") == 0
    assert browser.run("document.querySelectorAll('script').length") == 2
    assert browser.run("document.querySelector('.eyebrow').textContent").startswith("</script><script>document.title='pwned'")
    assert "{{7*7}}" in browser.run("document.body.innerText")
    assert browser.run("[...document.querySelectorAll('figure text')].some(t => t.textContent.startsWith('</script>'))")


def test_a_script_that_got_in_would_not_run(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    page = tmp_path / "tampered.html"
    text = pages["realistic"].read_text(encoding="utf-8")
    page.write_text(text.replace("<main", "<script>document.title = 'ran'</script><main", 1), encoding="utf-8")
    browser.open(page)
    assert browser.run("document.title") != "ran"
    assert any("Content Security Policy" in error for error in browser.errors)


def test_the_embedded_data_are_the_audit(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["odd"])
    data = browser.run("JSON.parse(document.getElementById('data').textContent)")
    assert data["schema"] == "flatminima.audit/1"
    assert data["target"].startswith("</script>")


def test_a_heading_sorts_by_its_numbers_and_back(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["realistic"])
    original = browser.run(_TITLES)
    heading = f"#trust thead th:nth-child({browser.run(_column('node')) + 1})"
    browser.click(f"{heading} button")
    assert browser.run(f"document.querySelector('{heading}').getAttribute('aria-sort')") == "ascending"
    browser.click(f"{heading} button")
    titles = browser.run(_TITLES)
    assert titles[:4] == ["Hessian trace", "Frobenius norm", "Largest eigenvalue", "ε-sharpness (ε=0.01)"]
    assert sorted(titles) == sorted(original)
    browser.click(f"{heading} button")
    assert browser.run(_TITLES) == original


def test_rows_without_a_number_come_last_whichever_way_it_is_sorted(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["odd"])
    heading = f"#trust thead th:nth-child({browser.run(_column('Value')) + 1}) button"
    for _ in range(2):
        browser.click(heading)
        assert set(browser.run(_TITLES)[-2:]) == {"Failed", "Not a number"}


def test_sorting_works_from_the_keyboard(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["realistic"])
    browser.run("document.querySelector('#trust thead button').focus()")
    browser.press("Enter")
    titles = browser.run(_TITLES)
    assert titles[0] == "Adaptive average sharpness (ρ=0.1)"
    assert titles[-2:] == ["Squared norm Σ‖W‖²", "ε-sharpness (ε=0.01)"]


@pytest.mark.parametrize(("verdict", "count"), [("survives", 5), ("moves", 6), ("all", 11)])
def test_the_filter_shows_the_rows_of_a_verdict_and_says_how_many(
    browser: Browser, pages: dict[str, Path], verdict: str, count: int
) -> None:
    browser.open(pages["realistic"])
    browser.click("[data-filter='moves']")
    browser.click(f"[data-filter='{verdict}']")
    assert len(browser.run(_TITLES)) == count
    assert browser.run(f"document.querySelector(\"[data-filter='{verdict}']\").ariaPressed") == "true"
    assert browser.run("document.querySelectorAll('[data-filter][aria-pressed=true]').length") == 1
    assert browser.run("document.getElementById('shown').textContent") == ("" if verdict == "all" else f"{count} of 11 shown")


def test_a_number_tells_its_meaning_under_the_pointer_and_escape_takes_it_away(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["realistic"])
    assert browser.run(_TIP) == ""
    browser.hover("#trust tbody tr td.value")
    assert browser.run(_TIP).startswith("What the number says")
    assert browser.run("document.querySelector('#trust tbody tr td.value').getAttribute('aria-describedby')") == "tip"
    browser.press("Escape")
    assert browser.run(_TIP) == ""


def test_the_table_is_one_stop_for_tab_and_walked_with_arrows_each_number_telling_its_meaning(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["realistic"])
    assert browser.run("document.querySelectorAll('#trust tbody [tabindex=\"0\"]').length") == 1
    browser.run("document.querySelector('#trust thead th:last-child button').focus()")
    browser.press("Tab")
    assert browser.run(_FOCUS) == [1, 0]
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
    assert browser.run(_FOCUS) == [2, 3]
    assert "3 random moves along “layer”" in browser.run(_TIP)
    browser.press("End")
    assert browser.run(_FOCUS) == [2, browser.run("document.querySelectorAll('#trust thead th').length - 1")]
    assert browser.run("document.querySelectorAll('#trust tbody [tabindex=\"0\"]').length") == 1


def test_the_tooltip_stays_inside_the_window_on_a_phone(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["realistic"], width=390)
    browser.run("document.querySelector('#trust tbody td:last-child').focus()")
    left, right = browser.run("(b => [b.left, b.right])(document.getElementById('tip').getBoundingClientRect())")
    assert 0 <= left < right <= 390


def test_on_a_phone_every_measure_is_a_card_that_can_be_sorted(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["realistic"], width=390)
    assert browser.run("getComputedStyle(document.querySelector('#trust tbody tr')).display") == "grid"
    assert browser.run("getComputedStyle(document.querySelector('.sorter')).display") == "block"
    browser.run("(s => { s.value = '4'; s.dispatchEvent(new Event('change')); })(document.getElementById('sorter'))")
    assert browser.run(_TITLES)[0] == "Hessian trace"


def test_one_drawing_of_each_pair_is_shown(browser: Browser, pages: dict[str, Path]) -> None:
    shown = "[...document.querySelectorAll('figure')].filter(f => f.offsetParent).map(f => f.className)"
    browser.open(pages["realistic"], width=390)
    assert browser.run(shown) == ["narrow", "narrow"]
    browser.open(pages["realistic"], width=900)
    assert browser.run(shown) == ["wide", "wide"]


def test_text_has_contrast_enough_in_both_schemes(browser: Browser, pages: dict[str, Path]) -> None:
    for scheme in ("light", "dark"):
        browser.open(pages["odd"], scheme=scheme)
        ratios = browser.run(_CONTRAST)
        assert ratios
        assert min(ratios.values()) >= 4.5, (scheme, ratios)


_CONTRAST = """(() => {
  const channel = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const lightness = (c) => { const [r, g, b] = c.match(/[0-9.]+/g).map(Number); return 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b); };
  const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)$/.test(c)) return c; } return "rgb(255,255,255)"; };
  const found = {};
  for (const name of [".lead", "dt", ".badge.survives", ".badge.moves", ".badge.defect", ".badge.failed", "#trust td.moves", "#trust td.defect",
                      "#trust td.survives", ".finding p", ".quiet", "nav a", ".banner", "h1"]) {
    const element = document.querySelector(name);
    const [a, b] = [lightness(getComputedStyle(element).color), lightness(ground(element))].sort((x, y) => y - x);
    found[name] = (a + 0.05) / (b + 0.05);
  }
  return found;
})()"""  # noqa: E501
