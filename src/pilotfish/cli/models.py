"""The table behind `pilotfish models`."""

from __future__ import annotations

from rich.table import Table

from pilotfish import catalog
from pilotfish.cli.terminal import UNBROKEN, print_parts


def print_models() -> None:
    """Prints one row per model and variant; where stdout is no terminal, each on one line however long.

    Of what only the hub has, only the hub knows the size.
    """
    target, draft = catalog.default_pair()
    roles = {target: "default target", draft: "default draft"}
    table = Table(box=None, pad_edge=False)
    table.add_column("name", no_wrap=True)
    table.add_column("size", no_wrap=True, justify="right")
    table.add_column("licence", no_wrap=True)
    table.add_column("present", no_wrap=True)
    table.add_column("what it is")
    for name, entry in catalog.entries().items():
        table.add_row(
            name,
            "-" if entry.size is None else f"{entry.size / 1e6:,.0f} MB",
            entry.licence,
            "yes" if catalog.locate(entry) else "no",
            entry.description + (f" ({roles[name]})" if name in roles else ""),
        )
    print_parts([table], UNBROKEN)
