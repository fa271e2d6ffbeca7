from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest

from tests.cases import is_within
from tests.data import families
from tests.plan.outlooks import CONFIG
from weftune.cli.main import main
from weftune.cli.plan_text import format_span, layers_text
from weftune.plan.cost.memory import format_bytes

WITHOUT_TORCH = """
import sys
from weftune.cli.main import app
app(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base of config.json and tokenizer only, three jobs, and a cache of their own."""
    place = tmp_path_factory.mktemp("plan")
    base = place / "base"
    families.smollm2().save_pretrained(base)
    (base / "config.json").write_text(json.dumps(CONFIG))
    for name, words in (("short", 20), ("middle", 90), ("long", 300)):
        rows = [{"text": " ".join(["word"] * (words + 7 * number % words))} for number in range(40)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def jobs_file(folder, **adapters):
    lines = [f"  - {{name: {name}, data: {name}.jsonl, adapter: {keys}}}" for name, keys in adapters.items()]
    (folder / "jobs.yaml").write_text("\n".join(["base: ./base", "jobs:", *lines, ""]))
    return folder / "jobs.yaml"


def seconds_of_children():
    """Of the processor, not of the clock: other tests on the same machine would be counted too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True, slots=True)
class Shown:
    code: int
    out: str
    err: str


@pytest.fixture
def weftune(folder, monkeypatch, capsys):
    """The command in this process, its jobs file being `folder`'s."""
    monkeypatch.setenv("WEFTUNE_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(folder)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["weftune", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        return Shown(int(ended.value.code or 0), printed.out, printed.err)

    return call


def test_a_plan_for_four_devices_is_made_in_seconds_without_torch_or_weights(folder):
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}", long="{rank: 64}")
    start = seconds_of_children()
    wanted = [
        "--cluster",
        "4xA100-80G:pcie",
        "--pipeline",
        "4",
        "--explain",
        "--ablate",
        "--gantt",
        "out.html",
        "--json",
        "out.json",
    ]
    command = [sys.executable, "-c", WITHOUT_TORCH, "plan", str(file), *wanted]
    surroundings = {**os.environ, "WEFTUNE_CACHE": str(folder / "cache"), "COLUMNS": "200"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=surroundings, check=False)
    assert is_within(seconds_of_children() - start, 15)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.splitlines()[-1] == "False", "torch was imported"
    for part in ("3 jobs on 4xA100-80G:pcie", "not measured", "one after another", "1F1B per job"):
        assert part in shown.stdout
    assert "- Token capacity" in shown.stdout
    for part in ("embedding and head not counted", "no job shares a microbatch", "gpipe"):
        assert part in shown.stdout
    assert 'data-timeline="gantt"' in (folder / "out.html").read_text()
    numbers = json.loads((folder / "out.json").read_text())
    assert len(numbers["stages"]) == 4
    assert sum(stage["layers"] for stage in numbers["stages"]) == 32
    assert numbers["first_window"]["layout"]["stages"][3]["worker"] == 3
    assert numbers["first_window"]["seconds"] is None, "without a profile a run promises no seconds"
    fastest = numbers["forecast"]["step_seconds"]
    assert all(other["step_seconds"] >= fastest for other in numbers["alternatives"])
    rows = numbers["ablations"]
    in_first_window = [row for row in rows if row["mechanism"] in ("sharing", "capacity", "partition")]
    assert all(row["step_seconds"] / fastest - 1 == pytest.approx(row["cost"]) for row in in_first_window)
    # A window that left batches to the next one would seem to take much less time.
    assert all(row["cost"] > -0.05 for row in rows if row["mechanism"] in ("order", "groups", "capacity"))


def test_mechanisms_are_compared_with_the_plan_that_is_shown(folder, weftune):
    """With replicas and shards, which the comparison keeps or replaces by stages."""
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}")
    words = ("--cluster", "4xA100-80G", "--replicas", "2", "--shards", "2", "--ablate", "--json", "out.json")
    shown = weftune(file, *words)
    assert shown.code == 0, shown.err
    numbers = json.loads((folder / "out.json").read_text())
    in_first_window = ("sharing", "capacity", "partition", "replicas", "shards")
    rows = {row["mechanism"]: row for row in numbers["ablations"] if row["mechanism"] in in_first_window}
    assert {"sharing", "replicas", "shards"} <= rows.keys()
    assert rows["shards"]["instead"] == "2 stages instead"
    shown_seconds = numbers["forecast"]["step_seconds"]
    for row in rows.values():
        assert row["step_seconds"] / shown_seconds - 1 == pytest.approx(row["cost"])


def test_where_the_base_fits_each_device_a_share_of_the_jobs_goes_to_each(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}", long="{rank: 64}")
    shown = weftune(file, "--cluster", "2xA100-80G", "--gpus", "2", "--json", "out.json")
    words = " ".join(shown.out.split())
    assert words.startswith("3 jobs on 2xA100-80G:nvlink: 13 s for the whole run, "), shown.err
    assert "The base fits each device: train with --gpus 2, a share of the jobs on each" in words
    numbers = json.loads((folder / "out.json").read_text())
    assert sorted(name for share in numbers["shares"] for name in share["jobs"]) == [
        "long",
        "middle",
        "short",
    ]
    assert (len(numbers["stages"]), numbers["train"]) == (1, "--gpus 2")
    assert all(0 < share["needs_bytes"] <= share["budget_bytes"] for share in numbers["shares"])
    weftune(file, "--cluster", "H200", "--json", "out.json")
    assert json.loads((folder / "out.json").read_text())["shares"] is None


def test_the_fastest_ways_to_divide_several_devices_are_told_with_what_limits_them(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}", long="{rank: 64}")
    shown = weftune(file, "--cluster", "2xA100-80G", "--json", "out.json")
    candidates = json.loads((folder / "out.json").read_text())["candidates"]
    assert set(candidates[0]) == {
        "shares", "replicas", "stages", "shards", "capacity", "tokens_per_second", "needs_bytes",
        "idle_share", "limited_by", "overlaps",
    }  # fmt: skip
    assert len(candidates) == 3
    best = candidates[0]["tokens_per_second"]
    assert all(one["tokens_per_second"] * 0.99 <= best for one in candidates)
    words = " ".join(shown.out.split())
    assert f"{best:,.0f} tokens/s are predicted" in words
    assert "Fastest ways to divide the devices" in words
    weftune(file, "--cluster", "2xA100-80G", "--pipeline", "2", "--json", "out.json")
    forced = json.loads((folder / "out.json").read_text())["candidates"]
    assert forced[0]["stages"] == 2
    assert forced[0]["tokens_per_second"] <= best * 1.0101


def test_the_option_gpus_plans_a_share_of_the_jobs_on_each_device_as_train_would(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}", middle="{rank: 16}", long="{rank: 64}")

    def shares(*words):
        shown = weftune(file, *words, "--json", "out.json")
        assert shown.code == 0, shown.err
        numbers = json.loads((folder / "out.json").read_text())
        return None if numbers["shares"] is None else len(numbers["shares"]), numbers["train"]

    assert shares("--cluster", "4xA100-80G", "--gpus", "2") == (2, "--gpus 2")
    assert shares("--cluster", "2xA100-80G", "--gpus", "all") == (2, "--gpus 2")
    assert shares("--cluster", "4xA100-80G", "--gpus", "1") == (None, "--gpus 1")
    for words, sentence in (
        (("--cluster", "2xA100-80G", "--gpus", "3"), "--gpus 3: 2xA100-80G:nvlink has 2"),
        (
            ("--cluster", "2xA100-80G", "--gpus", "2", "--pipeline", "2"),
            "4 GPUs are needed, and 2xA100-80G:nvlink",
        ),
        (("--cluster", "2xT4", "--gpus", "2"), "the base and a job do not fit the"),
        (("--gpus", "none"), "--gpus none: write all, or how many"),
        (("--gpus", "2", "--gpu-memory", "8GiB"), "--gpus and --replicas need all of it on each"),
    ):
        shown = weftune(file, *words)
        assert (shown.code, sentence in shown.err) == (2, True), (words, shown.err)


def test_both_memory_figures_of_a_plan_say_what_they_are(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}", long="{rank: 64}")
    shown = weftune(file, "--cluster", "H200", "--json", "out.json")
    numbers, words = json.loads((folder / "out.json").read_text()), " ".join(shown.out.split())
    peak, full = (
        format_bytes(numbers["run"]["needs_bytes"]),
        format_bytes(numbers["stages"][0]["needs_bytes"]),
    )
    assert peak != full
    assert f"a peak of {peak} of the" in words
    assert "needs at most" in words
    assert full in words
    assert f"if every microbatch has {numbers['capacity']:,} tokens, the token capacity." in words
    assert f"With the samples of the first window, the peak is {peak}." in words


def test_where_a_device_is_too_small_the_base_is_divided_and_the_options_told(folder, weftune):
    shown = weftune(jobs_file(folder, short="{rank: 8}"), "--cluster", "4xT4", "--json", "out.json")
    numbers = json.loads((folder / "out.json").read_text())
    best = numbers["candidates"][0]
    assert best["stages"] * best["shards"] > 1
    assert best["shares"] * best["replicas"] * best["stages"] * best["shards"] == 4
    assert f"Train with {numbers['train']}." in " ".join(shown.out.split())


def test_first_of_all_come_the_time_and_the_memory_of_the_run_and_of_each_job(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}", long="{rank: 64}")
    shown = weftune(file, "--cluster", "H200", "--json", "out.json")
    first, rest = shown.out.split("\n", 1)
    run = json.loads((folder / "out.json").read_text())["run"]
    assert first.startswith("2 jobs on 1xH200: "), shown.err
    seconds, peak = format_span(run["seconds"]), format_bytes(run["needs_bytes"])
    assert f"{seconds} for the whole run, and a peak of {peak} of" in first
    assert run["seconds"] == max(job["ends"] for job in run["jobs"].values()) > 0
    assert run["jobs"]["long"]["state_bytes"] == 8 * run["jobs"]["short"]["state_bytes"] > 0
    table = rest[: rest.index("they fit")]
    for name, job in run["jobs"].items():
        row = next(line for line in table.splitlines() if name in line)
        assert [cell.strip() for cell in row.split("│")[2:5]] == [
            str(job["steps"]),
            format_span(job["ends"]),
            format_bytes(job["state_bytes"]),
        ]
    assert "bubbles" not in shown.out
    assert "1F1B" not in shown.out


@pytest.mark.slow
def test_thirty_two_jobs_on_eight_devices_are_planned_in_ten_seconds(folder):
    for number in range(32):
        dice = random.Random(number)
        rows = [{"text": " ".join(["word"] * dice.randint(20, 400))} for _ in range(2000)]
        (folder / f"many{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        f"  - {{name: many{number}, data: many{number}.jsonl, batch_size: 16, adapter: {{rank: 16}}}}"
        for number in range(32)
    ]
    (folder / "many.yaml").write_text("\n".join(["base: ./base", "jobs:", *lines, ""]))
    wanted = ["plan", "many.yaml", "--cluster", "8xA100-80G:pcie"]
    around = {**os.environ, "WEFTUNE_CACHE": str(folder / "cache")}
    seconds = []
    for _ in range(2):
        start = seconds_of_children()
        command = [sys.executable, "-c", WITHOUT_TORCH, *wanted]
        shown = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=around, check=False)
        seconds.append(seconds_of_children() - start)
        assert "train with --gpus 8, a share of the jobs on each" in " ".join(shown.stdout.split()), (
            shown.stderr
        )
    assert is_within(seconds[1], 10), f"from the token cache; before it was there: {seconds[0]:.1f} s"
    assert is_within(seconds[0], 10), "before there was a token cache"


def test_tokenised_jobs_are_planned_from_all_their_samples(folder, weftune):
    from weftune.data.prepare import prepare
    from weftune.data.spec import DataSpec

    file = jobs_file(folder, short="{rank: 8}", long="{rank: 8}")
    spec = DataSpec(path=str(folder / "short.jsonl"))
    prepare(spec, None, families.smollm2(), folder / "cache" / "tokens", context=131072)
    shown = weftune(file, "--cluster", "H200")
    assert "and estimated from the first rows: long." in shown.out, shown.err


def test_jobs_on_the_same_rows_are_tokenised_once(folder, weftune, monkeypatch):
    monkeypatch.setenv("WEFTUNE_CACHE", str(folder / "once"))
    lines = [
        f"  - {{name: {name}, data: short.jsonl, adapter: {{rank: 8}}, seed: {name[1]}}}"
        for name in ("s1", "s2")
    ]
    (folder / "same.yaml").write_text("\n".join(["base: ./base", "jobs:", *lines, ""]))
    shown = weftune("same.yaml", "--cluster", "H200")
    assert "and estimated from the first rows: s1, s2." in shown.out, shown.err
    assert len(list((folder / "once" / "tokens").iterdir())) == 1


def test_where_host_memory_lets_more_jobs_aboard_the_plan_says_so(folder, weftune):
    lines = [f"  - {{name: job{at}, data: long.jsonl, adapter: {{rank: 48}}}}" for at in range(4)]
    (folder / "many.yaml").write_text(
        "\n".join(["base: ./base", "defaults: {batch_size: 32}", "jobs:", *lines, ""])
    )
    shown = weftune("many.yaml", "--cluster", "RTX4090", "--explain", "--json", "out.json")
    assert shown.code == 0, shown.err
    told = " ".join(shown.out.split())
    assert "master weights and moments of adapters live in host memory" in told
    assert "Master weights and moments live in host memory, which needs" in told
    numbers = json.loads((folder / "out.json").read_text())
    assert numbers["optimizer_offloaded"]
    assert numbers["first_window"]["layout"]["optimizer_offloaded"]
    state = [job["state_bytes"] for job in numbers["run"]["jobs"].values()]
    assert numbers["host_bytes"] == sum(state[: len(numbers["aboard"])]) * 12 // 18
    assert len(numbers["aboard"]) > 1


def test_a_job_that_must_wait_is_shown_with_its_reason(folder, weftune):
    lines = [f"  - {{name: job{at}, data: middle.jsonl, adapter: {{rank: 64}}}}" for at in range(6)]
    (folder / "many.yaml").write_text("\n".join(["base: ./base", "jobs:", *lines, ""]))
    shown = weftune("many.yaml", "--cluster", "RTX4090")
    assert shown.code == 0, shown.err
    assert "6 jobs on 1xRTX4090" in shown.out
    assert "job4 waits: needs" in shown.out
    assert "with 4 other jobs running" in shown.out
    assert "job5 waits: it waits behind job4, which comes first" in shown.out


@pytest.mark.parametrize(
    ("adapter", "cluster", "sentence"),
    [
        ("{rank: 40000}", "T4", "job short: even alone, with the base streamed, it needs"),
        ("{rank: 8}", "H20", "there is no device H20; did you mean H200?"),
        ("{rank: 8}", "absent.yaml", "the file cannot be read"),
        ("{rank: 8, targets: [q_pro]}", "H200", "matches no module of the base; did you mean q_proj?"),
    ],
)
def test_what_cannot_be_planned_gets_one_sentence_and_exit_code_2(
    folder, weftune, adapter, cluster, sentence
):
    shown = weftune(jobs_file(folder, short=adapter), "--cluster", cluster)
    assert shown.code == 2
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_timeline_is_drawn_as_a_page_or_a_picture(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}")
    shown = weftune(file, "--cluster", "H200", "--gantt", "out.svg")
    assert (shown.code, ".html or .png" in shown.err) == (2, True)
    assert not (folder / "out.svg").exists()
    pytest.importorskip("PIL")
    assert weftune(file, "--cluster", "2xH100", "--gantt", "out.png").code == 0
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_drawing_library_a_picture_is_refused_with_what_to_install(folder, weftune, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    shown = weftune(jobs_file(folder, short="{rank: 8}"), "--cluster", "H200", "--gantt", "out.png")
    assert (shown.code, "weftune[png]" in shown.err) == (2, True)


def test_a_base_that_does_not_fit_is_streamed_and_the_bare_transfer_is_told(folder, weftune):
    file = jobs_file(folder, short="{rank: 64}", middle="{rank: 64}")
    shown = weftune(
        file, "--cluster", "T4", "--explain", "--ablate", "--gantt", "out.html", "--json", "out.json"
    )
    assert shown.code == 0, shown.err
    words = " ".join(shown.out.split())
    assert "streamed from host memory" in words
    assert "transfers that compute does not hide" in words
    assert "one after another" in shown.out
    assert "prefetch" in shown.out
    assert "- Uploads: " in shown.out
    assert 'data-timeline="gantt"' in (folder / "out.html").read_text()
    numbers = json.loads((folder / "out.json").read_text())
    assert numbers["streamed"]
    assert sum(stage["layers"] for stage in numbers["stages"]) == 32
    assert 0 <= numbers["unhidden_seconds"] < numbers["forecast"]["step_seconds"]
    assert numbers["aboard"] == ["short", "middle"]
    assert f"The base is {numbers['why']}." in words


@pytest.mark.slow
def test_streaming_a_base_of_70_billion_is_planned_in_ten_seconds_without_torch(folder):
    """Where all jobs are aboard at once, and where most of them have to wait."""
    base = folder / "large"
    families.smollm2().save_pretrained(base)
    large = {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    }
    (base / "config.json").write_text(json.dumps(CONFIG | large))
    lines = [
        f"  - {{name: job{at}, data: long.jsonl, adapter: {{rank: 64}}, seed: {at}}}" for at in range(16)
    ]
    (folder / "large.yaml").write_text("\n".join(["base: ./large", "jobs:", *lines, ""]))
    around = {**os.environ, "WEFTUNE_CACHE": str(folder / "cache")}
    waiting = []
    for memory in ("32GiB", "11GiB"):
        wanted = ["plan", "large.yaml", "--cluster", "H200", "--gpu-memory", memory, "--json", "out.json"]
        start = seconds_of_children()
        command = [sys.executable, "-c", WITHOUT_TORCH, *wanted]
        shown = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=around, check=False)
        assert is_within(seconds_of_children() - start, 10)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.splitlines()[-1] == "False", "torch was imported"
        waiting.append(len(json.loads((folder / "out.json").read_text())["waiting"]))
    assert waiting[0] == 0
    assert 0 < waiting[1] < 16


@pytest.mark.slow
def test_what_a_run_may_take_is_a_limit_on_every_gpu(folder, weftune):
    file = jobs_file(folder, short="{rank: 8}")
    weftune(file, "--cluster", "2xH200", "--pipeline", "2", "--gpu-memory", "20GiB", "--json", "out.json")
    numbers = json.loads((folder / "out.json").read_text())
    assert [stage["budget_bytes"] for stage in numbers["stages"]] == [20 << 30] * 2
    weftune(file, "--cluster", "H200", "--gpu-memory", "12GiB", "--json", "out.json")
    numbers = json.loads((folder / "out.json").read_text())
    assert numbers["streamed"]
    assert numbers["device_bytes"] <= numbers["budget_bytes"] == 12 << 30
    shown = weftune(file, "--cluster", "H200", "--gpu-memory", "little")
    assert (shown.code, "--gpu-memory little: write a number and a unit" in shown.err) == (2, True)


def test_a_job_that_cannot_run_even_alone_is_named_beside_those_that_can(folder, weftune):
    """The run trains the first and gives the second up, with the same reason."""
    file = jobs_file(folder, short="{rank: 8}", long="{rank: 40000}")
    shown = weftune(file, "--cluster", "T4", "--json", "out.json")
    assert shown.code == 0, shown.err
    assert "long cannot run even alone: needs" in shown.out
    numbers = json.loads((folder / "out.json").read_text())
    assert (numbers["aboard"], list(numbers["too_large"])) == (["short"], ["long"])


def test_several_devices_that_no_stage_fits_stream_the_base_as_a_run_would(folder, weftune):
    """Four small cards: weights of 15 GiB pass through them, shared by the cards of a root complex."""
    lines = [
        "devices: [{name: card, count: 4, memory_gib: 4.5, peak_tflops: 60, bandwidth_gbs: 500}]",
        "link: pcie",
        "roots: [2, 2]",
        "host: {bandwidth_gbs: 8}",
    ]
    (folder / "cluster.yaml").write_text("\n".join(lines))
    file = jobs_file(folder, short="{rank: 8}")
    shown = weftune(file, "--cluster", "cluster.yaml", "--explain", "--ablate", "--json", "out.json")
    assert shown.code == 0, shown.err
    words = " ".join(shown.out.split())
    assert "2+2xcard" in words
    assert "Stage j is on device j mod 4." in words
    numbers = json.loads((folder / "out.json").read_text())
    assert numbers["streamed"]
    assert f"The base is {numbers['why']}." in words
    assert {stage["device"] for stage in numbers["stages"]} == {0, 1, 2, 3}
    assert numbers["train"].startswith("--pipeline 4 --gpu-memory")


@pytest.mark.slow
def test_shards_stream_half_of_every_layer_each_and_wait_for_their_sums(folder, weftune):
    file, numbers = jobs_file(folder, short="{rank: 8}"), []
    for words in (("H200",), ("2xH200:nvlink", "--shards", "2"), ("2xH200:pcie", "--shards", "2")):
        shown = weftune(file, "--cluster", *words, "--gpu-memory", "6GiB", "--explain", "--json", "out.json")
        assert shown.code == 0, shown.err
        numbers.append(json.loads((folder / "out.json").read_text()))
    _, linked, slow = numbers
    assert [one["streamed"] for one in numbers] == [True] * 3
    assert "Every layer is divided among 2 devices." in " ".join(shown.out.split())
    assert linked["train"] == "--shards 2"
    assert linked["why"].startswith("streamed over 2 shards in ")
    assert (len(linked["needs_bytes"]), linked["budget_bytes"]) == (2, [6 << 30] * 2)
    assert max(linked["needs_bytes"]) <= 6 << 30
    resident = [sum(one["layers"] for one in plan["stages"] if one["resident"]) for plan in numbers]
    assert resident[1] > resident[0], "a shard's part of a layer is half as large"
    assert linked["round_seconds"] < slow["round_seconds"], "sums take longer over PCIe"


def test_a_job_without_rows_is_named(folder, weftune):
    (folder / "empty.jsonl").write_text("")
    shown = weftune(jobs_file(folder, empty="{rank: 8}"), "--cluster", "H200")
    assert shown.code == 2
    assert "job empty: empty.jsonl: the dataset is empty" in shown.err


def test_a_cluster_without_memory_is_named_with_the_number_that_does_not_fit(folder, weftune):
    for count, sentence in (
        (2, "a worker needs 3.90 GiB of its device at the least, where adapters and inputs of stages stay"),
        (1, "2.00 GiB of slack, but the GPU has 1.84 GiB for a run; use a larger GPU or a smaller base"),
    ):
        card = f"{{name: card, count: {count}, memory_gib: 2, peak_tflops: 60, bandwidth_gbs: 500}}"
        (folder / "cluster.yaml").write_text(f"devices: [{card}]\nlink: pcie\n")
        shown = weftune(jobs_file(folder, short="{rank: 8}"), "--cluster", "cluster.yaml")
        assert shown.code == 2
        assert sentence in shown.err
        assert len(shown.err.splitlines()) == 1


def test_a_cluster_file_is_read_from_yaml(folder, weftune):
    (folder / "cluster.yaml").write_text("devices: [2xH100]\nlink: {bandwidth_gbs: 10}\n")
    shown = weftune(jobs_file(folder, short="{rank: 8}"), "--cluster", "cluster.yaml")
    assert "1 job on 2xH100:10 GB/s" in shown.out, shown.err
    (folder / "cluster.yaml").write_text("devices: [2xH100")
    shown = weftune(jobs_file(folder, short="{rank: 8}"), "--cluster", "cluster.yaml")
    assert (shown.code, "is no YAML" in shown.err) == (2, True)


@pytest.mark.parametrize(
    ("start", "stop", "text"),
    [(0, 34, "embedding, 0–31, head"), (0, 3, "embedding, 0–1"), (10, 19, "9–17"), (33, 34, "head")],
)
def test_a_stage_is_told_by_the_layers_of_the_base(start, stop, text):
    assert layers_text(start, stop, 32) == text


def test_a_profile_of_this_machine_takes_the_place_of_the_data_sheet(folder, weftune, monkeypatch):
    from tests.plan.cost.test_profile import profile
    from tests.plan.costs import CONFIG as SMALL
    from tests.plan.costs import SHAPE
    from weftune.plan.cost import cluster
    from weftune.plan.cost.profile import (
        cpu_threads,
        profile_folder,
        profile_key,
        profile_path,
        write_profile,
    )

    monkeypatch.setattr(cluster, "_query_smi", lambda: "")
    base = folder / "small"
    families.smollm2().save_pretrained(base)
    (base / "config.json").write_text(json.dumps(SMALL))
    (folder / "small.yaml").write_text("base: ./small\njobs:\n  - {name: short, data: short.jsonl}\n")
    assert "not measured" in weftune("small.yaml").out
    measured = replace(profile(), key=profile_key(SHAPE, "cpu", cpu_threads()))
    write_profile(profile_path(profile_folder(), measured.key), measured)
    shown = weftune("small.yaml", "--json", "out.json")
    assert "from the profile of this" in " ".join(shown.out.split()), shown.err
    assert "not measured" in weftune("small.yaml", "--cluster", "H200").out


@pytest.mark.slow
def test_on_this_machine_a_base_is_streamed_by_the_link_that_a_run_would_measure(
    folder, weftune, monkeypatch
):
    """No GPU is here: what it would be measured as is given, and without it the data sheet stands."""
    import torch

    from weftune.plan.cost import cluster
    from weftune.run.measure.link import HostLink

    monkeypatch.setattr(cluster, "_query_smi", lambda: "NVIDIA H200, 143771\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = (jobs_file(folder, short="{rank: 8}"), "--gpu-memory", "8GiB", "--json", "out.json")

    def seconds():
        assert weftune(*words).code == 0
        numbers = json.loads((folder / "out.json").read_text())
        return numbers["round_seconds"], numbers["source"]

    by_sheet, source = seconds()
    assert "data sheet" in source
    monkeypatch.setattr("weftune.launch.choice._measured_link", lambda base: HostLink(1e9, 1e9, 1e15))
    measured, source = seconds()
    assert "measured just now" in source
    # The layers' 13 GiB come twice a round, save those that find their slot still full.
    assert measured > 20 > by_sheet


MIXTURE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960,
}  # fmt: skip
"""Qwen3-30B-A3B."""
EXPERTS = "[mlp.experts.gate_up_proj, mlp.experts.down_proj]"


@pytest.fixture
def mixture(folder):
    (folder / "base" / "config.json").write_text(json.dumps(MIXTURE))
    yield folder
    (folder / "base" / "config.json").write_text(json.dumps(CONFIG))


def test_a_mixture_takes_the_memory_of_all_experts_and_the_time_of_the_active_ones(mixture, weftune):
    jobs_file(mixture, short="{rank: 4}", long=f"{{rank: 4, target_parameters: {EXPERTS}}}")
    shown = weftune("jobs.yaml", "--cluster", "1xH200", "--json", "out.json")
    assert shown.code == 0, shown.err
    numbers = json.loads((mixture / "out.json").read_text())
    (device,) = numbers["stages"]
    assert device["needs_bytes"] > 2 * 30.5e9
    # A dense base of 30.5 billion parameters at the data sheet's peak makes 8,100 tokens a second.
    assert numbers["forecast"]["tokens_per_second"] > 20_000


@pytest.mark.slow
def test_a_mixture_that_does_not_fit_is_streamed_at_the_pace_of_its_active_experts(mixture, weftune):
    jobs_file(mixture, short="{rank: 4}", long=f"{{rank: 4, target_parameters: {EXPERTS}}}")
    shown = weftune("jobs.yaml", "--cluster", "1xA100-80G", "--gpu-memory", "40GiB", "--json", "out.json")
    assert shown.code == 0, shown.err
    assert "is streamed from host memory" in shown.out
    # A dense base of 30.5 billion parameters would make 1,000 tokens per second on an A100.
    assert json.loads((mixture / "out.json").read_text())["forecast"]["tokens_per_second"] > 5_000
