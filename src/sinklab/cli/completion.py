"""What a shell offers at TAB: the names that the help text of an option refers to; and the script for the shell."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import cyclopts

__all__ = ["Completing", "completer"]

WITH_COLONS = """
# bash splits words at colons, and names such as embedded:softmax have one: put them together, and take off again what is there.
_sinklab_with_colons() {
  local -a whole=()
  local word joined="" prefix i at=0
  for ((i = 0; i < ${#COMP_WORDS[@]}; i++)); do
    word="${COMP_WORDS[i]}"
    if ((i > 0)) && [[ -n "$joined" || "$word" == :* ]]; then whole[${#whole[@]}-1]+="$word"; else whole+=("$word"); fi
    if [[ "$word" == *: ]]; then joined=1; else joined=""; fi
    if ((i == COMP_CWORD)); then at=$((${#whole[@]} - 1)); fi
  done
  local -a COMP_WORDS=("${whole[@]}")
  local COMP_CWORD=$at
  _sinklab
  word="${COMP_WORDS[COMP_CWORD]}"
  if [[ "$word" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
    prefix="${word%"${word##*:}"}"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
  fi
}
complete -F _sinklab_with_colons sinklab
"""


class Completing(cyclopts.App):
    """An application, or a command of it, whose script for bash knows of names with a colon; all have to be of one class."""

    def generate_completion(self, **options: Any) -> str:
        """See :meth:`cyclopts.App.generate_completion`."""
        script = super().generate_completion(**options)
        return script + WITH_COLONS if "complete -F _sinklab sinklab" in script else script


class Context(Protocol):
    """The word at the cursor, as cyclopts hands it over."""

    @property
    def incomplete(self) -> str:
        """What is typed of it."""


def completer(text: str) -> Callable[[Context], dict[str, str]] | None:
    """Offers the names of which a help text speaks, with a sentence each; ``None`` where it speaks of none.

    ``'sinklab list KIND'`` stands for the plug-ins of a kind, ``'sinklab list'`` for all of them, ``'sinklab claims'`` for
    claims, and ``embedded:`` for the embedded models. In a list, what is before the last comma stays. Where the text speaks of
    files or directories too, those that begin with what is typed are offered.
    """
    kinds = set(re.findall(r"'sinklab list(?: (\w+))?'", text))
    kinds |= {"claims"} if "'sinklab claims'" in text else set()
    kinds |= {"models"} if "embedded:" in text else set()
    if not kinds:
        return None
    files = re.search(r"director|file|path", text) is not None

    def offer(context: Context) -> dict[str, str]:
        before, comma, last = context.incomplete.rpartition(",")
        names = dict(_names(kinds)) | ({path: "" for path in _paths(last)} if files and last else {})
        return {f"{before}{comma}{name}": summary for name, summary in names.items()}

    return offer


def _names(kinds: set[str]) -> Iterator[tuple[str, str]]:
    from sinklab.cli.describe import catalogue

    for kind in sorted(kinds):
        for names in catalogue(kind or None).values():
            yield from names.items()


def _paths(start: str) -> Iterator[str]:
    """Files and directories; a ``~`` is left as it is typed."""
    home = os.path.expanduser(start)
    for path in sorted(glob.glob(f"{glob.escape(home)}*")):
        yield f"{start}{path[len(home) :]}{os.sep if os.path.isdir(path) else ''}"
