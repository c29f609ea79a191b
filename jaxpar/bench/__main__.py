"""Runs `python -m jaxpar.bench`."""

from jaxpar.bench import main
from jaxpar.runtime.program import run_program

if __name__ == "__main__":
    run_program(main)
