"""The pictures of the READMEs: the chat page with a real model, a lab's plot, the plan of a cluster.

python -m benchmarks.tools.pictures MODEL --ask "Write a function line_size(x): double x." [--only chat]

It needs chromium, playwright and matplotlib (the extra `dev`). Pictures are cut to 128 colours: 20 to 100 KB each.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bagu.recipes.demo_server import running_server

FOLDER = Path(__file__).parents[2] / "docs/pictures"
LAB = "safe_softmax"
PLAN = ("--model", "llama3-70b", "--gpus", "1024", "--gpu", "h100", "--seq", "8192", "--batch", "1024")


def chat_page(model: Path, questions: Sequence[str], out: Path) -> None:
    """The page of `bagu serve MODEL` after these questions."""
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with running_server(model) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 480})
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_selector("#model option", state="attached")
        for question in questions:
            page.fill("#input", question)
            page.press("#input", "Enter")
            page.wait_for_timeout(500)
            page.wait_for_selector(".message.assistant:last-child[aria-busy=false]")
        page.wait_for_timeout(500)
        page.screenshot(path=str(out))
        browser.close()


def made_by(words: Sequence[str], pattern: str, out: Path) -> None:
    """The picture that a command leaves in its --out."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "bagu", *words, "--out", folder], check=True)
        shutil.copy(next(Path(folder).rglob(pattern)), out)


def smaller(path: Path, width: int = 1000) -> None:
    from PIL import Image

    with Image.open(path) as file:
        image = file.convert("RGB")
    if image.width > width:
        image = image.resize((width, image.height * width // image.width), Image.Resampling.LANCZOS)
    image.quantize(128).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ask", action="append", default=[], help="a question for the chat page; repeatable")
    parser.add_argument("--only", choices=("chat", "lab", "plan"))
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    makers = {
        "chat": lambda out: chat_page(given.model, given.ask, out),
        "lab": lambda out: made_by(("lab", "run", LAB), "*.png", out),
        "plan": lambda out: made_by(("plan", *PLAN), "*.png", out),
    }
    for name, make in makers.items():
        if given.only in (None, name):
            make(FOLDER / f"{name}.png")
            smaller(FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
