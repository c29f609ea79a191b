"""`python -m jaxpar.bench`."""

from jaxpar import bench, cli

if __name__ == "__main__":
    cli.run_program(bench.main)
