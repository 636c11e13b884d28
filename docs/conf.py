"""How Sphinx builds these pages: `make site` writes them to docs/_build, with warnings as errors."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent

project = "gradvitals"
author = "the gradvitals authors"
copyright = "the gradvitals authors, Apache-2.0"
version = release = re.search(  # read, so that the pages can be built where torch is not installed
    r'__version__ = "(.+)"', (HERE.parent / "src/gradvitals/__init__.py").read_text()
).group(1)

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "gradvitals"
html_extra_path = ["doctor.schema.json"]

html_copy_source = False
# Nothing is fetched from elsewhere: no fonts, no scripts, no badges.
html_theme_options = {"navigation_with_keys": True}


def write_rule_pages(app: object) -> None:
    """Write a page per rule into docs/rules, from the rules themselves: no text is kept twice."""
    sys.path.insert(0, str(HERE))
    from rule_pages import rule_pages

    folder = HERE / "rules"
    folder.mkdir(exist_ok=True)
    drawn = [path.stem for path in (HERE / "pictures" / "rules").glob("*.svg")]
    pages = rule_pages(drawn)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_rule_pages)
