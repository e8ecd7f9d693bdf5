"""Version of the package and its name on the package index, in a module without imports."""

__version__ = "0.3.0"
DISTRIBUTION = "specbench-image"
"""What pip installs; `specbench` on the index is another project."""
