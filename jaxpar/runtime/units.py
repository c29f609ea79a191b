"""Formats quantities for people: bytes and times."""

import math

MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0

#: From here on, a time is in days.
MANY_HOURS = 48 * HOUR


def size(num_bytes: float) -> str:
    """Format a number of bytes in decimal units: "348 bytes", "12.9 kB", "1.240 GB"."""
    power = min(int(math.log10(max(num_bytes, 1)) // 3), 4)
    unit = ("bytes", "kB", "MB", "GB", "TB")[power]
    return f"{num_bytes / 1000**power:.{0 if power == 0 else 3 if power > 2 else 1}f} {unit}"


def transfer(num_bytes: float, seconds: float) -> str:
    """Format a transfer of files, always in GB to compare them: "0.061 GB in 0.2 s, 0.31 GB/s"."""
    gigabytes = num_bytes / 1e9
    return f"{gigabytes:.3f} GB in {seconds:.1f} s, {gigabytes / max(seconds, 1e-9):.2f} GB/s"


def binary_size(num_bytes: float) -> str:
    """Format a number of bytes of memory in binary units: "348 B", "12.9 MiB", "87.6 GiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 1024**power:
            value = num_bytes / 1024**power
            return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a time: "3.2 ms", "0.51 s", "12 s", "3m07s", "2h05m", "12.5 days"."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < MINUTE:
        return f"{seconds:.3g} s"
    if seconds >= MANY_HOURS:
        return f"{seconds / DAY:,.1f} days"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
