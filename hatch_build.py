"""What the package's page shows: README.md with links that work there.

A link into the repository is relative, and a package's page has no such file. With BAGU_REPOSITORY_URL (a release sets
it to the address of the repository's files at its tag) links and pictures become absolute, and the metadata gets the
URLs. Without it, a link becomes its text and a picture goes.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!https?://|#)([^)\s]+)\)")
PICTURES = re.compile(r"^\|[^\n]*\|\n\|---[^\n]*\n\|[^\n]*!\[[^\n]*\|\n\n", re.MULTILINE)  # a table of pictures
PAGES = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Contributing": "CONTRIBUTING.md"}


def description(readme: str, repository: str | None) -> str:
    if repository is None:
        readme = PICTURES.sub("", readme)
        return LINK.sub(lambda link: "" if link[1] else link[2], readme)
    return LINK.sub(lambda link: f"{link[1]}[{link[2]}]({repository.rstrip('/')}/{link[3]})", readme)


class Description(MetadataHookInterface):
    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = os.environ.get("BAGU_REPOSITORY_URL") or None
        text = description((Path(self.root) / "README.md").read_text(encoding="utf-8"), repository)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if repository is not None:
            metadata["urls"] = {name: f"{repository.rstrip('/')}/{path}" for name, path in PAGES.items()}
        else:
            metadata["urls"] = {}
