"""Runs `python -m jaxpar.doctor`."""

from jaxpar.doctor import main
from jaxpar.runtime.program import run_program

if __name__ == "__main__":
    run_program(main)
