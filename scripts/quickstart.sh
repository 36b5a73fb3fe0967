#!/usr/bin/env bash
# Install into .venv and train a small Llama on long-tailed text, on all GPUs or on two CPU processes:
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --max_steps 20 --planner static --sp_degree 2     # any option of recipes/sft.py
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
use_environment recipes

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
    launch=(--config_file recipes/accelerate_configs/ddp.yaml --num_processes "$gpus")
else
    launch=(--config_file recipes/accelerate_configs/cpu.yaml)
    # Two processes share the cores; more threads than cores would stand in each other's way.
    cores=$(python -c 'import os; print(os.cpu_count())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 3 ? cores / 2 : 1))}
fi
exec accelerate launch "${launch[@]}" --main_process_port 0 recipes/sft.py \
    --config recipes/quickstart/small_llama.yaml "$@"
