"""`python -m jaxpar.doctor`."""

from jaxpar import doctor
from jaxpar.runtime.program import run_program

if __name__ == "__main__":
    run_program(doctor.main)
