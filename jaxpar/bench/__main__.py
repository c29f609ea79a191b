"""`python -m jaxpar.bench`."""

from jaxpar import bench
from jaxpar.runtime.program import run_program

if __name__ == "__main__":
    run_program(bench.main)
