#!/usr/bin/env bash
# install.sh FOLDER PYTHON [PIP ARGUMENTS…]: an environment in FOLDER for tests on the real SGLang, on a CPU.
# The kernels SGLang wants are built for CUDA only; its CPU engine does without them, but not without their names: tests
# put `stubs/` on the path.
set -euo pipefail
folder=$1 python=$2
shift 2
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv --clear "$folder"
"$folder/bin/python" -m pip --disable-pip-version-check install -qq --no-deps "$@" -r "$here/../../constraints-sglang.txt"

# SGLang 0.5.17 registers this configuration, which transformers has had itself since 5.13, and fails at import.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sed -i -E 's/^(AutoConfig\.register\("qwen3_asr.*[^)])\)$/\1, exist_ok=True)/' "$site/sglang/srt/configs/qwen3_asr.py"

PYTHONPATH="$here/stubs" SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" -W ignore -c 'import sglang.srt.entrypoints.engine'
