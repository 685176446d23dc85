"""CONTRIBUTING's recipes are true: a family and an operator added to a copy of the tree, by the files that the recipes
name and nothing else, are found by the tests of all and pass them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("app", "actors", "data", "ops", "tests", "configs", "docs")
LOOM = '''
"""Loom, a family that is there to be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.models.base.encoders import T5_XXL
from ops.models.base.family import (
    PICTURE_VAE,
    Family,
    Json,
    LoraNames,
    OwnCode,
    PipelineFiles,
    PublishedUse,
    PublishedParts,
    TrainingRecipe,
)
from ops.models.loom.config import LoomConfig

if TYPE_CHECKING:
    from torch import nn


def _model() -> type[nn.Module]:
    from ops.models.loom.model import LoomDiT

    return LoomDiT


def _published(index: Json, fields: Json) -> PublishedUse:
    return PublishedUse(clips={"frames": 9, "steps": 50, "guidance_scale": 3.0})


def _recipe(files: PipelineFiles) -> TrainingRecipe:
    return TrainingRecipe(text={"max_length": 128})


FAMILY = Family(
    config=LoomConfig,
    model=_model,
    diffusers_class="LoomTransformer",
    own_code=OwnCode(name="Loom's"),
    vae=PICTURE_VAE,
    key_map={
        "num_layers": "depth",
        "num_heads": "heads",
        "head_dim": "head_dim",
        "text_dim": "text_dim",
        "in_channels": "channels_in",
        "out_channels": "channels_out",
        "eps": "eps",
    },
    fixed_fields={},
    read_rest=lambda fields, known: {"ffn_dim": 4 * known["num_heads"] * known["head_dim"], "patch": (1, 1, 1)},
    write_rest=lambda config: {},
    lora_names=LoraNames(blocks=("transformer_blocks.",), projections=("to_q", "to_k", "to_v", "to_out.0")),
    parts=PublishedParts(text={"text_encoder": T5_XXL}),
    published=_published,
    recipe=_recipe,
)
'''
TEST_OF_LOOM = '''
"""Loom: its cases for the tests of all families, and a reference, since Diffusers has no class of it."""

from __future__ import annotations

import torch

from app.export.parity import our_velocity, parity_sample, their_velocity
from ops.models.load import build_dit
from ops.models.loom.config import LoomConfig
from ops.models.ltx.config import LTXConfig
from tests.families.kit import FamilyCases, small, their_class, whole

CASES = FamilyCases(
    variants={"": small(LoomConfig)},
    models={"": whole(LoomConfig(num_layers=2, num_heads=12, head_dim=4, ffn_dim=192))},
    presets={"loom-2b": 1.92},
    lora=("attn1.to_out.0", "attn2.to_k"),
)


def test_loom_computes_as_ltx_does() -> None:
    config = small(LTXConfig)
    theirs, ours, sample = their_class(config), build_dit(small(LoomConfig), 0), parity_sample(config)
    ours.load_state_dict(theirs.state_dict())
    wanted = their_velocity(theirs, config, sample).detach()
    torch.testing.assert_close(our_velocity(ours, sample), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
'''
OF_ALL_FAMILIES = (
    "tests/ops/test_families.py",
    "tests/ops/test_lora.py",
    "tests/ops/test_train_only.py",
    "tests/ops/test_node_parameters.py",
    "tests/app/test_families_command.py",
)
OF_ALL_OPERATORS = ("tests/ops/test_fused.py", "tests/app/test_bench_ops.py")
OF_THE_WHOLE = ("tests/test_imports.py", "tests/test_names.py", "tests/app/test_config.py")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with a family and an operator more."""
    made = tmp_path_factory.mktemp("tree")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, made / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, made / file)
    add_family(made)
    add_operator(made)
    return made


def add_family(tree: Path) -> list[Path]:
    """Its transformer is LTX-Video's, under another name. Returns the new files."""
    here, there = tree / "ops/models/loom", ROOT / "ops/models/ltx"
    new = {
        here / "__init__.py": "",
        **{here / name: (there / name).read_text() for name in ("config.py", "model.py")},
        here / "family.py": LOOM.lstrip(),
        tree / "configs/models/loom-2b.yaml": (ROOT / "configs/models/ltx-2b.yaml").read_text(),
        tree / "tests/families/test_loom.py": TEST_OF_LOOM.lstrip(),
    }
    copied = ("config.py", "model.py", "loom-2b.yaml")
    names = {"LTX": "Loom", "ltx": "loom"}
    return written({file: renamed(text, names) if file.name in copied else text for file, text in new.items()})


def add_operator(tree: Path) -> list[Path]:
    """That of QK-norm with RoPE, under another name, without the module around it. Returns the new files."""
    here, there = tree / "ops/kernels/twist", ROOT / "ops/kernels/qk_rope"
    new = {here / file.name: file.read_text() for file in there.glob("*.py")}
    new[here / "op.py"] = re.sub(r"class FusedQKNormRope\(.*?\n\n\n(?=\w)", "", new[here / "op.py"], flags=re.DOTALL)
    new[tree / "tests/ops/kernels/test_twist.py"] = (ROOT / "tests/ops/kernels/test_qk_kernels.py").read_text()
    names = {"qk_norm_rope": "twist_heads", "qk_rope": "twist", "QK": "Twist"}
    return written({file: renamed(text, names) for file, text in new.items()})


def renamed(text: str, names: dict[str, str]) -> str:
    for before, after in names.items():
        text = text.replace(before, after)
    return text


def written(files: dict[Path, str]) -> list[Path]:
    for file, text in files.items():
        file.parent.mkdir(exist_ok=True)
        assert not file.exists(), f"{file} is no new file"
        file.write_text(text)
    return list(files)


def passed(tree: Path, chosen: str, files: tuple[str, ...], **environment: str) -> Counter[str]:
    """Tests of each file that ran in the copy; all of them must pass."""
    report = tree / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", chosen]
    done = subprocess.run(
        [*command, *files], cwd=tree, env=os.environ | environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    cases = [case for case in ET.parse(report).iter("testcase") if case.find("skipped") is None]
    return Counter(f"{case.get('classname', '').replace('.', '/')}.py" for case in cases)


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_a_new_family_and_a_new_operator_are_found_and_pass_what_all_of_their_kind_do(tree: Path) -> None:
    of_one_kind = (*OF_ALL_FAMILIES, *OF_ALL_OPERATORS, "tests/families/test_loom.py")
    whole = "rooms or the_map or two_files or another_model_family"
    found = passed(tree, f"loom or twist or {whole}", (*of_one_kind, *OF_THE_WHOLE))
    assert set(found) == {*of_one_kind, *OF_THE_WHOLE}
    assert found["tests/ops/test_families.py"] >= 3, "config.json, LoRA, FLOPs"


@pytest.mark.long
@pytest.mark.timeout(1000)
def test_random_plans_and_interpreted_kernels_find_them_too(tree: Path) -> None:
    files = ("tests/actors/test_exactness.py", "tests/test_dead_code.py")
    assert set(passed(tree, "loom or tests_alone", files)) == set(files)
    kernels = ("tests/ops/kernels/test_twist.py",)
    assert passed(tree, "twist", kernels, TRITON_INTERPRET="1")[kernels[0]] > 5


def test_the_recipes_count_the_files(tmp_path: Path) -> None:
    for folder in ("ops/models", "ops/kernels", "configs/models", "tests/families", "tests/ops/kernels"):
        (tmp_path / folder).mkdir(parents=True)
    recipes = (ROOT / "CONTRIBUTING.md").read_text()
    for name, added in {"model family": add_family(tmp_path), "fused operator": add_operator(tmp_path)}.items():
        files = [file for file in added if file.stat().st_size]  # and an empty __init__.py
        assert f"**A {name}: {len(files)} files.**" in recipes
