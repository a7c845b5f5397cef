"""Published statements about attention sinks, tested: one file a paper, on top of the workbench and unknown to it.

``sinklab`` finds this package by its entry point in the group ``sinklab.packages``, as it finds anybody's; nothing in it
imports this. Claims and read-outs are functions with ``@claims.register("name")`` and ``@read_outs.register("name")`` in any
file, several in one; the first paragraph of a function's docstring is what ``sinklab list claims`` shows.

``contract``: what a claim is, the effects it may name, the trained model that it reads. ``verdict``: the one rule by which it
is judged. ``numbers``: read-outs. A file for each paper. ``reproduce``: the commands.
"""
