"""docs/architectures.md says of every family of the zoo what the zoo says."""

from pathlib import Path

from tests.streaming.decoders import REFUSED

from .zoo import OFF_SEAM, SECOND_TIER, ZOO, Entry

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def cells_of(entry: Entry) -> list[str]:
    """The cells of its row in which nothing is told in words: class, backends, calls, replaceable, and served by a cache."""
    if entry in OFF_SEAM:
        return [f"`{entry.model}`", "second" if entry in SECOND_TIER else "none"]
    cells = [f"`{entry.model}`", ", ".join(f"`{backend}`" for backend in entry.backends), str(entry.calls)]
    cells.append("yes" if entry.replaceable else "no")
    return [*cells, "no" if entry.id in REFUSED else "yes"] if entry.kind == "decoder" else cells


def test_the_page_has_a_row_for_every_family() -> None:
    lines = [line.split("|")[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    rows = {cells[0].strip(): [cell.strip().partition(":")[0] for cell in cells[1:]] for cells in lines}
    assert sorted(rows) == sorted(f"`{family}`" for family in ZOO)
    for family, entry in ZOO.items():
        expected = cells_of(entry)
        assert rows[f"`{family}`"][: len(expected)] == expected
