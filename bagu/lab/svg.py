"""The plots of results as parts of a page: unique ids, the page's colours, no style that a strict page refuses."""

import re

from bagu.lab.plot import FAINT, INK


def inline(svg: str, *, prefix: str) -> str:
    """The <svg> element of a plot with ids that no other plot of the page has. Styles become attributes, since a
    page whose content security policy allows no inline style ignores them; ink is the colour of the page's text.
    Without unused ids, comments and further digits a plot is half as long."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<style.*?</style>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    used = {
        name: f"{prefix}-{i}" for i, name in enumerate(dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)))
    }
    svg = re.sub(r'\bid="([^"]*)"', lambda found: f'id="{used[found[1]]}"' if found[1] in used else "", svg)
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)  # hundredths of a pixel
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', lambda found: found[1] + used[found[2]], svg)
    svg = re.sub(r' style="([^"]*)"', _attributes, svg)
    svg = _without_repeats(svg)
    svg = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 xmlns:xlink="http://www.w3.org/1999/xlink">', svg, count=1
    )
    return svg.replace(INK, "var(--plot-ink)").replace(FAINT, "var(--plot-faint)")


def _without_repeats(svg: str) -> str:
    """The plot without paths that draw nothing, groups without attributes, and colours that a text inherits."""
    svg = re.sub(r'<path d="[^"]*" fill="none"/>\n|<defs>\n</defs>\n', "", svg)
    kept, parts = list[bool](), list[str]()
    for part in re.split(r"(<g\b[^>]*>\n?|</g>\n?)", svg):
        if part.startswith("<g"):
            kept.append("=" in part)
        if not part.startswith(("<g", "</g")) or (kept.pop() if part.startswith("</g") else kept[-1]):
            parts.append(part)
    svg = "".join(parts)
    return re.sub(
        r'(<g [^>]*?(fill="[^"]*")[^>]*>\n<text>)(.*?)(?=</text>)',
        lambda found: found[1] + found[3].replace(f" {found[2]}", ""),
        svg,
        flags=re.DOTALL,
    )


def _attributes(style: re.Match[str]) -> str:
    found = {}
    for part in filter(None, (part.strip() for part in style[1].split(";"))):
        name, _, value = part.partition(":")
        if name == "font":  # matplotlib's shorthand, such as: 9px 'DejaVu Sans', sans-serif
            found["font-size"] = re.search(r"[\d.]+px", value)[0]  # type: ignore[index]
        elif name.strip() != "font-family":  # the page's own
            found[name.strip()] = value.strip()
    return "".join(f' {name}="{value}"' for name, value in found.items())
