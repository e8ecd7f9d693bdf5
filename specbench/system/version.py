"""The version of the package; no other module is imported to know it."""

__version__ = "0.1.0"
