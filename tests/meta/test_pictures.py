"""The labels of the pictures that scripts draw lie inside their panels, in a browser."""

import pytest

from tests.meta.test_repository import ROOT

#: Names of a picture's labels that leave the panel they begin in, or the picture.
OUTSIDE = """(() => {
  const box = (element) => element.getBoundingClientRect();
  const panels = [...document.querySelectorAll("rect.panel, rect.ground")].map(box);
  const across = (x, b) => x >= b.left && x <= b.right;
  const down = (y, b) => y >= b.top && y <= b.bottom;
  const begins = (a, b) => across(a.left, b) && down(a.top, b);
  const inside = (a, b) => begins(a, b) && across(a.right, b) && down(a.bottom, b);
  return [...document.querySelectorAll("text")].filter((text) => {
    const around = panels.filter((panel) => begins(box(text), panel));
    return !around.length || !around.every((panel) => inside(box(text), panel));
  }).map((text) => text.textContent);
})()"""

PICTURES = sorted(p for f in ("pictures", "images") for p in (ROOT / "docs" / f).glob("*.svg"))


@pytest.mark.waits
@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_labels_are_not_cut_off(show, picture):
    assert show(picture, 1000, 1000).page.evaluate(OUTSIDE) == []


@pytest.mark.waits
def test_a_label_that_leaves_its_panel_is_seen(show, tmp_path):
    panel = '<rect class="panel" x="0" y="0" width="60" height="40"/>'
    words = '<text x="5" y="20">in</text><text x="5" y="30">much too long for it</text>'
    page = tmp_path / "picture.svg"
    page.write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{panel}{words}</svg>', "utf-8")
    assert show(page, 400).page.evaluate(OUTSIDE) == ["much too long for it"]
