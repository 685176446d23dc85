"""`heddle settings --of`: what files of other trainers say, and where it stands here."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.settings.config import RunConfig
from app.settings.elsewhere import _OTHERWISE, _THEIRS, DONE_OTHERWISE, ELSEWHERE, IN_FILES
from app.settings.reference import reference
from app.settings.theirs import Theirs, as_text, read_theirs, translated
from ops.typed import ConfigError, dotted_names

SECTIONS = reference(RunConfig)
FILES = {
    "a.toml": """
lr = 2e-5
[optimizer]
type = "muon"
[[directory]]
num_repeats = 2
[[directory]]
num_repeats = 5
""",
    "a.yaml": """
train: {learning_rate: 2.0e-5}
optimizer: {type: muon}
directory: [{num_repeats: 2}, {num_repeats: 5}]
""",
    "a.json": '{"lr": 2e-5, "optimizer": {"type": "muon"}, "directory": [{"num_repeats": 2}, {"num_repeats": 5}]}',
    "a.py": """
import math
lr = 2e-5
optimizer = dict(type="muon")
directory = [dict(num_repeats=2)]
num_repeats = 2 * math.pi
""",
    "a.sh": """
# lr=1 --lr 9
accelerate launch train.py \\
  --lr 2e-5 --optimizer-type=muon \\
  --num_repeats 2 --no_such x y
""",
}


def here(name: str, value: object = 1) -> str:
    return translated(Theirs(name=name, value=value), SECTIONS).here


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    told = [translated(one, SECTIONS) for one in read_theirs(tmp_path / name)]
    places = [one.here.partition(" (")[0] for one in told]
    assert [place for place in places if place][:2] == ["train.optimizer.learning_rate", "train.optimizer.kind"]
    assert places.count("data.sources") == 1, "an entry of a list stands for all"
    values = {one.here: one.theirs.value for one in told}
    assert values["train.optimizer.kind"] == "muon"
    assert float(str(values["train.optimizer.learning_rate"])) == 2e-5


def test_switches_and_values_of_several_words_and_programs_between(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("torchrun --nproc_per_node=8 train.py --use-ema --betas 0.9 0.99 -x --out '/a b'\n")
    found = {one.name: one.value for one in read_theirs(script)}
    assert found == {"nproc_per_node": "8", "use-ema": True, "betas": "0.9 0.99", "x": True, "out": "/a b"}


def test_a_command_ends_where_the_shell_ends_it(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "cat <<END\nit's a text\nEND\n"
        "python cache.py --batch_size 16 && echo cached\n"
        "accelerate launch train.py --out dir 2>&1 | tee log.txt\n"
        "python more.py --lr 1e-4; echo done  # --lr 2\n"
    )
    found = {one.name: one.value for one in read_theirs(script)}
    assert found["batch_size"] == "16" and found["lr"] == "1e-4" and set(found) == {"batch_size", "out", "lr"}
    assert str(found["out"]).split()[0] == "dir" and "tee" not in str(found["out"])


def test_what_the_shell_does_itself_is_no_setting(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "set -e -x\nset -o pipefail\nmkdir -p out && cp -r a b\nif [ -z $GPUS ]; then set -u; fi\n"
        "export WANDB_MODE=offline\nNCCL_DEBUG=INFO python train.py --lr 1e-4 -x 1\n"
        "git clone --depth 1 a\nsudo apt-get install -y b && wget -O c d\npython3 -m pip install -U e\n"
        "hf download --local-dir f g\nnohup tensorboard --logdir h &\n"
        "sudo -E /usr/bin/python3.11 -u -m wan.train --steps 9\n"
        "options=(\n  --container tar --fps 16\n)\n"
    )
    found = {one.name: one.value for one in read_theirs(script)}
    assert found == {"lr": "1e-4", "x": "1", "steps": "9", "container": "tar", "fps": "16"}


def test_an_option_does_not_take_what_stands_for_others_or_follows_the_program(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "model_cmd=(\n  --model_name wan\n)\n"
        'torchrun --nnodes=1 --nproc_per_node $GPUS "${parallel_cmd[@]}" "${model_cmd[@]}" $@\n'
        "torchrun --rdzv_endpoint=localhost:19242 train.py '${model_cmd[*]}' data.yaml --lr 1 --config=a.py\n"
    )
    found = {one.name: one.value for one in read_theirs(script)}
    assert found == {
        "model_name": "wan",
        "nnodes": "1",
        "nproc_per_node": "$GPUS",
        "rdzv_endpoint": "localhost:19242",
        "lr": "1",
        "config": "a.py",
    }


PRODIGY = """
optimizer_type = "prodigyopt.Prodigy"
learning_rate = 1.0
optimizer_args = [
  "decouple=True", "weight_decay=0.01", "d_coef=2", "betas=0.9,0.99", "safeguard_warmup=True", "slice_p=11"
]
"""
ADDED = "--optimizer_type prodigy --optimizer_args decouple=True 'd_coef = 2' use_bias_correction=True growth_rate=1.02"


def test_arguments_of_an_optimizer_are_settings_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(PRODIGY)
    (tmp_path / "a.sh").write_text(f"python train.py {ADDED.replace(' = ', '=')}\n")
    told = {one.theirs.name: one for one in (translated(one, SECTIONS) for one in read_theirs(tmp_path / "a.toml"))}
    assert told["optimizer_type"].here == "train.optimizer.kind", "without a word of what is not there"
    assert told["optimizer_args.decouple"].here.startswith("weight decay is always decoupled")
    assert told["optimizer_args.weight_decay"].here == "train.optimizer.weight_decay"
    assert (told["optimizer_args.d_coef"].here, told["optimizer_args.d_coef"].theirs.value) == (
        "train.optimizer.prodigy.d_coef",
        "2",
    )
    assert told["optimizer_args.betas"].here == "train.optimizer.betas"
    assert told["optimizer_args.safeguard_warmup"].here == "train.optimizer.prodigy.safeguard_warmup"
    assert told["optimizer_args.slice_p"].here.startswith("Prodigy's sums are of all weights")
    found = {one.name: one.value for one in read_theirs(tmp_path / "a.sh")}
    assert found["optimizer_args.d_coef"] == "2" and found["optimizer_args.growth_rate"] == "1.02"
    assert (
        here("optimizer_args", "fused")
        == "train.optimizer (betas, adam_eps and weight_decay; of Prodigy train.optimizer.prodigy)"
    )


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"lr": 1}')
    assert [one.name for one in read_theirs(tmp_path / "a.json")] == ["lr"]


def test_a_name_is_looked_up_with_the_word_before_it_and_by_our_own() -> None:
    assert here("zero_optimization.offload_optimizer.device") == "train.memory.state"
    assert here("optimizer.type", "adamw") == "train.optimizer.kind"
    assert "AdamW's is sharded over all workers" in here("optimizer_type", "adamw8bit")
    assert here("tensor-model-parallel-size").startswith("layers and their matrices are not split")
    assert here("lora_alpha") == "model.dit.lora_alpha" and here("logit_mean") == "train.flow.logit_mean"
    assert here("num_cpu_threads_per_process") == ""


def test_names_and_values_of_finetrainers_and_diffusion_pipe_have_their_places(tmp_path: Path) -> None:
    for name, value, place in (
        ("optimizer", "adamw", "train.optimizer.kind"),
        ("flow_weighting_scheme", "logit_normal", "train.flow.weighting_scheme"),
        ("training_type", "lora", "model.dit.lora_rank (0: in full)"),
        ("eval_before_first_step", True, "validation.first"),
        ("checkpoint_every_n_minutes", 120, "checkpoint.every (in steps)"),
        ("monitoring.wandb_tracker_name", "x", "track (wandb, which takes WANDB_PROJECT from the environment)"),
        ("optimizer.type", "adamw_optimi", "train.optimizer.kind"),
        ("optim", "adamw_torch", "train.optimizer.kind"),
    ):
        assert here(name, value) == place
    assert "AdamW's is sharded over all workers" in here("optimizer.type", "AdamW8bitKahan")
    (tmp_path / "a.toml").write_text("[optimizer]\ntype = 'adamw_optimi'\nlr = 2e-5\n")
    assert [one.name for one in read_theirs(tmp_path / "a.toml")] == ["optimizer.type", "optimizer.lr"]


def test_names_of_files_lead_to_settings_that_exist() -> None:
    assert not IN_FILES.keys() & {*ELSEWHERE, *DONE_OTHERWISE}, "which have the answer already"
    assert len(ELSEWHERE) == sum(len(theirs.split()) for theirs in _THEIRS.values()), "each has one place"
    assert len(DONE_OTHERWISE) == sum(len(theirs.split()) for theirs in _OTHERWISE), "and here"
    known = {name.replace(".N", "") for name in dotted_names(RunConfig)}
    for place in (place.partition(" (")[0] for place in IN_FILES.values()):
        assert " " in place or any(f"{name}.".startswith(f"{place}.") for name in known), place


def test_the_command_shows_them_beside_each_other_and_names_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"max_train_steps": 1600, "tp_size": 2, "odd": {"name-of-mine": "x"}, "vae": 1}')
    done = CliRunner().invoke(app, ["settings", "--of", str(tmp_path / "a.json")], env={"COLUMNS": "70"})
    assert done.exit_code == 0, done.output
    assert "max_train_steps = 1600  train.steps\n" in done.output
    assert "1 name that nothing here is called: odd.name-of-mine" in done.output
    assert max(map(len, done.output.splitlines())) <= 70
    assert as_text([]) == ""
    assert CliRunner().invoke(app, ["settings", "--of", "a.json", "--schema"]).exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.toml", "a = [", "cannot be read as toml"),
        ("a.json", "{", "cannot be read as json"),
        ("a.yaml", "a: [", "cannot be read as yaml"),
        ("a.py", "a = (", "cannot be read as py"),
        ("a.sh", "echo --a 'x", "cannot be read as sh"),
        ("a", "echo hello", "has no settings"),
        ("a.json", "[1]", "has no settings"),
        ("a.toml", None, "does not exist"),
        ("a.toml", b"\xff\xfe", "cannot be read as text"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path: Path, name: str, text: str | bytes | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_theirs(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name)) and str(caught.value).endswith(".")
