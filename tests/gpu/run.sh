#!/usr/bin/env bash
# Check the CUDA provider on a machine with a GPU: bash tests/gpu/run.sh [python]
#
# The python must have ortkv's dependencies, onnxruntime-gpu (pip install 'ortkv[gpu]'), pytest and
# hypothesis. Runs the tests marked `gpu`, then times both providers on the shipped model.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import onnxruntime as ort; print("onnxruntime", ort.__version__, ort.get_available_providers())'
"$python" -m pytest tests/gpu -m gpu -rA
"$python" -m ortkv bench models/shakespeare-onnx --providers cpu,cuda --json
