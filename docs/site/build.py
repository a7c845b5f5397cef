"""Builds the site into build/site, strictly: ``make site``.

What Sphinx warns of is an error (references, links between pages, pages outside the navigation), and so is what
docs/site/check.py finds in the pages that come out.
"""

from __future__ import annotations

import shutil
import sys
import time

from docs.site.assemble import assemble
from docs.site.check import faults
from docs.site.sources import ROOT, SiteError
from sphinx.cmd.build import build_main


def main() -> int:
    """Assemble, build, check; 0 if all went well."""
    started = time.perf_counter()
    sources, site = ROOT / "build" / "site-source", ROOT / "build" / "site"
    try:
        count = assemble(sources)
    except SiteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(site, ignore_errors=True)
    status = build_main(
        ["-q", "-b", "html", "-n", "-W", "--keep-going", "-c", str(ROOT / "docs" / "site"), str(sources), str(site)]
    )
    wrong = faults(site) if site.is_dir() else []
    for fault in wrong:
        print(f"error: {fault}", file=sys.stderr)
    if status or wrong:
        return 1
    print(f"{count} pages in {time.perf_counter() - started:.0f} s: {(site / 'index.html').relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
