"""Devices and links for which a run is planned: parsed from a string or a file, or detected on this
machine."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weftune.errors import Mistake, PlanError
from weftune.plan.program.prices import Link, PricedCluster

GIB = 1 << 30
PCIE = Link(25e9, 10e-6)
"""Link of PCIe 4.0 with sixteen lanes, with the bandwidth that copies reach in practice."""
USABLE_SHARE = {True: 0.92, False: 0.85}
"""Fraction of the memory of a GPU (key True) and of a CPU (key False) that a run may use."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU or CPU with the numbers of its data sheet."""

    name: str
    memory_bytes: int
    peak_flops: float
    """Peak FLOP/s of dense matrix products: bf16 with fp32 accumulation on a GPU, fp32 on a CPU."""
    bandwidth: float
    """Bandwidth of the device's memory, in bytes per second."""
    nvlink: float = 0.0
    """Bandwidth to another device in one direction, in bytes per second; 0 without NVLink."""
    max_bytes: int | None = None
    """Device bytes that a run may use. None selects the default fraction of the device's memory."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "CPU"

    @property
    def budget(self) -> int:
        """Bytes that a run may use on this device."""
        return (
            int(self.memory_bytes * USABLE_SHARE[self.is_gpu]) if self.max_bytes is None else self.max_bytes
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """The devices of one or more machines, and the links between them."""

    devices: tuple[Device, ...]
    link: Link
    link_name: str
    root_sizes: tuple[int, ...]
    """Number of devices under each PCIe root complex. Devices are numbered one root complex after another."""
    host_link: Link = PCIE
    """Link from host memory to a device. Devices under one PCIe root complex share the bandwidth of this
    link."""

    @property
    def name(self) -> str:
        kinds = list(dict.fromkeys(device.name for device in self.devices))
        counts = [sum(device.name == kind for device in self.devices) for kind in kinds]
        text = " + ".join(f"{count}x{kind}" for count, kind in zip(counts, kinds, strict=True))
        if len(self.root_sizes) > 1 and len(kinds) == 1:
            text = f"{'+'.join(map(str, self.root_sizes))}x{kinds[0]}"
        return text if len(self.devices) == 1 else f"{text}:{self.link_name}"

    def simulator_cluster(self) -> PricedCluster:
        """Return the devices and links in the form that the simulator of pipeline schedules takes."""
        return PricedCluster(
            devices=len(self.devices),
            link=self.link,
            host_link=self.host_link,
            device_roots=tuple(root for root, size in enumerate(self.root_sizes) for _ in range(size)),
            root_bandwidths=(self.host_link.bandwidth,) * len(self.root_sizes),
            serializes_loads=True,
        )


def _data_sheet_device(
    name: str, memory_gib: float, teraflops: float, gigabytes: float, nvlink: float = 0.0
) -> Device:
    return Device(name, int(memory_gib * GIB), teraflops * 1e12, gigabytes * 1e9, nvlink * 1e9)


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _data_sheet_device("A100-40G", 39.4, 312, 1555, 300),
        _data_sheet_device("A100-80G", 79.2, 312, 2039, 300),
        _data_sheet_device("H100", 79.2, 989, 3350, 450),
        _data_sheet_device("H200", 139.8, 989, 4800, 450),
        _data_sheet_device("B200", 178.0, 2250, 8000, 900),
        _data_sheet_device("L40S", 44.5, 362, 864),
        _data_sheet_device("L4", 22.5, 121, 300),
        _data_sheet_device("A10", 22.5, 125, 600),
        _data_sheet_device("A6000", 47.5, 155, 768, 56),
        _data_sheet_device("RTX4090", 23.5, 165, 1008),
        _data_sheet_device("RTX3090", 23.5, 71, 936, 28),
        _data_sheet_device("T4", 14.6, 65, 320),
    )
}
"""Maps the name of each known GPU to its data sheet. Memory is the size that the driver reports, which is
less than the nominal size."""

CORE_PEAK = 160e9
"""FLOP/s of one CPU core in fp32: two fused multiply-adds of sixteen lanes at 2.5 GHz."""
CPU_BANDWIDTH = 40e9
FORMAT_HELP = (
    "write such as 4xA100-80G, 4xA100-80G:pcie, 2+2xRTX3090 for two root complexes, "
    "a file such as cluster.yaml, or auto"
)
KEYS = ("devices", "link", "roots", "host")
DEVICE_KEYS = ("name", "count", "memory_gib", "peak_tflops", "bandwidth_gbs", "nvlink_gbs")
LINK_KEYS = ("bandwidth_gbs", "latency_us")
MAX_DEVICES = 1024


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that a string such as `H200`, `4xA100-80G`, `4xA100-80G:pcie`, or `2+2xRTX3090` (two
    PCIe root complexes) describes."""
    found = re.fullmatch(r"(?:(\d+(?:\+\d+)*)\s*[xX×]\s*)?([^:]+?)(?::(\w+))?", text.strip())
    if found is None:
        raise PlanError(f"--cluster {text}: {FORMAT_HELP}")
    count, name, link = found.groups()
    roots = [_parse_count(one, "--cluster") for one in (count or "1").split("+")]
    return make_cluster([_find_device(name)] * _parse_count(str(sum(roots)), "--cluster"), link, roots)


def make_cluster(
    devices: Sequence[Device], link: str | Link | None, root_sizes: Sequence[int] = ()
) -> Cluster:
    """Return a cluster of the given devices. The default link is NVLink if every device has it, or else PCIe.
    By default, all devices are under one PCIe root complex."""
    nvlink = min((device.nvlink for device in devices), default=0.0)
    if not devices:
        raise PlanError("--cluster: there is no device in it")
    if link is None:
        link = "nvlink" if nvlink else "pcie"
    if link == "nvlink" and not nvlink:
        without = next(device.name for device in devices if not device.nvlink)
        raise PlanError(f"--cluster: {without} has no nvlink; write pcie")
    if isinstance(link, str) and link not in ("nvlink", "pcie"):
        raise PlanError(f"--cluster: there is no link {link}; write nvlink or pcie")
    if root_sizes and sum(root_sizes) != len(devices):
        raise PlanError(f"--cluster: roots hold {sum(root_sizes)} devices, but there are {len(devices)}")
    known = {"nvlink": Link(nvlink or 1.0, 5e-6), "pcie": PCIE}
    return Cluster(
        devices=tuple(devices),
        link=known[link] if isinstance(link, str) else link,
        link_name=link if isinstance(link, str) else f"{link.bandwidth / 1e9:g} GB/s",
        root_sizes=tuple(root_sizes) or (len(devices),),
    )


def limit_memory(cluster: Cluster, max_bytes: int) -> Cluster:
    """Return the cluster with at most `max_bytes` bytes of each device available to a run."""
    return replace(cluster, devices=tuple(replace(device, max_bytes=max_bytes) for device in cluster.devices))


def cluster_from_values(values: Any, source: str) -> Cluster:
    """Return the cluster that the parsed contents of a cluster file describe. `source` is the name of the
    file in error messages."""
    if not isinstance(values, Mapping) or not isinstance(values.get("devices"), list):
        raise PlanError(Mistake(source, "must be a mapping with devices: a list such as [4xA100-80G]"))
    _check_keys(values, KEYS, source)
    devices = [device for one in values["devices"] for device in _read_devices(one, source)]
    link, roots = values.get("link"), values.get("roots") or []
    if isinstance(link, Mapping):
        link = _read_link(link, f"{source}: link")
    elif link is not None and not isinstance(link, str):
        raise PlanError(Mistake(source, f"link must be nvlink, pcie or a mapping with {LINK_KEYS[0]}"))
    if not isinstance(roots, list) or not all(isinstance(root, int) and root > 0 for root in roots):
        raise PlanError(Mistake(source, "roots must be a list of counts such as [2, 2]"))
    cluster = make_cluster(devices, link, roots)
    if "host" not in values:
        return cluster
    if not isinstance(values["host"], Mapping):
        raise PlanError(Mistake(source, f"host must be a mapping with {LINK_KEYS[0]}"))
    return replace(cluster, host_link=_read_link(values["host"], f"{source}: host"))


def _read_link(values: Mapping[str, Any], source: str) -> Link:
    _check_keys(values, LINK_KEYS, source)
    rate = _read_number(values, "bandwidth_gbs", source)
    return Link(rate * 1e9, _read_number(values, "latency_us", source, 10.0) / 1e6)


def detect_cluster() -> Cluster:
    """Return a cluster of the GPUs that nvidia-smi lists on this machine, or of its CPU if it has no GPU."""
    found = _query_smi()
    if found:
        return make_cluster([_smi_device(line) for line in found.splitlines() if line.strip()], None)
    return detect_cpu()


def detect_cpu() -> Cluster:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return make_cluster([Device("CPU", memory, cores * CORE_PEAK, CPU_BANDWIDTH)], None)


def first_gpu_name() -> str | None:
    """Return the name of this machine's first GPU as nvidia-smi reports it. None without a GPU."""
    first = _query_smi().partition("\n")[0]
    return first.rpartition(",")[0].strip() or None


def _query_smi() -> str:
    """Return the output of nvidia-smi, one line per GPU with name and memory in MiB. Return an empty string
    if there is no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _smi_device(line: str) -> Device:
    name, _, memory = line.rpartition(",")
    size = int(float(memory)) << 20
    plain = re.sub(r"[^A-Z0-9]", "", name.upper())
    fitting = [device for kind, device in DEVICES.items() if kind.partition("-")[0] in plain]
    if not fitting:
        raise PlanError(
            f"--cluster auto: this machine has a {name.strip()}, which is not in the table of devices "
            f"({', '.join(DEVICES)}); describe it in a cluster file"
        )
    # Prefer the longest matching name (L40S over L4), then the closest memory size.
    kind = max(
        fitting, key=lambda device: (len(device.name.partition("-")[0]), -_compare_memory(device, size))
    )
    return replace(kind, memory_bytes=size)


def _compare_memory(device: Device, size: int) -> int:
    return abs(device.memory_bytes - size)


def _find_device(name: str) -> Device:
    by_plain = {key.lower(): device for key, device in DEVICES.items()}
    plain = name.strip().lower()
    if plain in by_plain:
        return by_plain[plain]
    # `H100-80G` should suggest H100, although A100-80G shares more letters with it.
    family = [key for key in by_plain if key.partition("-")[0] == plain.partition("-")[0]]
    near = difflib.get_close_matches(plain, family or by_plain, n=1, cutoff=0.0 if family else 0.4)
    hint = f"did you mean {by_plain[near[0]].name}? " if near else ""
    raise PlanError(
        f"--cluster: there is no device {name.strip()}; {hint}Known: {', '.join(DEVICES)}; {FORMAT_HELP}"
    )


def _read_devices(entry: Any, source: str) -> list[Device]:
    if isinstance(entry, str):
        return list(parse_cluster(entry).devices)
    if not isinstance(entry, Mapping) or "name" not in entry:
        raise PlanError(
            Mistake(source, f"a device is a name such as 4xH100, or a mapping with {DEVICE_KEYS}")
        )
    _check_keys(entry, DEVICE_KEYS, f"{source}: devices")
    name = str(entry["name"])
    sheet = DEVICES.get(name, Device(name, 0, 0.0, 0.0))
    device = Device(
        name,
        int(_read_number(entry, "memory_gib", f"{source}: {name}", sheet.memory_bytes / GIB) * GIB),
        _read_number(entry, "peak_tflops", f"{source}: {name}", sheet.peak_flops / 1e12) * 1e12,
        _read_number(entry, "bandwidth_gbs", f"{source}: {name}", sheet.bandwidth / 1e9) * 1e9,
        float(entry.get("nvlink_gbs", sheet.nvlink / 1e9)) * 1e9,
    )
    return [device] * _parse_count(str(entry.get("count", 1)), f"{source}: {name}")


def _parse_count(text: str, source: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DEVICES:
        raise PlanError(Mistake(source, f"the count of devices must lie in 1 to {MAX_DEVICES}, got {text}"))
    return int(text)


def _read_number(values: Mapping[str, Any], key: str, source: str, default: float = 0.0) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise PlanError(Mistake(source, f"{key} must be a number above 0, got {value}"))
    return float(value)


def _check_keys(values: Mapping[Any, Any], known_keys: Sequence[str], source: str) -> None:
    for key in values:
        if key not in known_keys:
            near = difflib.get_close_matches(str(key), known_keys, n=1, cutoff=0.0)
            raise PlanError(Mistake(source, f"there is no key {key}; did you mean {near[0]}?"))
