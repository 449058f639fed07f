"""The plots of results as parts of a page: unique ids, the page's colours, no style that a strict page refuses."""

import re

from bagu.lab.plot import FAINT, INK


def inline(svg: str, *, prefix: str) -> str:
    """The <svg> element of a plot with ids that no other plot of the page has. Styles become attributes, since a
    page whose content security policy allows no inline style ignores them; ink is the colour of the page's text.
    Without unused ids, comments and further digits a plot is half as long."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r'\bid="([^"]*)"', lambda found: f'id="{prefix}-{found[1]}"' if found[1] in used else "", svg)
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)  # hundredths of a pixel
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    svg = re.sub(r' style="([^"]*)"', _attributes, svg)
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1
    )
    return svg.replace(INK, "var(--plot-ink)").replace(FAINT, "var(--plot-faint)")


def _attributes(style: re.Match[str]) -> str:
    found = {}
    for part in filter(None, (part.strip() for part in style[1].split(";"))):
        name, _, value = part.partition(":")
        if name == "font":  # matplotlib's shorthand, such as: 9px 'DejaVu Sans', sans-serif
            found["font-size"] = re.search(r"[\d.]+px", value)[0]  # type: ignore[index]
        elif name.strip() != "font-family":  # the page's own
            found[name.strip()] = value.strip()
    return "".join(f' {name}="{value}"' for name, value in found.items())
