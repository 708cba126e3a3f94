"""`lightrl doctor`: versions that go together, and what it says where something is broken."""

from __future__ import annotations

import sys
import types

import pytest
from test_cli import run


def test_doctor_judges_versions() -> None:
    from lightrl.doctor import sglang_finding, version_finding

    states = {
        ("torch", "2.10.9"): "problem",
        ("torch", "2.11.0+cu130"): "ok",
        ("torch", "2.14.1"): "ok",
        ("torch", "2.15.0"): "note",
        ("transformers", "5.9.0"): "problem",
        ("transformers", "5.24.1"): "ok",
        ("datasets", "1.0"): "ok",
        ("datasets", None): "problem",
    }
    assert {key: version_finding(*key).state for key in states} == states
    sglang = {version: sglang_finding(version) for version in ("0.5.16", "0.5.17", "0.5.23", "0.5.24")}
    assert [finding.state for finding in sglang.values()] == ["problem", "ok", "ok", "problem"]
    assert "supported are 0.5.17 to 0.5.23" in sglang["0.5.24"].meaning
    assert "run on CPUs only so far" in sglang["0.5.23"].meaning
    assert "CPUs only" not in sglang["0.5.17"].meaning


def test_doctor_survives_what_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "lightrl.training.policy", types.ModuleType("broken"))
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("OMP_WAIT_POLICY", "s3cret")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    assert run("doctor") == 0
    shown = capsys.readouterr().out
    assert "check failed" in shown
    assert "shares the policy's weights" in shown
    for package in ("torch", "transformers", "sglang", "flash-attn-4", "flash-linear-attention", "wandb"):
        assert package in shown
    assert "s3cret" not in shown
