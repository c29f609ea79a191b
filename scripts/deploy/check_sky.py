"""Check SkyPilot's files with SkyPilot itself, without a cloud or an account.

    python -m venv build/sky && build/sky/bin/pip install skypilot
    build/sky/bin/python scripts/deploy/check_sky.py scripts/deploy/sky.yaml

SkyPilot takes 460 MB and wants versions of its own: do not install it beside jaxpar. A field that
it does not know, or a value of another kind, ends the program with code 1.
"""

import sys


def checked(file: str) -> str:
    """Return what SkyPilot reads in a file.

    Raises:   the errors of `sky.Task.from_yaml`.
    """
    import sky

    task = sky.Task.from_yaml(file)
    resources = ", ".join(map(str, task.resources))
    return f"{file}: {task.name}, {task.num_nodes} nodes of {resources}; SkyPilot {sky.__version__}"


def main() -> int:
    """The command line."""
    files = sys.argv[1:]
    if not files or files[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if files else 2
    failed = 0
    for file in files:
        try:
            print(checked(file))
        except ImportError:
            print("skypilot is not installed here: see --help", file=sys.stderr)
            return 1
        except (ValueError, TypeError, OSError) as error:
            print(f"{file}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
