"""`python -m specbench`."""

from specbench.cli import main

if __name__ == "__main__":
    main()
