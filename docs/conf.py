"""How Sphinx builds these pages: `make site` writes them to docs/_build, with warnings as errors."""

import re
from pathlib import Path

project = "gradvitals"
author = "the gradvitals authors"
copyright = "the gradvitals authors, Apache-2.0"
version = release = re.search(  # read, so that the pages can be built where torch is not installed
    r'__version__ = "(.+)"', (Path(__file__).parent.parent / "src/gradvitals/__init__.py").read_text()
).group(1)

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "gradvitals"

html_copy_source = False
# Nothing is fetched from elsewhere: no fonts, no scripts, no badges.
html_theme_options = {"navigation_with_keys": True}
