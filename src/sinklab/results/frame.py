"""A page inside a notebook: a frame that the notebook's style and scripts do not reach, and that needs no other file."""

from __future__ import annotations

__all__ = ["framed"]


def framed(page: str, height: int = 640) -> str:
    """An inline frame that holds a whole HTML page; it works where notebooks are saved, mailed or shown without a server.

    Args:
        page: the page as text.
        height: of the frame in CSS pixels; a page may change that of its own frame.
    """
    # Between single quotes only these two end or change what is between them, and pages have few of either.
    quoted = page.replace("&", "&amp;").replace("'", "&#39;")
    style = f"width: 100%; height: {height}px; border: 0; display: block"
    return f'<iframe srcdoc=\'{quoted}\' style="{style}" loading="lazy" title="sinklab"></iframe>'
