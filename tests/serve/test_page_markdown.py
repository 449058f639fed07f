"""Markdown and formulas of the chat page, rendered in a real browser."""

from __future__ import annotations

import re
from typing import Any

MARKDOWN = {  # source: the whole text, and the text of the elements that the selector finds
    "a_b_c and __init__": ("a_b_c and __init__", "em", []),
    "*a* **b** ~~c~~ `d*e*`": ("a b c d*e*", "em, strong, s, code", ["a", "b", "c", "d*e*"]),
    "[x](javascript:alert(1)) [y](https://e.org)": ("[x](javascript:alert(1)) y", "a", ["y"]),
    "<script>alert(1)</script>": ("<script>alert(1)</script>", "script", []),
    "- a\n  - b\n- c": ("a\nb\nc", "ul ul li", ["b"]),
    "3. a\n4. b": ("a\nb", "ol[start='3'] li", ["a", "b"]),
    "```\nopen": ("open", "pre", ["open"]),
    "> q\n> r": ("q\nr", "blockquote p", ["q\nr"]),
    "# T\ntext": ("T\n\ntext", "h2", ["T"]),
    "**never closed": ("**never closed", "strong", []),
    "2 * 3 * 4": ("2 * 3 * 4", "em", []),
    "- a\n  ```py\n  x = 1\n  ```\n- b": ("a\nx = 1\nb", "li pre", ["x = 1"]),
    "| a | b |\n|:-:|---|\n| 1 | `x\\|y` |": ("a\tb\n1\tx|y", "td.center", ["1"]),
}
MATH = {  # source: the rendered text, with "|" between the children of an element
    r"$x_1^2$": "msubsup(mi(x)|mn(1)|mn(2))",
    r"$\frac12$": "mfrac(mn(1)|mn(2))",
    r"\(\frac{a+b}{\sqrt{c}}\)": "mfrac(mrow(mi(a)|mo(+)|mi(b))|msqrt(mi(c)))",
    r"$\sqrt[3]{x}$": "mroot(mi(x)|mn(3))",
    r"$\alpha\Gamma$": "mrow(mi(α)|mi(Γ))",
    r"$a \leq b \cdot c$": "mrow(mi(a)|mo(≤)|mi(b)|mo(⋅)|mi(c))",
    r"$$\sum_{i=1}^n i$$": "mrow(munderover(mo(∑)|mrow(mi(i)|mo(=)|mn(1))|mi(n))|mi(i))",
    r"\[\int_0^\infty f\,dx\]": "mrow(msubsup(mo(∫)|mn(0)|mi(∞))|mi(f)|mspace()|mi(d)|mi(x))",
    r"$\lim_{x \to 0} \sin x$": "mrow(munder(mo(lim)|mrow(mi(x)|mo(→)|mn(0)))|mo(sin)|mi(x))",
    r"$\left( \frac{1}{2} \right]$": "mrow(mo(()|mfrac(mn(1)|mn(2))|mo(]))",
    r"$\begin{pmatrix} a & b \\ c & d \end{pmatrix}$": (
        "mrow(mo(()|mtable(mtr(mtd(mi(a))|mtd(mi(b)))|mtr(mtd(mi(c))|mtd(mi(d))))|mo()))"
    ),
    r"$\begin{cases} 1 & \text{if } x \\ 0 \end{cases}$": (
        "mrow(mo({)|mtable(mtr(mtd(mn(1))|mtd(mrow(mtext(if\u00a0)|mi(x))))|mtr(mtd(mn(0)))))"
    ),
    r"$\begin{aligned} a &= b \\ &= c \end{aligned}$": (
        "mtable(mtr(mtd(mi(a))|mtd(mrow(mo(=)|mi(b))))|mtr(mtd(mrow())|mtd(mrow(mo(=)|mi(c)))))"
    ),
    r"$\mathbb{R}^n \mathcal{L} \mathrm{Var}$": "mrow(msup(mi(ℝ)|mi(n))|mi(ℒ)|mi(Var))",
    r"$f'(x) \ne -1.5$": "mrow(msup(mi(f)|mo(′))|mo(()|mi(x)|mo())|mo(≠)|mo(−)|mn(1.5))",
    r"$\hat{x} + \overline{ab}$": "mrow(mover(mi(x)|mo(^))|mo(+)|mrow(mrow(mi(a)|mi(b))))",
    r"$\operatorname{softmax}(x)$": "mrow(mo(softmax)|mo(()|mi(x)|mo()))",
    r"$\binom{n}{k} \not= \{1\}$": "mrow(mrow(mo(()|mfrac(mi(n)|mi(k))|mo()))|mo(≠)|mo({)|mn(1)|mo(}))",
}
STAYS = [  # not a formula, or unsupported TeX: shown as source
    "$5 and $6",
    "between $5-$6, or US$7 and 8$",
    "$20 for adults and 10$ for children",
    "$HOME/bin:$PATH",
    r"$\unknown{x}$ and $x^2^3$",
    r"$\frac{1}$ $\left( x$ $\begin{pmatrix} a$ ${$ $}$",
    r"$\href{javascript:alert(1)}{x}$",
    r"\(\text{$x$}\)",
    "$" + "{" * 200 + "}" * 200 + "$",
    "$$",
    "an open $x + 1",
]


def test_math_becomes_mathml_and_unsupported_tex_stays_source(modules: Any) -> None:
    show = """async (source) => {
        const { render } = await import('/markdown.js');
        const root = document.createElement('div');
        document.body.append(root);
        render(root, source);
        const write = (node) => node.nodeType === 3 ? node.data
            : node.localName + '(' + [...node.childNodes].map(write).join('|') + ')';
        const maths = [...root.querySelectorAll('math')];
        return [maths.map((math) => [math.getAttribute('display'), write(math.firstChild)]), root.innerText];
    }"""
    for source, wanted in MATH.items():
        display = "block" if source.startswith(("$$", "\\[")) else "inline"
        assert modules.evaluate(show, source)[0] == [[display, wanted]], source
    for source in STAYS:
        assert modules.evaluate(show, source) == [[], source], source
    found, text = modules.evaluate(
        show, "the $n$th of `$a$`, \\$5\n\n```\n$b$\n```\n\n- c\n  \\[\n  d\n  + e\n  \\]\n- f"
    )
    assert found == [["inline", "mi(n)"], ["block", "mrow(mi(d)|mo(+)|mi(e))"]]
    assert "of $a$, $5" in text
    assert "$b$" in text
    found, text = modules.evaluate(show, r"$\text{<img src=x onerror=alert(1)>}$")
    assert found == [["inline", "mtext(<img src=x onerror=alert(1)>)"]]
    boxes = "[...document.querySelector('math mfrac').children].map((part) => part.getBoundingClientRect())"
    numerator, denominator = modules.evaluate(f"{boxes}.map((box) => [box.top, box.bottom])")
    assert numerator[1] <= denominator[0] + 1  # one above the other


def test_no_formula_breaks_a_message(modules: Any) -> None:
    tried = """async ([pieces, count]) => {
        const { toMathML } = await import('/tex.js');
        let state = 1;
        const random = (n) => (state = (state * 48271) % 2147483647) % n;
        let known = 0;
        for (let at = 0; at < count; at += 1) {
            const source = Array.from({ length: 1 + random(12) }, () => pieces[random(pieces.length)]).join('');
            const math = toMathML(source, at % 2 === 0);
            if (math === null) continue;
            known += 1;
            for (const node of math.querySelectorAll('*'))
                if (node.namespaceURI !== math.namespaceURI || node.hasAttribute('href')) throw new Error(source);
        }
        return known;
    }"""
    commands = r"""\\ \left( \right) \left. \middle| \frac \sqrt \sqrt[3] \text{a} \not \sum \hat \limits \begin{cases}
        \end{cases} \begin{array}{lr} \end{array} \mathbf \mathbb \substack \operatorname* \tag{1} \displaystyle \binom
        \overset \xrightarrow \underbrace \bigl \pmod \hline \href \,"""
    pieces = [*"{}{}{}^_&[]()|'x1.=-中é%#~\\ ", *commands.split()]
    assert modules.evaluate(tried, [pieces, 5000]) > 100  # 464 of them are formulas


def test_endless_repetition_does_not_hang_the_page(modules: Any) -> None:
    time = """async (sources) => {
        const { render } = await import('/markdown.js');
        const began = performance.now();
        for (const source of sources) render(document.createElement('div'), source);
        return performance.now() - began;
    }"""
    pieces = ["`", "*", "**a ", "_", "[", "[a](", "> ", "- ", "| ", "\\", "~~", "http://"]
    pieces += ["$", "$$", "$x ", "\\(", "\\[", "\\[\n", "$$\n", "$\\frac{", "\\(x^", "<think>\n", "</think>\n"]
    milliseconds = modules.evaluate(
        time, ["x" + piece * (4000 // len(piece)) for piece in pieces] + [p * 3000 for p in pieces]
    )
    assert milliseconds < 20_000  # 0.7 s measured; trying all lengths, 1,000 backticks took 2 s, 500 took 0.35 s
    # about 0.5 s each: where every beginning was followed by a search for its end, they took 7 to 30 s
    for source in ("\\(" * 100_000, "**a " * 20_000, "[a](" * 20_000):
        assert modules.evaluate(time, [source]) < 5000, source[:4]


def test_markdown_case_by_case(modules: Any) -> None:
    show = """async ([source, selector]) => {
        const { render } = await import('/markdown.js');
        const root = document.createElement('div');
        document.body.append(root);
        for (let end = 1; end <= source.length; end += 1) render(root, source.slice(0, end));  // as it streams
        const streamed = root.cloneNode(true);
        const whole = document.createElement('div');
        render(whole, source);
        if (!whole.isEqualNode(streamed)) throw new Error('streamed and whole differ: ' + streamed.innerHTML);
        for (const bar of root.querySelectorAll('.code-bar')) bar.remove();
        return [root.innerText, [...root.querySelectorAll(selector)].map((node) => node.innerText)];
    }"""
    for source, (text, selector, found) in MARKDOWN.items():
        shown, parts = modules.evaluate(show, [source, selector])
        assert (re.sub(r"\n+", "\n", shown).strip(), [p.strip() for p in parts]) == (
            re.sub(r"\n+", "\n", text),
            found,
        ), source
