"""Every file in examples/ does what it says, on the miniature run."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import tiny_run
import torch
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.config import dump_toml, load_config
from lightrl.distributed.mesh import close_world
from lightrl.training.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "notebook.ipynb"
AGENTS = ("guess", "multi_agent", "outside", "retool", "search")


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    known = {"custom_reward.py", "load_export.py", "manual_loop.py", "notebook.ipynb", *AGENTS}
    assert {p.name for p in EXAMPLES.iterdir() if not p.name.startswith((".", "__"))} == known


@pytest.mark.parametrize("name", AGENTS)
def test_agents(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of each on a random model; what it says is chance, so that every way out of an episode is taken."""
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(str(EXAMPLES.parent))
    tiny_run.make_model(tmp_path / "model", max_position_embeddings=2048)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 4, 5, 6, 7]}))
    tiny_run.make_data(tmp_path / "data.jsonl")
    own_data = {} if name not in ("multi_agent", "outside") else {"data": {"path": str(tmp_path / "data.jsonl")}}
    config = load_config(
        EXAMPLES / name / "run.toml",
        run={"dir": str(tmp_path / "run"), "steps": 1, "device": "cpu"},
        model={"path": str(tmp_path / "model"), "compute_dtype": "float32"},
        rollout={"prompts_per_step": 2, "group_size": 4},
        optim={"warmup_steps": 0},
        log={"trackers": ["jsonl"], "print_samples": 0},
        **own_data,
    )
    trainer = Trainer(config)
    metrics = trainer.train()
    trainer.close()
    assert metrics["agent/episodes"] == 8
    assert metrics["agent/failed"] == 0
    assert metrics["agent/turns"] >= (3 if name == "multi_agent" else 1)
    assert metrics["rollout/failed_share"] == 0


def test_custom_reward(capsys: pytest.CaptureFixture[str]) -> None:
    """`42` in one token: 0.8 + 0.2; 42 after 42 words: 0.8 + 0.2 x 20 / 42; 43 is wrong."""
    load_example("custom_reward").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1.000", f"{0.8 + 0.2 * 20 / 42:.3f}", "0.000"]


@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"max_tokens_per_microbatch": 40}},
        {
            "algorithm": {"minibatches_per_step": 2, "aggregation": "sequence_mean", "normalize_std": False},
            "optim": {"lr": 3e-3, "schedule": "linear", "warmup_steps": 1},
        },
    ],
    ids=["one-update", "two-updates"],
)
def test_manual_loop_is_the_trainers_step(tmp_path: Path, sections: dict[str, dict[str, object]]) -> None:
    """Weights after two steps are equal to the last bit, and are not those of the start."""
    config = tiny_run.make_run(tmp_path, **sections)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    trainer = Trainer(config)
    start = {name: tensor.clone() for name, tensor in trainer.policy.lend()}
    for _ in range(2):
        trainer.step(trainer.source.next(config.rollout.prompts_per_step))
    expected = {name: tensor.clone() for name, tensor in trainer.policy.lend()}
    trainer.close()
    policy = load_example("manual_loop").main(str(file), steps=2)
    found = dict(policy.lend())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(expected[name], start[name]) for name in expected)
    close_world()


@pytest.mark.parametrize("words", [[], ["run.toml", "many"], ["run.toml", "1", "2"]])
def test_manual_loop_says_how_it_is_called(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["manual_loop.py", *words])
    with pytest.raises(SystemExit, match=r"usage: python examples/manual_loop.py CONFIG \[STEPS\]"):
        runpy.run_path(str(EXAMPLES / "manual_loop.py"), run_name="__main__")


def test_load_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers are those of greedy decoding, step by step, with the tokenizer's own template."""
    example = load_example("load_export")
    folder = tiny_run.make_model(tmp_path / "export")
    example.main(str(folder))
    lines = capsys.readouterr().out.splitlines()
    assert [line[:16].strip() for line in lines] == example.SUMS
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Answer with a number only."}, {"role": "user", "content": "X"}]
    for question, line in zip(example.SUMS, lines, strict=True):
        messages[1]["content"] = question
        ids = tokenizer(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)).input_ids
        answer: list[int] = []
        while len(answer) < 12 and (not answer or answer[-1] != tokenizer.eos_token_id):
            with torch.no_grad():
                answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
        assert line[17:] == tokenizer.decode(answer, skip_special_tokens=True)


def test_notebook_is_stripped() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert all(not c.outputs and c.execution_count is None for c in notebook.cells if c.cell_type == "code")
    assert NOTEBOOK.stat().st_size < 20_000


def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells, with the first code cell (tagged `parameters`) replaced by the miniature model and data."""
    tiny_run.make_model(tmp_path / "model")
    tiny_run.make_data(tmp_path / "data.jsonl")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    parameters.source = (
        f"from pathlib import Path\nROOT = Path({str(tmp_path)!r})\n"
        "MODEL, DATA, RUN = ROOT / 'model', ROOT / 'data.jsonl', ROOT / 'run'\n"
        "CHAT = False\nSTEPS, PROMPTS, GROUP = 3, 4, 4\n"
    )
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", os.environ.get("MPLCONFIGDIR", str(tmp_path / "matplotlib")))
    kernels = tmp_path / "kernels" / "kernels" / "this"  # this very interpreter, whatever kernels are installed
    kernels.mkdir(parents=True)
    spec = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "this",
        "language": "python",
    }
    (kernels / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "kernels"))
    with tempfile.TemporaryDirectory(prefix="nb") as short:  # sockets in files: no port is opened; names are limited
        manager = AsyncKernelManager(kernel_name="this", transport="ipc", ip=f"{short}/k")
        resources = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(notebook, km=manager, timeout=300, resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    for step in (1, 2, 3):
        assert f"step {step}  reward " in printed
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert f"{sum(p.numel() for p in exported.parameters()):,} parameters" in printed
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 1
