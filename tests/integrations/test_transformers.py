"""`ForebayCallback` in transformers' Trainer and in TRL's: they train, save and resume as without it."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

import forebay
import forebay.integrations.transformers
import forebay.models.fused_loss
from forebay.integrations.run import parse_policy
from forebay.managed import unwrap
from forebay.memory.overrides import is_managed
from forebay.policy import PolicyError
from tests.seams.wrapping import LENGTH, VOCABULARY, tiny

pytestmark = pytest.mark.integration

STEPS = 50
_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "seed": 3,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
}
_EVALUATED: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": STEPS // 2}
_LORA = {"target_modules": ["q_proj", "v_proj"], "target_parameters": ["mlp.experts.down_proj"]}


def _texts(count: int, length: int = LENGTH, seed: int = 7) -> list[str]:
    g = torch.Generator().manual_seed(seed)
    return [
        " ".join(f"w{n}" for n in torch.randint(3, VOCABULARY, (length,), generator=g).tolist()) for _ in range(count)
    ]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


def _accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    assert logits.shape[-1] == VOCABULARY, "compute_metrics gets logits"
    return {"accuracy": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).mean())}


def _odd_words(completions: list[str], **_: Any) -> list[float]:
    return [sum(int(word[1:]) % 2 for word in text.split() if word[1:].isdigit()) / 4 for text in completions]


def trainer_of(kind: str, callbacks: list[Any], lora: bool = False, folder: str = "", **options: Any) -> Any:
    """A trainer of a tiny model: "trainer" is transformers', the others are TRL's."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    options = {"max_steps": STEPS, "output_dir": folder or tempfile.mkdtemp(), **_COMMON, **options}
    more: dict[str, Any] = {"model": options.pop("model", None) or tiny(), "callbacks": callbacks}
    peft = pytest.importorskip("peft") if lora else None
    config = peft.LoraConfig(r=2, lora_alpha=4, **_LORA) if lora else None
    if kind == "trainer":
        ids = [_tokenizer()(text).input_ids for text in _texts(12)]
        rows: Any = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row} for row in ids]
        if lora:
            more["model"] = peft.get_peft_model(more["model"], config)
        more |= {"data_collator": default_data_collator, "compute_metrics": _accuracy}
        return Trainer(args=TrainingArguments(**options), train_dataset=rows, eval_dataset=rows[:4], **more)
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    more |= {"processing_class": _tokenizer(), "peft_config": config}
    options["bf16"] = options.get("bf16", False)
    columns: dict[str, list[str]] = {
        "sft": {"text": _texts(12)},
        "dpo": {"prompt": _texts(12, 4), "chosen": _texts(12, 5, 8), "rejected": _texts(12, 6, 9)},
        "grpo": {"prompt": _texts(12, 4)},
    }[kind]
    rows = datasets.Dataset.from_dict(columns)
    more |= {"train_dataset": rows, "eval_dataset": rows.select(range(4))}
    if kind == "sft":
        return trl.SFTTrainer(args=trl.SFTConfig(max_length=LENGTH, **options), **more)
    if kind == "dpo":
        return trl.DPOTrainer(args=trl.DPOConfig(**options), ref_model=None if lora else tiny(), **more)
    options |= {"num_generations": 2, "max_completion_length": 4, "beta": 0.1 if lora else 0.0}
    return trl.GRPOTrainer(args=trl.GRPOConfig(**options), reward_funcs=_odd_words, **more)


def trained(trainer: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}


def figures(trainer: Any) -> list[dict[str, float]]:
    """The rows of the log, without times, Forebay's own, and a count that TRL starts anew when it resumes."""
    rows = [row for row in trainer.state.log_history if "loss" in row or "eval_loss" in row]
    left_out = (
        "step_time",
        "num_tokens",
        "memory/",
        "eval_runtime",
        "eval_samples_per",
        "eval_steps_per",
        "eval_num_tokens",
    )
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


@functools.cache
def plain(kind: str, lora: bool) -> Any:
    """A trainer without Forebay that has trained."""
    trainer = trainer_of(kind, [], lora, **_EVALUATED)
    trainer.train()
    return trainer


def installed(model: Any) -> list[str]:
    """Modules with anything of Forebay's on the instance."""
    return [path for path, m in model.named_modules() if any("forebay" in name for name in vars(m))]


def callback(policy: Any, **options: Any) -> Any:
    return forebay.ForebayCallback(policy, min_bytes=1, **options)


# With all policies, the trainer whose forward Forebay replaces in part.
_CASES = [
    (kind, lora, "offload" if lora else "recompute") for kind in ("trainer", "sft", "dpo") for lora in (False, True)
]
_CASES += [("grpo", True, "recompute"), ("sft", False, "keep"), ("sft", True, "keep"), ("sft", True, "recompute")]


@pytest.mark.parametrize(("kind", "lora", "policy"), _CASES)
def test_training_is_that_without_forebay(kind: str, lora: bool, policy: str) -> None:
    """The weights, and every figure of 50 steps and two evaluations that the trainer logs, also of tokens that it samples.

    TRL's trainers checkpoint gradients by default. Forebay's experts sum in another order, so equality is to rounding.
    """
    trainer = trainer_of(kind, [mine := callback(policy)], lora, gradient_checkpointing=True, **_EVALUATED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    assert not [str(w.message) for w in caught if "forebay" in str(w.message).lower()]
    without = plain(kind, lora)
    assert len(figures(trainer)) == STEPS + 2
    for ours, theirs in zip(figures(trainer), figures(without), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-5)
    assert trained(trainer).keys() == trained(without).keys()
    for name, weight in trained(without).items():
        torch.testing.assert_close(trained(trainer)[name], weight, rtol=0, atol=1e-5)
    assert policy in mine.plan and (mine.memory.report().moved_bytes > 0) is (policy == "offload")
    # What TRL put around the model's forward calls an inactive one of Forebay's.
    inner, _ = unwrap(trainer.model)
    assert installed(inner) == ([] if kind == "trainer" else [""]) and not is_managed(inner)
    assert trainer.model.is_gradient_checkpointing, "as the trainer left it"


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "grpo"])
def test_placements_change_no_bit(kind: str) -> None:
    """With the model's own experts and loss."""
    trainer = trainer_of(
        kind, [mine := callback("offload", offload="all", experts=None, loss=None)], True, **_EVALUATED
    )
    trainer.train()
    without = plain(kind, True)
    assert figures(trainer) == figures(without)
    assert all(torch.equal(trained(trainer)[n], weight) for n, weight in trained(without).items())
    assert mine.memory.report().moved_bytes > 0


def test_options() -> None:
    """They are those of `forebay.manage`, and are checked when the callback is made."""
    forebay.ForebayCallback("keep", compile=True, attention=None)
    with pytest.raises(PolicyError, match="attention='flash' is unknown; valid are 'flex' and None"):
        forebay.ForebayCallback("keep", attention="flash")


def test_a_mapping_leaves_layers_that_it_keeps_under_gradient_checkpointing() -> None:
    mine = callback({"*.0.mlp": "offload"}, offload="all")
    trainer = trainer_of("trainer", [mine], gradient_checkpointing=True, max_steps=2)
    calls = [0, 0]
    for number, layer in enumerate(trainer.model.model.layers):

        def count(*_: Any, number: int = number) -> None:
            calls[number] += 1

        layer.self_attn.o_proj.register_forward_hook(count)
    with pytest.warns(UserWarning, match="gradient checkpointing of transformers is on for 1 layer in"):
        trainer.train()
    assert calls == [2, 4] and mine.plan == "3 keep, 1 offload"


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "grpo"])
def test_resume_is_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    options = {"lora": True, "folder": str(tmp_path), "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    whole = trainer_of(kind, [callback("recompute")], **options)
    whole.train()
    resumed = trainer_of(kind, [callback("recompute")], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert figures(resumed) == figures(whole) and len(figures(whole)) == 6
    assert all(torch.equal(trained(resumed)[n], weight) for n, weight in trained(whole).items())


def test_a_managed_model_is_saved_as_ever(tmp_path: Path) -> None:
    trainer = trainer_of("trainer", [callback("offload")], folder=str(tmp_path), max_steps=2, save_strategy="epoch")
    trainer.train()
    loaded = type(trainer.model).from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(weight, trained(trainer)[n]) for n, weight in loaded.named_parameters())


@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_the_fused_loss_runs_inside_of_mixed_precision(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` replaces the model's forward before training begins."""
    dtypes: list[torch.dtype] = []
    fused = forebay.models.fused_loss.linear_cross_entropy

    def counted(hidden: Tensor, *args: Any, **options: Any) -> Tensor:
        dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype)
        return fused(hidden, *args, **options)

    monkeypatch.setattr(forebay.models.fused_loss, "linear_cross_entropy", counted)
    losses = []
    for callbacks in ([], [callback("offload")]):
        trainer = trainer_of("trainer", callbacks, lora, max_steps=4, bf16=True)
        trainer.train(), trainer.train()  # the second one begins with a forward that is wrapped already
        losses.append([row["loss"] for row in figures(trainer)])
    assert dtypes == [torch.bfloat16] * 8
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-2, atol=0)  # of bf16


@pytest.mark.parametrize(("lora", "loss", "calls"), [(True, "fused", 8), (False, "fused", 0), (True, None, 0)])
def test_log_probabilities_of_sft(lora: bool, loss: Any, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forebay's where the head is frozen, in training alone, under mixed precision, and in a second `train` too. The test above
    shows that the figures are TRL's."""
    seen: list[torch.dtype] = []
    ours = forebay.integrations.transformers.linear_log_probs

    def counted(hidden: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype)
        return ours(hidden, *args, **options)

    monkeypatch.setattr(forebay.integrations.transformers, "linear_log_probs", counted)
    rows = []
    for callbacks in ([], [callback("offload", loss=loss)]):
        trainer = trainer_of("sft", callbacks, lora, max_steps=4, bf16=True)
        theirs = unwrap(trainer.model)[0].forward
        trainer.train(), trainer.evaluate(), trainer.train()
        assert theirs.__func__ is unwrap(trainer.model)[0].forward.__func__ or not lora, "TRL's forward is back"
        rows.append(figures(trainer))
    assert seen == [torch.bfloat16] * calls
    for theirs, mine in zip(*rows, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2, abs=0.1)  # of bf16; an accuracy may differ by one token of 20


class _Reporter(TrainerCallback):
    """What a reporting integration gets; `fails` raises in the first step."""

    def __init__(self, fails: bool = False):
        self.seen: list[dict[str, Any]] = []
        self.fails = fails

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append(dict(logs))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.fails:
            raise RuntimeError("no space left")


def test_figures_are_in_the_log_and_reach_reporters_that_come_first() -> None:
    reporter = _Reporter()
    trainer = trainer_of("trainer", [reporter, callback("auto", budget="1GiB")], max_steps=4, logging_steps=2)
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == 2 and [r["memory/offloaded"] for r in reporter.seen] == [0.0] * 3
    for row, seen in zip(rows, reporter.seen, strict=False):
        assert 0.05 < row["memory/peak"] < 50 and row["memory/peak"] == seen["memory/peak"]  # GiB of this process
    assert [r.get("memory/plan") for r in reporter.seen] == [None, "4 keep", None]
    assert [row["step"] for row in rows] == [2, 4]
    measured = trainer.evaluate()
    assert not [name for name in measured if name.startswith("memory/")]


def test_after_an_exception_the_model_is_usable_and_trains_again() -> None:
    reporter = _Reporter(fails=True)
    trainer = trainer_of("trainer", [mine := callback("offload"), reporter], max_steps=3)
    with pytest.raises(RuntimeError, match="no space left"):
        trainer.train()
    assert is_managed(trainer.model) and trainer.evaluate()["eval_loss"] > 0
    other = trainer_of("trainer", [callback("recompute")], max_steps=1, model=trainer.model)
    other.train()  # another trainer's callback takes the model over
    assert not installed(trainer.model)
    reporter.fails = False
    trainer.train()
    assert not installed(trainer.model) and mine.memory.report().moved_bytes > 0
    mine.detach()


def test_an_error_while_the_callback_installs_itself_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("no such closure")

    trainer = trainer_of("trainer", [callback("offload")], max_steps=1, gradient_checkpointing=True)
    with monkeypatch.context() as patched:
        patched.setattr(forebay.integrations.transformers, "_install_log_probs", fails)
        with pytest.raises(RuntimeError, match="no such closure"):
            trainer.train()
    assert not installed(trainer.model) and all(layer.gradient_checkpointing for layer in trainer.model.model.layers)
    trainer.train()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "offlaod"}, "'offlaod' is unknown; valid are keep"),
        ({"policy": {"*.mlp": "keeep"}}, "placement 'keeep' is unknown"),
        ({}, "policy='auto' needs a budget"),
        ({"policy": "recompute", "budget": "1GiB"}, "nothing is left to decide"),
        ({"policy": "offload", "budget": "much"}, "'much' is no size"),
        ({"policy": "keep", "compiled": True}, "no option 'compiled'; the nearest valid option is 'compile'"),
        ({"policy": "keep", "dispatcher": None}, "no option 'dispatcher'"),
        ({"polciy": "keep"}, "the nearest valid option is 'policy'"),
        ({"policy": {"*.mlp": "stash"}}, "ForebayCallback has no 'stash'"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(forebay.PolicyError, match=message):
        forebay.ForebayCallback(**arguments)


def test_what_cannot_be_managed_is_refused_before_the_first_step() -> None:
    with pytest.raises(forebay.PolicyError, match="'70GiB' limits GPU memory, and this process has no GPU"):
        trainer_of("trainer", [callback("auto", budget="70GiB")], use_cpu=False)
    for callbacks, message in (
        ([callback("keep"), callback("offload")], "two ForebayCallbacks"),
        ([callback({"*.nothing": "offload"})], "matches no module"),
    ):
        trainer = trainer_of("trainer", callbacks, gradient_checkpointing=True)
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0 and not installed(trainer.model)
        assert trainer.model.is_gradient_checkpointing
    trainer = trainer_of("trainer", [callback("keep")])
    with forebay.manage(trainer.model), pytest.raises(ValueError, match="managed already"):
        trainer.train()


# --- forebay run -------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8)
config = Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, vocab_size=16)
rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
args = TrainingArguments("out", max_steps=1, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no")
Trainer(Qwen3MoeForCausalLM(config), args, train_dataset=rows).train()
sys.exit(int(sys.argv[1]))
"""


def forebay_run(folder: Path, *command: str, policy: str = "offload") -> subprocess.CompletedProcess[str]:
    """`forebay run --policy POLICY -- COMMAND` in `folder`, where another `sitecustomize` is on the path."""
    (folder / "sitecustomize.py").write_text("print('the hidden one')")
    path = os.pathsep.join([str(Path(forebay.__file__).parents[1]), str(folder)])
    arguments = [sys.executable, "-m", "forebay", "run", "--policy", policy, "--", *command]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_forebay_run_manages_the_trainer_of_a_child_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = f"import subprocess; raise SystemExit(subprocess.run([{sys.executable!r}, 'train.py', '5']).returncode)"
    done = forebay_run(tmp_path, sys.executable, "-c", launcher)
    assert done.returncode == 5, done.stderr
    line = "forebay run: Qwen3MoeForCausalLM is managed with policy 'offload', in 2 regions"
    assert done.stderr.count("forebay run:") == 1 and line in done.stderr
    assert "'memory/plan': '" in done.stdout and done.stdout.count("the hidden one") == 3  # with that of forebay itself


def test_forebay_run_says_if_there_was_no_trainer(tmp_path: Path) -> None:
    show = (
        "import os, sys, signal; print([m for m in sys.modules if m.startswith(('torch', 'transformers', 'forebay'))])"
    )
    done = forebay_run(tmp_path, sys.executable, "-c", show)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]"
    assert "forebay run: no Trainer was started by" in done.stderr
    killed = forebay_run(tmp_path, sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert killed.returncode == -signal.SIGTERM


def test_forebay_run_does_not_deny_a_trainer_that_it_refuses(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = forebay_run(tmp_path, sys.executable, "train.py", "0", policy="*.nothing=offload")
    assert done.returncode == 1 and "pattern '*.nothing' matches no module" in done.stderr
    assert "no Trainer was started" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "keep"], "needs a command"),
        (["--policy", "keep", "--", ""], "needs a command"),
        (["--policy", "keep", "--", "no-such-program"], "'no-such-program' cannot be run: No such file"),
        (["--", "true"], "--policy auto needs --budget"),
        (["--budget", "1GiB", "--policy", "some", "--", "true"], "'some' is unknown; valid are keep"),
        (["--policy", "*.mlp=away", "--", "true"], "placement 'away' is unknown"),
        (["--policy", "keep", "--policy", "*.mlp=offload", "--", "true"], "--policy keep is for all regions"),
        (["--policy", "offload", "--budget", "x", "--", "true"], "'x' is no size"),
        (["--policy", "offload", "--budget", "1GiB", "--", "true"], "--budget 1GiB needs --policy auto"),
    ],
)
def test_forebay_run_refuses(run: Any, arguments: list[str], message: str) -> None:
    code, _, said = run("run", *arguments)
    assert code == 2 and message in said


def test_forebay_run_takes_patterns() -> None:
    assert parse_policy(["*.self_attn=offload", "*.mlp=keep"]) == {"*.self_attn": "offload", "*.mlp": "keep"}
    later = parse_policy(["*.mlp=keep", "*.layers.0.mlp=offload", "*.mlp=recompute"])
    assert list(later.items()) == [("*.layers.0.mlp", "offload"), ("*.mlp", "recompute")]
    for stash in (["stash"], ["*.mlp=stash"]):
        with pytest.raises(PolicyError, match="forebay run has no 'stash'"):
            parse_policy(stash)
    assert parse_policy(["auto"]) == "auto"
