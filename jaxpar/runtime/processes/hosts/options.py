"""The rules about the options of a launcher that is one of several."""

from jaxpar.config import Config, ConfigError
from jaxpar.config.numerals import only_digits
from jaxpar.config.rules.limits import MAX_SECONDS
from jaxpar.config.validate import resolve
from jaxpar.runtime.processes import addresses
from jaxpar.runtime.processes.addresses import is_loopback
from jaxpar.runtime.processes.launch_options import LaunchOptions

#: The most hosts of a run.
MAX_HOSTS = 100_000


def limits(nodes: str) -> tuple[int, int]:
    """Return the least and the most hosts of --nodes. Raises:   ConfigError."""
    low, colon, high = nodes.partition(":")
    high = high if colon else low
    if not (only_digits(low) and only_digits(high) and 0 < int(low) <= int(high) <= MAX_HOSTS):
        rule = f"is not MIN:MAX with 1 <= MIN <= MAX <= {MAX_HOSTS:,}"
        raise ConfigError("--nodes", nodes, rule, "use --nodes 2:4")
    return int(low), int(high)


def checked_address(name: str, address: str, rule: str = "is not HOST:PORT") -> tuple[str, int]:
    """Return host and port of an option. Raises:   ConfigError."""
    found = addresses.split(address)
    if found is None:
        fix = f"use {name} HOST:29400, the same on every host"
        raise ConfigError(name, address, rule, fix)
    return found


def check(options: LaunchOptions) -> None:
    """Check the options of a launcher that is one of several.

    Raises:   ConfigError that names the option.
    """
    limits(options.nodes)
    met = options.rendezvous
    checked_address("--rendezvous", met, "is not HOST:PORT" if met else "is needed with --nodes")
    seconds = {
        "--join-seconds": (options.join_seconds, 0.0, 10),
        "--wait-seconds": (options.wait_seconds, 1.0, 600),
        "--heartbeat-seconds": (options.heartbeat_seconds, 0.5, 5),
    }
    for name, (given, least, good) in seconds.items():
        if not least <= given <= MAX_SECONDS:  # also for NaN
            rule = f"must be at least {least:g}, and at most {MAX_SECONDS:,}"
            raise ConfigError(name, given, rule, f"use {name} {good}")
    if "/" in options.host_name or options.host_name != options.host_name.strip():
        rule = "must be a name without / or spaces around it"
        raise ConfigError("--host-name", options.host_name, rule, "use --host-name gpu01")


def obstacle(cfg: Config, devices: int) -> str:
    """Return the rule that a config breaks on a number of devices; empty if it breaks none.

    Numbers that do not divide the rows of the global batch, or a dim that is sharded, do.
    """
    if cfg.parallel.auto:
        return ""  # the planner finds a layout
    try:
        resolve(cfg, devices)
    except ConfigError as error:
        return f"{error.field} {error.rule}"
    return ""


def own_address(options: LaunchOptions) -> str:
    """Return this host's address for the others; empty while the rendezvous has none.

    Raises:   ConfigError if it is a loopback address, but the rendezvous is not.
    """
    if options.address:
        if not addresses.is_here(options.address):
            rule, fix = "is no address of this host", "see ip addr, or remove --address"
            raise ConfigError("--address", options.address, rule, fix)
        return options.address
    host, _ = checked_address("--rendezvous", options.rendezvous)
    own = addresses.address_towards(host)
    if own is None:
        return ""  # the name is not known yet, or there is no route: the launcher tries again
    if is_loopback(own) and not is_loopback(host):
        rule = f"is the loopback address {own} on this host"
        fix = "give this host's address in its network: --address 10.0.0.1"
        raise ConfigError("--rendezvous", options.rendezvous, rule, fix)
    return own
