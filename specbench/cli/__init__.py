"""Command line: parsing and terminal output only; every command calls the Python API."""


def main() -> None:
    raise SystemExit("not yet")
