from __future__ import annotations

import os

import pytest

from weftune.errors import PlanError
from weftune.plan.cost import cluster
from weftune.plan.cost.cluster import DEVICES, cluster_from_values, detect_cluster, parse_cluster
from weftune.plan.program.prices import Link


def test_a_line_names_count_device_and_link():
    found = parse_cluster("4xA100-80G:pcie")
    assert found.devices == (DEVICES["A100-80G"],) * 4
    assert (found.link_name, found.link.bandwidth) == ("pcie", 25e9)
    assert found.name == "4xA100-80G:pcie"
    assert parse_cluster("h200").name == "1xH200"


def test_without_a_link_devices_use_nvlink_if_they_have_it():
    assert parse_cluster("2xH100").link == Link(450e9, 5e-6)
    assert parse_cluster("2xRTX4090").link_name == "pcie"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("H100-80G", "there is no device H100-80G; did you mean H100?"),
        ("4xA100-80", "there is no device A100-80; did you mean A100-80G?"),
        ("0xH100", "must lie in 1 to 1024, got 0"),
        ("2xH100:infiniband", "there is no link infiniband; write nvlink or pcie"),
        ("2xL40S:nvlink", "L40S has no nvlink; write pcie"),
        ("", "write such as 4xA100-80G"),
    ],
)
def test_a_wrong_line_gets_a_sentence(text, sentence):
    with pytest.raises(PlanError, match=sentence.replace("?", r"\?")):
        parse_cluster(text)


def test_a_file_may_mix_devices_and_describe_its_own():
    found = cluster_from_values(
        {
            "devices": ["2xH100", {"name": "X1", "memory_gib": 10, "peak_tflops": 5, "bandwidth_gbs": 100}],
            "link": {"bandwidth_gbs": 12, "latency_us": 20},
            "roots": [2, 1],
        },
        "cluster.yaml",
    )
    assert [device.name for device in found.devices] == ["H100", "H100", "X1"]
    assert found.devices[2].memory_bytes == 10 << 30
    assert found.link == Link(12e9, 20e-6)
    priced = found.simulator_cluster()
    assert priced.device_roots == (0, 0, 1)
    assert len(priced.root_bandwidths) == 2


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "must be a mapping with devices"),
        ({"devices": []}, "there is no device in it"),
        ({"devices": ["H100"], "lnk": "pcie"}, r"there is no key lnk; did you mean link\?"),
        ({"devices": [{"name": "X1"}]}, "X1: memory_gib must be a number above 0"),
        (
            {"devices": [{"name": "H100", "memory_gib": "much"}]},
            "memory_gib must be a number above 0, got much",
        ),
        ({"devices": ["2xH100"], "roots": [1]}, "roots hold 1 devices, but there are 2"),
        ({"devices": ["H100"], "link": 5}, "link must be nvlink, pcie or a mapping"),
        ({"devices": ["H100"], "roots": "two"}, "roots must be a list of counts"),
        ({"devices": [5]}, "a device is a name such as 4xH100"),
    ],
)
def test_a_wrong_file_gets_a_sentence(values, sentence):
    with pytest.raises(PlanError, match=sentence):
        cluster_from_values(values, "cluster.yaml")


def test_a_machine_without_gpus_is_its_cpu_and_memory(monkeypatch):
    monkeypatch.setattr(cluster, "_query_smi", lambda: "")
    found = detect_cluster()
    assert found.name == "1xCPU"
    assert found.devices[0].memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert not found.devices[0].is_gpu


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB, 40536", "A100-40G"),
        ("NVIDIA A100-SXM4-80GB, 81920", "A100-80G"),
        ("NVIDIA L40S, 46068", "L40S"),
        ("NVIDIA GeForce RTX 4090, 24564", "RTX4090"),
        ("NVIDIA H200, 143771", "H200"),
    ],
)
def test_a_gpu_is_known_by_what_the_driver_calls_it(monkeypatch, line, kind):
    monkeypatch.setattr(cluster, "_query_smi", lambda: f"{line}\n{line}\n")
    found = detect_cluster()
    assert [device.name for device in found.devices] == [kind, kind]
    assert found.devices[0].memory_bytes == int(line.split(", ")[1]) << 20


def test_a_gpu_that_is_not_in_the_table_is_named(monkeypatch):
    monkeypatch.setattr(cluster, "_query_smi", lambda: "Quadro K620, 2048\n")
    with pytest.raises(PlanError, match="this machine has a Quadro K620"):
        detect_cluster()


def test_the_way_to_the_host_may_be_told():
    found = cluster_from_values(
        {"devices": ["2xH100"], "host": {"bandwidth_gbs": 13, "latency_us": 5}}, "c.yaml"
    )
    assert found.host_link == Link(13e9, 5e-6)
    priced = found.simulator_cluster()
    assert priced.host_link == found.host_link
    assert priced.root_bandwidths == (13e9,)
    with pytest.raises(PlanError, match="host must be a mapping with bandwidth_gbs"):
        cluster_from_values({"devices": ["2xH100"], "host": "pcie"}, "c.yaml")
    with pytest.raises(PlanError, match="there is no key speed"):
        cluster_from_values({"devices": ["2xH100"], "host": {"speed": 1}}, "c.yaml")
