"""`python -m jaxpar.doctor`."""

from jaxpar import cli, doctor

if __name__ == "__main__":
    cli.run_program(doctor.main)
