"""What a run was measured beside: versions, machine, memory. Never the name of the host or the user."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import spark_node
from spark_node.config import RunSettings


def environment(settings: RunSettings, command: str) -> dict[str, Any]:
    """The surroundings of a run, for its summary."""
    import numpy
    import torch

    device = settings.device
    return {
        "spark": spark_node.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cpu_count": _usable_cpus(),
        "workers": settings.workers or os.cpu_count(),
        "threads": torch_threads(),
        "load_average": load_average(),
        "device": device if not device.startswith("cuda") else f"{device} ({torch.cuda.get_device_name(device)})",
        "command": command,
    }


def torch_threads() -> int:
    """Threads that torch uses in one worker, as set right now."""
    import torch

    return torch.get_num_threads()


def load_average() -> float | None:
    """Mean number of busy cores over the last minute, where the system tells it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def peak_rss() -> int | None:
    """Most memory this process has held at once, in bytes, where the system tells it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return _peak_rss_from_usage()


def _peak_rss_from_usage() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _usable_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
