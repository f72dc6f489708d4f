"""Measure in a browser how readable a page is: sizes of texts, contrasts, and what is cut or wider than the window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from selenium.webdriver import Chrome

SMALLEST_PX = 11.0
# WCAG 2.2, success criterion 1.4.3, level AA, for texts of any size.
LOWEST_CONTRAST = 4.5

_MEASURE = r"""
// Opens what a click opens, and shows what a pointer shows.
for (const one of document.querySelectorAll("details")) one.open = true;
for (const figure of document.querySelectorAll(".chart")) {
  const spots = figure.querySelectorAll(".spot");
  if (spots.length) spots[Math.floor(spots.length / 2)].dispatchEvent(new PointerEvent("pointerenter"));
}
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
}
const over = (top, below) => [0, 1, 2].map((n) => top[n] * top[3] + below[n] * (1 - top[3])).concat(1);
function background(element) {
  const layers = [];
  for (let at = element; at; at = at.parentElement) {
    const layer = rgba(getComputedStyle(at).backgroundColor);
    layers.push(layer);
    if (layer[3] === 1) break;
  }
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
}
function luminance([r, g, b]) {
  const part = (c) => { const s = c / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function contrast(front, back) {
  const [low, high] = [luminance(front), luminance(back)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function opacity(element) {
  let product = 1;
  for (let at = element; at; at = at.parentElement) product *= Number(getComputedStyle(at).opacity);
  return product;
}
function hidden(element) {
  // Texts for screen readers alone have a clip path; a skipped link is left of the window until it has the focus.
  if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) return true;
  if (element.closest(".hidden, .skip, thead") && element.getBoundingClientRect().width === 0) return true;
  for (let at = element; at; at = at.parentElement) {
    if (getComputedStyle(at).clipPath !== "none" || at.getBoundingClientRect().right < 0) return true;
  }
  return false;
}
function scaled(element) {
  const size = parseFloat(getComputedStyle(element).fontSize);
  if (!(element instanceof SVGGraphicsElement)) return size;
  const matrix = element.getScreenCTM();
  return size * Math.min(Math.hypot(matrix.a, matrix.b), Math.hypot(matrix.c, matrix.d));
}
const texts = [];
function note(text, element, style, size) {
  const back = background(element);
  const front = rgba(element instanceof SVGElement ? style.fill : style.color);
  front[3] *= opacity(element);
  texts.push({ text: text.trim().slice(0, 60), px: size, contrast: contrast(over(front, back), back) });
}
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const cut = [];
while (walker.nextNode()) {
  const node = walker.currentNode, element = node.parentElement;
  if (!node.data.trim() || element.closest("script, style, option, title") || hidden(element)) continue;
  note(node.data, element, getComputedStyle(element), scaled(element));
  const range = document.createRange();
  range.selectNodeContents(node);
  const scrolls = (at) => at && (["auto", "scroll"].includes(getComputedStyle(at).overflowX) || scrolls(at.parentElement));
  for (const box of range.getClientRects()) {
    if (!scrolls(element) && (box.left < -0.5 || box.right > document.documentElement.clientWidth + 0.5)) cut.push(node.data.trim().slice(0, 60));
  }
}
for (const element of document.querySelectorAll("body *")) {
  const style = getComputedStyle(element);
  if (hidden(element)) continue;
  if (element.scrollWidth > element.clientWidth + 1 && ["hidden", "clip"].includes(style.overflowX) && element.clientWidth) cut.push(`cut in ${element.tagName}`);
  for (const pseudo of ["::before", "::after", "::placeholder"]) {
    const own = getComputedStyle(element, pseudo);
    const said = pseudo === "::placeholder" ? element.placeholder && !element.value && element.placeholder : /^"|attr/.test(own.content) && own.content;
    if (said && said !== '""') note(said, element, own, parseFloat(own.fontSize));
  }
}
const titles = [...document.querySelectorAll("[title]:not(iframe), svg title")].map((e) => e.outerHTML.slice(0, 80));
return { texts, cut, titles, theme: document.documentElement.dataset.theme, wide: document.documentElement.scrollWidth - window.innerWidth };
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What was measured of a page. ``wide_px``: how much wider than the window it is; ``hovered``: facts that only a pointer shows."""

    theme: str
    texts: int
    smallest: tuple[float, str]
    weakest: tuple[float, str]
    wide_px: int
    cut: tuple[str, ...]
    hovered: tuple[str, ...]

    @property
    def problems(self) -> list[str]:
        """What is not readable, in words."""
        found = []
        if self.smallest[0] < SMALLEST_PX:
            found.append(f"{self.smallest[1]!r} has {self.smallest[0]:.1f} px")
        if self.weakest[0] < LOWEST_CONTRAST:
            found.append(f"{self.weakest[1]!r} has a contrast of {self.weakest[0]:.2f}")
        if self.wide_px > 0:
            found.append(f"the page is {self.wide_px} px too wide")
        found += [f"{text!r} is cut" for text in self.cut]
        return found + [f"only a pointer shows {text}" for text in self.hovered]


def set_window(chrome: Chrome, width: int, height: int = 900) -> None:
    """Sets the size of the page itself: a window of Chromium is never narrower than 500 px."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def measure(chrome: Chrome) -> Measures:
    """Of the page that the browser shows, with all details opened and a chart's values shown."""
    found: dict[str, Any] = chrome.execute_script(_MEASURE)
    texts = found["texts"]
    assert texts, "the page shows no text"
    smallest, weakest = (min(texts, key=lambda t: t[key]) for key in ("px", "contrast"))
    return Measures(
        theme=found["theme"],
        texts=len(texts),
        smallest=(smallest["px"], smallest["text"]),
        weakest=(weakest["contrast"], weakest["text"]),
        wide_px=max(0, found["wide"]),
        cut=tuple(dict.fromkeys(found["cut"])),
        hovered=tuple(found["titles"]),
    )
