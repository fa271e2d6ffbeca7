"""Weights are safetensors inside their own folder; a pickle is never opened."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import weftune
from tests.base.folders import model_folder
from tests.base.packs import CPU
from tests.traversal import PAYLOADS
from weftune.base.config import convert_command, read_config, weight_map
from weftune.base.gguf import convert_cached
from weftune.base.host.streamed import weights_in_files
from weftune.base.load import inspect, load_base, load_plain, load_tokenizer
from weftune.base.spec import BaseSpec
from weftune.errors import BaseModelError


def load_here(spec: BaseSpec) -> None:
    load_base(spec, CPU)


class Trap:
    """Opened as a pickle, it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def pickled(folder: Path, name: str) -> Path:
    """A model folder whose weights are a pickle that would leave the folder `mark`; returns where."""
    model_folder(folder)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(folder / "mark")))
    return folder / "mark"


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "tf_model.h5"]
)
@pytest.mark.parametrize("open_base", [load_tokenizer, inspect, read_config, load_here])
def test_a_base_of_pickles_is_refused_by_every_way_in_with_the_command_that_converts(
    name: str, open_base: object, tmp_path: Path
) -> None:
    mark = pickled(tmp_path, name)
    with pytest.raises(BaseModelError, match="safetensors only") as caught:
        open_base(BaseSpec(model=str(tmp_path)))  # type: ignore[operator]
    assert name in str(caught.value)
    assert convert_command(str(tmp_path)) in str(caught.value)
    assert not mark.exists()


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path: Path) -> None:
    model_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "mark")))
    load_base(BaseSpec(model=str(tmp_path)), CPU)
    assert not (tmp_path / "mark").exists()


def test_a_folder_without_any_weights_is_told_that_safetensors_are_missing(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(BaseModelError, match=r"has no model\.safetensors and no index of several"):
        load_base(BaseSpec(model=str(tmp_path)), CPU)


def test_an_adapter_folder_is_no_base(tmp_path: Path) -> None:
    (model_folder(tmp_path) / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(BaseModelError, match="name the model that the adapter is for"):
        load_base(BaseSpec(model=str(tmp_path)), CPU)


def test_code_that_a_base_brings_is_not_asked_about_and_not_run(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("import os\nos.mkdir('mark')\n")
    with pytest.raises(BaseModelError, match="cannot be loaded"):
        inspect(BaseSpec(model=str(folder)))
    assert not Path("mark").exists()


def test_the_command_converts_a_base_of_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "a base")
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    python, flag, code, *words = shlex.split(convert_command(str(folder)))
    assert (python, flag) == ("python", "-c")
    monkeypatch.setattr(sys, "argv", [flag, *words])
    exec(code, {})
    model = load_plain(BaseSpec(model=f"{folder}-safetensors"), CPU)
    for name, value in model.named_parameters():
        assert torch.equal(value, weights[name])


def test_nothing_in_the_package_opens_a_pickle_of_a_file() -> None:
    """What is unpickled at all, the processes of one run have sent to each other."""
    package = Path(weftune.__file__).parent
    for path in package.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        named = {ast.unparse(call.func) for call in calls}
        assert not named & {"torch.load", "pickle.load", "joblib.load", "np.load", "numpy.load"}, path
        sent = str(path.relative_to(package)) in ("core/limited.py", "data/workers.py", "trainer/planner.py")
        assert sent or "pickle.loads" not in named, path


def sharded(folder: Path, file: object) -> BaseSpec:
    """A base whose index says that one of its weights lies in `file`."""
    model_folder(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = list(load_file(folder / "model-00001-of-00001.safetensors"))
    listed = dict.fromkeys(names, "model-00001-of-00001.safetensors") | {names[0]: file}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return BaseSpec(model=str(folder))


def test_an_index_that_names_plain_files_is_loaded(tmp_path: Path) -> None:
    load_base(sharded(tmp_path, "model-00001-of-00001.safetensors"), CPU)


def test_an_index_that_leads_out_of_its_folder_is_refused_by_every_way_in(tmp_path: Path) -> None:
    secret = tmp_path / "secret.safetensors"
    save_file(load_file(model_folder(tmp_path / "other") / "model.safetensors"), secret, {"format": "pt"})
    spec = sharded(tmp_path / "base", "../secret.safetensors")
    for load in (load_plain, load_base, weights_in_files):
        with pytest.raises(BaseModelError, match=r"names '\.\./secret\.safetensors'"):
            load(spec, CPU)


def test_no_payload_in_an_index_leads_anywhere(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for file in (*PAYLOADS, *(f"{payload}.safetensors" for payload in PAYLOADS)):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(BaseModelError, match=r"must be \.safetensors files beside it"):
            weight_map(index)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\0", '"a"']
)
def test_a_damaged_index_is_a_sentence(text: str, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(text)
    with pytest.raises(BaseModelError, match=r"index\.json (is damaged|names)"):
        weight_map(index)


@pytest.mark.parametrize(
    ("kept", "said"),
    [(0, "is empty: it has 0 bytes"), (-10, "is damaged or cut off"), (100, "it has 100 bytes")],
)
def test_a_weight_file_that_is_empty_or_cut_off_is_named(tmp_path, kept, said):
    model_folder(tmp_path / "model", "llama", torch.float32)
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(BaseModelError, match=re.escape(f"{file} ")) as told:
        load_plain(BaseSpec(model=str(tmp_path / "model")), torch.device("cpu"))
    assert said in str(told.value)


def test_an_empty_gguf_file_is_told_to_be_empty(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(BaseModelError, match=r"model\.gguf cannot be read: it is empty \(0 bytes\)"):
        convert_cached(tmp_path / "model.gguf")
